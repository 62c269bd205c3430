"""`python -m serve phrases`: shows how phrases fall into tokens, and which are of no use."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve.cli.options import add_config
from serve.contract.config import load_config
from serve.contract.files import read_text
from serve.contract.phrases import MAX_PHRASES

if TYPE_CHECKING:
    from serve.speech.tokenizer import Tokenizer

_COMMON = "common: it is one token, which comes by itself and may come where it is not said"
_SHORT = 2  # letters of a phrase that says next to nothing


def add_parser(commands: Any) -> None:
    """Add the command, among those of `python -m serve`."""
    parser = commands.add_parser(
        "phrases",
        help="show how phrases fall into tokens, and which are too common to help",
        description="Show how each phrase of a file falls into an engine's tokens, with its "
        "weight, and which are too common to help.",
    )
    parser.set_defaults(run=_run)
    add_config(parser)
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help=f'a phrase a line, at most {MAX_PHRASES}; "Karenina^2" has weight 2, and others 1',
    )


def _run(args: argparse.Namespace) -> int:
    from serve.contract.engine import open_engine  # noqa: PLC0415 - loads torch
    from serve.speech.tokenizer import Tokenizer  # noqa: PLC0415 - loads torch

    config = load_config(args.config)
    tokenizer = Tokenizer.open(open_engine(args.engine or config.engine))
    lines = read_text(args.file, "expected a phrase a line").splitlines()
    print(described([line for line in lines if line.strip()], tokenizer), end="")
    return 0


def described(phrases: Sequence[str], tokenizer: "Tokenizer") -> str:
    """Write a line for each phrase: weight, tokens behind a space, and what is wrong with it.

    Raises:
        OptionError: one is no phrase or holds special tokens, or all have too many tokens.
    """
    from serve.transcriber.phrases import trie_of, weighted  # noqa: PLC0415 - loads torch

    trie = trie_of(tuple(phrases), tokenizer)
    pairs = [weighted(phrase) for phrase in phrases]
    texts = [text for text, _ in pairs]
    rows = list[tuple[str, ...]]()
    for (text, weight), ways in zip(pairs, tokenizer.phrases_ids("phrases", texts), strict=True):
        tokens = "|".join(tokenizer.decode([id]) for id in ways[0])
        rows.append((text, f"{weight:g}", tokens, _complaint(text, ways[0])))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    edges = 0 if trie is None else len(trie.tokens)
    return "\n".join([*lines, f"{len(phrases)} phrases, {edges} tokens in all their forms"]) + "\n"


def _complaint(text: str, ids: Sequence[int]) -> str:
    """Say what speaks against boosting a phrase, if anything does."""
    if len(text) <= _SHORT:
        return "short: it may come where it is not said"
    return _COMMON if len(ids) == 1 else ""
