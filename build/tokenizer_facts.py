"""Read tokenizer facts from a checkpoint's own files; contradictions are errors.

Special token ids come from the added tokens of `tokenizer.json`. Suppress lists and alignment heads
come from `generation_config.json`, or from `config.json` in older checkpoints. Ids that both files
state must agree. A fact that neither file states counts as absent, and is noted.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from build.hub import CONFIG, GENERATION_CONFIG
from build.merges import with_first_merge
from serve.contract.codec import parse_json
from serve.contract.engine import TOKENIZER_FILE, Dims, TokenizerFacts
from serve.contract.errors import CheckpointError, shown

N_TIMESTAMPS = 1501  # 0.00 to 30.00 s in steps of 20 ms
MAX_INITIAL_TIMESTAMP_INDEX = 50  # 1.0 s, the default of OpenAI's DecodingOptions
_MAX_BYTES = 2**20  # maximum size of a JSON file
_MAX_TOKENIZER_BYTES = 2**24  # Whisper's tokenizer.json has 3 MB
_CT2_KEYS = {"suppress_ids": "suppress_tokens", "suppress_ids_begin": "begin_suppress_tokens"}
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
# OpenAI's `Whisper.is_multilingual` depends on the vocabulary's size too.
_OPENAI_ENGLISH_VOCAB = 51_864
_OPENAI_MULTILINGUAL_VOCABS = (51_865, 51_866)


@dataclasses.dataclass(frozen=True)
class TokenizerFiles:
    """The contents of a checkpoint's tokenizer files.

    Attributes:
        folder: the folder of the files, for messages.
        tokenizer_json: the bytes of tokenizer.json, which are copied into the engine.
        repair: a sentence on a repair of tokenizer.json; "" if none was needed.
        special: the ids of the added tokens by content.
        generation: the keys of config.json, overridden by generation_config.json. CTranslate2's
            keys are replaced by Hugging Face's.
    """

    folder: Path
    tokenizer_json: bytes
    repair: str
    special: Mapping[str, int]
    generation: Mapping[str, Any]


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
        CheckpointError: tokenizer.json is missing or malformed.
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
    return TokenizerFiles(folder, tokenizer_json, repair, special, generation)


def tokenizer_facts(
    files: TokenizerFiles, dims: Dims, exact_vocab: bool
) -> tuple[TokenizerFacts, tuple[str, ...]]:
    """Collect the tokenizer facts of an engine's manifest.

    Args:
        files: the result of `read_tokenizer_files`.
        dims: the network's sizes, to check ids and heads.
        exact_vocab: whether the last timestamp must be the vocabulary's last token, because the
            tokenizer is not from the checkpoint's folder.

    Returns:
        The facts, and a sentence for each fact that the files do not state and for each repair.

    Raises:
        CheckpointError: a token is missing, two files disagree, or an id is out of range.
    """
    reader = _TokenizerFactReader(files, dims)
    sot = reader.token("decoder_start_token_id", "<|startoftranscript|>")
    no_timestamps = reader.token("no_timestamps_token_id", "<|notimestamps|>")
    begin = _timestamp_begin(files, dims, no_timestamps, exact_vocab)
    multilingual = _is_multilingual(files, dims)
    transcribe, translate, languages = None, None, {}
    if multilingual:
        transcribe = reader.task("transcribe")
        translate = reader.task("translate")
        languages = _languages(reader, sot, translate)
    facts = TokenizerFacts(
        eot=reader.token("eos_token_id", "<|endoftext|>"),
        sot=sot,
        sot_prev=reader.token("prev_sot_token_id", "<|startofprev|>"),
        no_speech=reader.token("", "<|nospeech|>", "<|nocaptions|>"),
        no_timestamps=no_timestamps,
        timestamp_begin=begin,
        transcribe=transcribe,
        translate=translate,
        languages=languages,
        suppress_tokens=reader.ids("suppress_tokens"),
        begin_suppress_tokens=reader.ids("begin_suppress_tokens"),
        max_initial_timestamp_index=reader.max_initial_timestamp_index(),
        alignment_heads=reader.alignment_heads(),
    )
    return facts, tuple(reader.notes)


class _TokenizerFactReader:
    """Reads and checks single facts, and notes those that the files do not state."""

    def __init__(self, files: TokenizerFiles, dims: Dims) -> None:
        self.files = files
        self.dims = dims
        self.notes = [files.repair] if files.repair else []

    def token(self, key: str, *contents: str) -> int:
        """Return the id of the first existing token of `contents`; `key` must have the same id."""
        stated = self.files.generation.get(key)
        return self.agreed(key, stated, *contents)

    def task(self, task: str) -> int:
        stated = self.table("task_to_id").get(task)
        return self.agreed(f"task_to_id.{task}", stated, f"<|{task}|>")

    def agreed(self, key: str, stated: Any, *contents: str) -> int:
        """Return the id of a token; `stated`, the value of `key`, must be the same if given."""
        special = self.files.special
        content = next((c for c in contents if c in special), None)
        if content is None:
            raise CheckpointError(
                f"{self.files.folder / TOKENIZER_FILE} has no {' or '.join(contents)} token; "
                "it is not a Whisper tokenizer"
            )
        if stated is not None and stated != special[content]:
            raise CheckpointError(
                f"{self.files.folder}: {GENERATION_CONFIG} says {key} = {shown(stated)}, "
                f"{TOKENIZER_FILE} says {content} = {special[content]}; "
                "the files belong to different checkpoints"
            )
        return self.in_vocab(content, special[content])

    def in_vocab(self, what: str, value: Any) -> int:
        """Check and return a token id of this network."""
        if not isinstance(value, int) or not 0 <= value < self.dims.n_vocab:
            raise CheckpointError(
                f"{self.files.folder}: {what} = {shown(value)}; expected a token id below the "
                f"vocabulary's size, {self.dims.n_vocab}"
            )
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """Return a list of token ids; if the files have no such list, note it and return none."""
        stated = self._list(key, "nothing is suppressed by it")
        return tuple(self.in_vocab(key, value) for value in stated)

    def max_initial_timestamp_index(self) -> int:
        """Return the maximum of the first timestamp, in steps of 20 ms."""
        value = self.files.generation.get("max_initial_timestamp_index")
        if value is None:
            self.notes.append(
                "the checkpoint states no max_initial_timestamp_index: OpenAI's default, "
                f"{MAX_INITIAL_TIMESTAMP_INDEX} (1.0 s)"
            )
            return MAX_INITIAL_TIMESTAMP_INDEX
        if not isinstance(value, int) or not 0 <= value < N_TIMESTAMPS:
            raise CheckpointError(
                f"{self.files.folder}: max_initial_timestamp_index = {shown(value)}; "
                f"expected 0 to {N_TIMESTAMPS - 1}"
            )
        return value

    def alignment_heads(self) -> tuple[tuple[int, int], ...]:
        """Return (layer, head) pairs of the heads that follow the audio."""
        return tuple(
            self._head(pair) for pair in self._list("alignment_heads", "verifying measures them")
        )

    def _head(self, pair: Any) -> tuple[int, int]:
        limits = (self.dims.n_text_layer, self.dims.n_text_head)
        match pair:
            case [int(layer), int(head)] if 0 <= layer < limits[0] and 0 <= head < limits[1]:
                return layer, head
        raise CheckpointError(
            f"{self.files.folder}: alignment_heads holds {shown(pair)}; expected [layer, head] "
            f"below {list(limits)}"
        )

    def _list(self, key: str, otherwise: str) -> list[Any]:
        """Return a list; if it is missing, note `otherwise` and return an empty one."""
        value = self.files.generation.get(key)
        if value is None:
            self.notes.append(f"the checkpoint states no {key}: {otherwise}")
            return []
        if not isinstance(value, list):
            raise CheckpointError(f"{self.files.folder}: {key} = {shown(value)}; expected a list")
        return value

    def table(self, key: str) -> dict[str, Any]:
        """Return a table of ids; an empty one if it is missing."""
        value = self.files.generation.get(key, {})
        if not isinstance(value, dict):
            raise CheckpointError(
                f"{self.files.folder}: {key} = {shown(value)}; expected an object"
            )
        return value


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


def _is_multilingual(files: TokenizerFiles, dims: Dims) -> bool:
    """Return whether the checkpoint is multilingual; English ones have language tokens too."""
    stated = files.generation.get("is_multilingual")
    if isinstance(stated, bool):
        return stated
    if files.generation.get("lang_to_id"):
        return True
    if dims.n_vocab == _OPENAI_ENGLISH_VOCAB:
        return False
    if dims.n_vocab in _OPENAI_MULTILINGUAL_VOCABS:
        return True
    raise CheckpointError(
        f"{files.folder}: cannot determine whether the checkpoint is multilingual: OpenAI has no "
        f"vocabulary of {dims.n_vocab} tokens; expected `is_multilingual` in {GENERATION_CONFIG}"
    )


def _languages(reader: _TokenizerFactReader, sot: int, translate: int) -> dict[str, int]:
    """Return token ids by language code, in order of id.

    They come from `lang_to_id`. Without it they are the tokens between start-of-transcript and
    translate, as in every Whisper vocabulary.
    """
    special = reader.files.special
    stated = reader.table("lang_to_id")  # "<|en|>" -> id
    contents = list(stated) or [c for c, i in special.items() if sot < i < translate]
    languages: dict[str, int] = {}
    for content in contents:
        match = _LANGUAGE.fullmatch(content)
        if match is None:
            raise CheckpointError(
                f"{reader.files.folder}: found the token {shown(content)}; expected a language "
                "such as '<|en|>'"
            )
        languages[match[1]] = reader.agreed(f"lang_to_id.{content}", stated.get(content), content)
    if not languages:
        raise CheckpointError(
            f"{reader.files.folder}: the multilingual checkpoint has no language tokens"
        )
    known = sorted(languages.values())
    ids = reader.files.generation.get("lang_ids", known)  # a key of CTranslate2
    if not isinstance(ids, list) or sorted(ids, key=repr) != sorted(known, key=repr):
        raise CheckpointError(
            f"{reader.files.folder}: lang_ids of {CONFIG} are not the ids of the {len(known)} "
            f"languages in {TOKENIZER_FILE}; the files belong to different checkpoints"
        )
    return dict(sorted(languages.items(), key=lambda item: item[1]))
