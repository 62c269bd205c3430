"""Read tokenizer facts from a checkpoint's own files; contradictions are errors.

Special token ids come from the added tokens of `tokenizer.json`. Suppress lists and alignment heads
come from `generation_config.json`, or from `config.json` in older checkpoints. Ids in several files
must agree. A fact that no file states counts as absent.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import tokenizers
from pydantic import Field

from build.hub import CONFIG, GENERATION_CONFIG
from serve.contract.codec import from_json, parse_json
from serve.contract.errors import CheckpointError, shown
from serve.contract.manifest import (
    TOKENIZER_FILE,
    Dims,
    Index,
    TokenId,
    TokenizerFacts,
    token_problems,
)

N_TIMESTAMPS = 1501  # 0.00 to 30.00 s in steps of 20 ms
MAX_INITIAL_TIMESTAMP_INDEX = 50  # 1.0 s, the default of OpenAI's DecodingOptions
_MAX_BYTES = 2**20  # maximum size of a JSON file
_MAX_TOKENIZER_BYTES = 2**24  # Whisper's tokenizer.json has 3 MB
_CT2_KEYS = {"suppress_ids": "suppress_tokens", "suppress_ids_begin": "begin_suppress_tokens"}
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_OPENAI_ENGLISH_VOCAB = 51_864  # OpenAI's `Whisper.is_multilingual` depends on this, too


@dataclasses.dataclass(frozen=True)
class StatedFacts:
    """Keys of config.json and generation_config.json; None or an empty table: not stated."""

    decoder_start_token_id: int | None = None
    eos_token_id: int | None = None
    no_timestamps_token_id: int | None = None
    prev_sot_token_id: int | None = None
    is_multilingual: bool | None = None
    task_to_id: dict[str, int] = dataclasses.field(default_factory=dict)
    lang_to_id: dict[str, int] = dataclasses.field(default_factory=dict)  # "<|en|>" -> id
    lang_ids: tuple[int, ...] | None = None  # a key of CTranslate2
    suppress_tokens: tuple[TokenId, ...] | None = None
    begin_suppress_tokens: tuple[TokenId, ...] | None = None
    max_initial_timestamp_index: Annotated[int, Field(ge=0, lt=N_TIMESTAMPS)] | None = None
    alignment_heads: tuple[tuple[Index, Index], ...] | None = None  # (layer, head)


@dataclasses.dataclass(frozen=True)
class TokenizerFiles:
    """The contents of a checkpoint's tokenizer files.

    Attributes:
        folder: the folder of the files, for messages.
        tokenizer_json: the bytes of tokenizer.json, which are copied into the engine.
        repair: a sentence on a repair of tokenizer.json; "" if none was needed.
        special: the ids of the added tokens by content.
        stated: the keys of config.json, overridden by generation_config.json. CTranslate2's keys
            are replaced by Hugging Face's.
    """

    folder: Path
    tokenizer_json: bytes
    repair: str
    special: Mapping[str, int]
    stated: StatedFacts

    def token(self, key: str, stated: int | None, *contents: str) -> int:
        """Return the id of the first existing token of `contents`.

        Raises:
            CheckpointError: there is no such token, or `stated`, the value of `key`, is another id.
        """
        content = next((content for content in contents if content in self.special), None)
        if content is None:
            raise CheckpointError(
                f"{self.folder / TOKENIZER_FILE} has no {' or '.join(contents)} token; "
                "it is not a Whisper tokenizer"
            )
        if stated not in (None, self.special[content]):
            raise CheckpointError(
                f"{self.folder}: {GENERATION_CONFIG} says {key} = {stated}, {TOKENIZER_FILE} says "
                f"{content} = {self.special[content]}; the files belong to different checkpoints"
            )
        return self.special[content]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: the file is missing, unreadable, too large, or not a JSON object.
    """
    limit = _MAX_TOKENIZER_BYTES if path.name == TOKENIZER_FILE else _MAX_BYTES
    try:
        with path.open("rb") as file:
            text = file.read(limit + 1)
        if len(text) > limit:
            raise CheckpointError(
                f"{path} has more than {limit:,} bytes, too many for Whisper; fetch it again"
            )
        content = parse_json(text)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not valid JSON: {error}; it may be damaged or truncated; fetch it again"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; expected a JSON object")
    return content


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read tokenizer.json and the configuration files beside it.

    Raises:
        CheckpointError: tokenizer.json is missing, or a file is malformed.
    """
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing; save it there with transformers' "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…), or name a folder that has it "
            "with `tokenizer` under [build] or --tokenizer"
        )
    content, text = read_json(path), path.read_bytes()
    try:
        tokenizers.Tokenizer.from_buffer(text)
        special = {str(t["content"]): int(t["id"]) for t in content["added_tokens"]}
    except Exception as error:  # the library raises nothing narrower
        message = str(error)[:200]
        raise CheckpointError(f"{path} is not a tokenizer: {message}; fetch it again") from error
    tokenizer_json, repair = with_first_merge(text)
    generation: dict[str, Any] = {}
    for name in (CONFIG, GENERATION_CONFIG):
        if (folder / name).is_file():
            stated = {k: v for k, v in read_json(folder / name).items() if v is not None}
            generation |= {_CT2_KEYS.get(key, key): value for key, value in stated.items()}
    where = f"{folder}: {GENERATION_CONFIG}"
    stated_facts = from_json(
        StatedFacts, json.dumps(generation), where, error=CheckpointError, extra="ignore"
    )
    return TokenizerFiles(folder, tokenizer_json, repair, special, stated_facts)


def tokenizer_facts(files: TokenizerFiles, dims: Dims, exact_vocab: bool) -> TokenizerFacts:
    """Collect the tokenizer facts of an engine's manifest.

    Args:
        files: the result of `read_tokenizer_files`.
        dims: the network's sizes, to check ids and heads.
        exact_vocab: whether the last timestamp must be the vocabulary's last token, because the
            tokenizer is not from the checkpoint's folder.

    Raises:
        CheckpointError: a token is missing, two files disagree, or an id is out of range.
    """
    stated, token = files.stated, files.token
    sot = token("decoder_start_token_id", stated.decoder_start_token_id, "<|startoftranscript|>")
    no_timestamps = token(
        "no_timestamps_token_id", stated.no_timestamps_token_id, "<|notimestamps|>"
    )
    tasks: dict[str, int] = {}
    languages: dict[str, int] = {}
    multilingual = stated.is_multilingual
    if multilingual is None:  # English checkpoints have language tokens, too
        multilingual = bool(stated.lang_to_id) or dims.n_vocab != _OPENAI_ENGLISH_VOCAB
    if multilingual:
        for task in ("transcribe", "translate"):
            key = f"task_to_id.{task}"
            tasks[task] = token(key, stated.task_to_id.get(task), f"<|{task}|>")
        languages = _languages(files, sot, tasks["translate"])
    index = stated.max_initial_timestamp_index
    facts = TokenizerFacts(
        eot=token("eos_token_id", stated.eos_token_id, "<|endoftext|>"),
        sot=sot,
        sot_prev=token("prev_sot_token_id", stated.prev_sot_token_id, "<|startofprev|>"),
        no_speech=token("", None, "<|nospeech|>", "<|nocaptions|>"),
        no_timestamps=no_timestamps,
        timestamp_begin=_timestamp_begin(files, dims, no_timestamps, exact_vocab),
        transcribe=tasks.get("transcribe"),
        translate=tasks.get("translate"),
        languages=languages,
        suppress_tokens=stated.suppress_tokens or (),
        begin_suppress_tokens=stated.begin_suppress_tokens or (),
        max_initial_timestamp_index=MAX_INITIAL_TIMESTAMP_INDEX if index is None else index,
        alignment_heads=stated.alignment_heads or (),
    )
    for problem in token_problems(facts, dims):
        raise CheckpointError(f"{files.folder}: {problem}")
    return facts


def _timestamp_begin(
    files: TokenizerFiles, dims: Dims, no_timestamps: int, exact_vocab: bool
) -> int:
    """Find the id of <|0.00|>, after <|notimestamps|>; older tokenizer files do not list it."""
    begin = no_timestamps + 1
    stated = files.special.get("<|0.00|>", begin)
    end = begin + N_TIMESTAMPS
    if stated != begin or end > dims.n_vocab or (exact_vocab and end != dims.n_vocab):
        raise CheckpointError(
            f"{files.folder / TOKENIZER_FILE}: timestamps run from {stated} to "
            f"{stated + N_TIMESTAMPS - 1}; expected them right after <|notimestamps|> "
            f"({no_timestamps}) and {'at the end of' if exact_vocab else 'within'} the "
            f"checkpoint's vocabulary of {dims.n_vocab}; name the tokenizer of this checkpoint"
        )
    return begin


def _languages(files: TokenizerFiles, sot: int, translate: int) -> dict[str, int]:
    """Return token ids by language code, in order of id.

    The languages come from `lang_to_id`. Without it they are the tokens between start-of-transcript
    and translate, as in every Whisper vocabulary.
    """
    stated = files.stated.lang_to_id
    contents = list(stated) or [c for c, i in files.special.items() if sot < i < translate]
    languages: dict[str, int] = {}
    for content in contents:
        match = _LANGUAGE.fullmatch(content)
        if match is None:
            raise CheckpointError(
                f"{files.folder}: found the token {shown(content)}; expected a language such as "
                "'<|en|>'"
            )
        languages[match[1]] = files.token(f"lang_to_id.{content}", stated.get(content), content)
    ids = sorted(languages.values())
    if not ids or sorted(files.stated.lang_ids or ids) != ids:
        raise CheckpointError(
            f"{files.folder}: {TOKENIZER_FILE} has {len(ids)} languages, but the checkpoint is "
            f"multilingual, and lang_ids of {CONFIG} must be their ids; the files belong to "
            "different checkpoints"
        )
    return dict(sorted(languages.items(), key=lambda item: item[1]))


def with_first_merge(tokenizer_json: bytes) -> tuple[bytes, str]:
    """Restore the first merge if it is the only missing one.

    GPT-2's list of merges begins with a line for the version. Some converters removed a line from
    lists that had none, and thereby the first merge. Some words are then tokenized differently than
    in training.

    Args:
        tokenizer_json: a file of Hugging Face's tokenizers.

    Returns:
        The file, repaired if needed, and a sentence on the repair; "" if there was none.
    """
    content = json.loads(tokenizer_json)
    model = content.get("model") or {}
    vocabulary, merges = model.get("vocab"), model.get("merges")
    if model.get("type") != "BPE" or not vocabulary or not merges:
        return tokenizer_json, ""
    merged = ["".join(merge).replace(" ", "") for merge in merges]  # a pair, or text "left right"
    longer = {token for token in vocabulary if len(token) > 1 and not token.startswith("<|")}
    missing = [*longer.difference(merged)]
    if len(missing) != 1 or vocabulary[missing[0]] >= vocabulary[merged[0]]:
        return tokenizer_json, ""
    if len(missing[0]) != 2 or not set(missing[0]) <= set(vocabulary):
        return tokenizer_json, ""
    left, right = missing[0]
    first = [left, right] if isinstance(merges[0], list) else f"{left} {right}"
    model["merges"] = [first, *merges]
    repaired = json.dumps(content, ensure_ascii=False).encode()
    return repaired, f"tokenizer.json lacks the first merge, {left!r} + {right!r}: restored"
