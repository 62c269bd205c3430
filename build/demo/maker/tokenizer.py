"""The demo checkpoint's tokenizer: byte-level BPE pieces, then Whisper's special tokens.

Ids: the pieces, <|endoftext|>, <|startoftranscript|>, 100 languages, <|translate|>, <|transcribe|>,
<|startoflm|>, <|startofprev|>, <|nospeech|>, <|notimestamps|>, <|0.00|> to <|30.00|>.

    python -m build.demo.maker.tokenizer --out build/demo/checkpoint --sentences 60000
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from build.demo.maker.text import sentences
from serve.speech.languages import LANGUAGE_NAMES

PIECES = 1024
TIMESTAMP_STEP_S = 0.02
TIMESTAMPS = 1501
LANGUAGE_CODES = tuple(LANGUAGE_NAMES)  # in the order of their tokens
EOT, SOT, UNKNOWN = "<|endoftext|>", "<|startoftranscript|>", "<|endoftext|>"
TAIL = (
    "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>",
    "<|notimestamps|>",
)  # fmt: skip


def special_tokens() -> list[str]:
    """The special tokens before the timestamps, in the order of their ids."""
    return [EOT, SOT, *(f"<|{code}|>" for code in LANGUAGE_CODES), *TAIL]


def timestamp_tokens() -> list[str]:
    """<|0.00|> to <|30.00|>."""
    return [f"<|{index * TIMESTAMP_STEP_S:.2f}|>" for index in range(TIMESTAMPS)]


@dataclass(frozen=True)
class SpecialIds:
    """The ids that labels and configuration files need, given the number of pieces."""

    pieces: int = PIECES

    @property
    def eot(self) -> int:
        """End of text."""
        return self.pieces

    @property
    def sot(self) -> int:
        """Start of transcript."""
        return self.pieces + 1

    def language(self, code: str) -> int:
        """The language's token."""
        return self.pieces + 2 + LANGUAGE_CODES.index(code)

    def tail(self, token: str) -> int:
        """One of `TAIL`."""
        return self.pieces + 2 + len(LANGUAGE_CODES) + TAIL.index(token)

    @property
    def timestamp_begin(self) -> int:
        """<|0.00|>."""
        return self.pieces + 2 + len(LANGUAGE_CODES) + len(TAIL)

    @property
    def vocab_size(self) -> int:
        """All ids."""
        return self.timestamp_begin + TIMESTAMPS


def _texts(count: int) -> Iterator[str]:
    source = sentences(seed=20_240)
    for _ in range(count):
        yield " " + next(source).text


def train_tokenizer(sentence_count: int) -> Tokenizer:
    """Learn the pieces from the grammar's training sentences and add the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(sentence_count), trainer)
    if tokenizer.get_vocab_size() != PIECES:
        raise ValueError(f"learnt {tokenizer.get_vocab_size()} pieces, expected {PIECES}")
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in special_tokens()])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in timestamp_tokens()])
    tokenizer.post_processor = _post_processor(tokenizer)
    return tokenizer


def _post_processor(tokenizer: Tokenizer) -> processors.TemplateProcessing:
    prefix = [SOT, "<|notimestamps|>"]
    pairs = [(token, int(tokenizer.token_to_id(token) or 0)) for token in (*prefix, EOT)]
    single = [*prefix, "$A:0", EOT]
    return processors.TemplateProcessing(
        single=single, pair=[*prefix, "$A:0", "$B:1", f"{EOT}:1"], special_tokens=pairs
    )


def _added_token(token: str, special: bool) -> dict[str, object]:
    return {"content": token, "lstrip": False, "normalized": False, "rstrip": False,
            "single_word": False, "special": special}  # fmt: skip


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, object]:
    added = {
        str(tokenizer.token_to_id(token)): _added_token(token, special)
        for tokens, special in ((special_tokens(), True), (timestamp_tokens(), False))
        for token in tokens
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": special_tokens(),
        "bos_token": EOT,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOT,
        "errors": "replace",
        "model_max_length": 448,
        "pad_token": EOT,
        "processor_class": "WhisperProcessor",
        "return_attention_mask": False,
        "tokenizer_class": "WhisperTokenizer",
        "unk_token": UNKNOWN,
    }


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and the older files that other readers of the format still open."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    state = json.loads(tokenizer.to_str())["model"]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in state["merges"]]
    added = {token: tokenizer.token_to_id(token) for token in special_tokens() + timestamp_tokens()}
    files: dict[str, object] = {
        "vocab.json": state["vocab"],
        "added_tokens.json": added,
        "special_tokens_map.json": {
            "additional_special_tokens": special_tokens(),
            "bos_token": EOT,
            "eos_token": EOT,
            "pad_token": EOT,
            "unk_token": UNKNOWN,
        },
        "normalizer.json": {},
        "tokenizer_config.json": _tokenizer_config(tokenizer),
    }
    for name, content in files.items():
        text = json.dumps(
            content, ensure_ascii=False, indent=1 if len(str(content)) < 9999 else None
        )
        (folder / name).write_text(text + "\n", encoding="utf-8")
    text = "#version: 0.2\n" + "\n".join(merges) + "\n"
    (folder / "merges.txt").write_text(text, encoding="utf-8")


def main() -> None:
    """Learn and write the tokenizer."""
    parser = argparse.ArgumentParser(description="Learn the demo tokenizer and write its files.")
    parser.add_argument("--out", type=Path, default=Path("build/demo/checkpoint"))
    parser.add_argument("--sentences", type=int, default=60_000, help="sentences to learn from")
    arguments = parser.parse_args()
    write_tokenizer(train_tokenizer(arguments.sentences), arguments.out)


if __name__ == "__main__":
    main()
