"""Show the weight and the tokens of each phrase of a file, and which are too common to help.

The tokens are those of an engine's tokenizer.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve.cli.options import add_config
from serve.cli.outputs import print_table
from serve.contract.config import load_config
from serve.contract.files import read_text
from serve.contract.phrases import MAX_PHRASES

_COMMON = "common: it is one token, so it needs no boost and may appear where it is not said"
_SHORT = 2  # characters; boosting so short a phrase may insert it anywhere


def add_parser(commands: Any) -> None:
    title = "show the tokens of phrases, and which phrases are too common to help"
    parser = commands.add_parser("phrases", help=title, description=__doc__)
    parser.set_defaults(run=_run)
    add_config(parser)
    lines = f'one phrase per line, at most {MAX_PHRASES}; "Karenina^2" has weight 2, others 1'
    parser.add_argument("file", type=Path, metavar="FILE", help=lines)


def _run(args: argparse.Namespace) -> int:
    from serve.contract.engine import open_engine  # noqa: PLC0415 - loads torch
    from serve.speech.tokenizer import Tokenizer  # noqa: PLC0415 - loads torch
    from serve.transcriber.prompts import split_weight, trie_of  # noqa: PLC0415 - loads torch

    config = load_config(args.config)
    tokenizer = Tokenizer(open_engine(args.engine or config.engine))
    lines = read_text(args.file, "expected one phrase per line").splitlines()
    phrases = [line for line in lines if line.strip()]
    trie = trie_of(tuple(phrases), tokenizer)
    pairs = [split_weight(phrase) for phrase in phrases]
    ids = tokenizer.phrases_ids("phrases", [text for text, _ in pairs])
    rows = list[tuple[str, ...]]()
    for (text, weight), ways in zip(pairs, ids, strict=True):
        tokens = "|".join(tokenizer.decode([id]) for id in ways[0])
        rows.append((text, f"{weight:g}", tokens, _complaint(text, ways[0])))
    print_table(rows)
    edges = 0 if trie is None else len(trie.tokens)
    print(f"{len(phrases)} phrases, {edges} tokens in all spellings")
    return 0


def _complaint(text: str, ids: Sequence[int]) -> str:
    """Return the reason not to boost a phrase, or ""."""
    if len(text) <= _SHORT:
        return "short: it may appear where it is not said"
    return _COMMON if len(ids) == 1 else ""
