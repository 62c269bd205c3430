"""A tokenizer trained on three sentences, and an engine that has it and no weights."""

from pathlib import Path

import torch
from safetensors.torch import save
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Pieces

from serve.contract.engine import MEL_FILTERS_FILE, N_FREQUENCIES, Engine
from serve.contract.manifest import (
    FORMAT_VERSION,
    CheckpointSource,
    Dims,
    FileFacts,
    Manifest,
    TokenizerFacts,
)
from serve.speech.languages import LANGUAGE_NAMES

SENTENCES = [" the quick brown fox jumps over the lazy dog", " mañana será otro día", " 你好，世界"]
PIECES = 300
N_TEXT_CTX = 32
DIMS = Dims(80, 1500, 64, 1, 1, 256, 2000, N_TEXT_CTX, 64, 1, 1, 256)


def make_pieces(codes: list[str]) -> Pieces:
    """Byte-level BPE with Whisper's special tokens in Whisper's order."""
    pieces = Pieces(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=PIECES, initial_alphabet=alphabet, show_progress=False)
    pieces.train_from_iterator(SENTENCES, trainer)
    names = ["endoftext", "startoftranscript", *codes, "translate", "transcribe", "startoflm"]
    names += ["startofprev", "nospeech", "notimestamps"]
    pieces.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in names])
    pieces.add_tokens([AddedToken(f"<|{i * 0.02:.2f}|>", normalized=False) for i in range(1501)])
    return pieces


def make_engine(path: Path, multilingual: bool = True, codes: list[str] | None = None) -> Engine:
    codes = list(LANGUAGE_NAMES) if codes is None else codes
    pieces = make_pieces(codes)
    pieces.save(str(path / "tokenizer.json"))

    def id_of(name: str) -> int:
        return pieces.token_to_id(f"<|{name}|>")

    facts = TokenizerFacts(
        eot=id_of("endoftext"),
        sot=id_of("startoftranscript"),
        sot_prev=id_of("startofprev"),
        no_speech=id_of("nospeech"),
        no_timestamps=id_of("notimestamps"),
        timestamp_begin=id_of("0.00"),
        transcribe=id_of("transcribe") if multilingual else None,
        translate=id_of("translate") if multilingual else None,
        languages={code: id_of(code) for code in codes} if multilingual else {},
        suppress_tokens=(),
        begin_suppress_tokens=(),
        max_initial_timestamp_index=50,
        alignment_heads=(),
    )
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        runtime="native",
        precision="fp16",
        dims=DIMS,
        tokenizer=facts,
        source=CheckpointSource("made in a test", ""),
        quantization={},
        versions={},
        files={MEL_FILTERS_FILE: FileFacts("", 0)},  # read by every transcriber
        checkpoint_bytes=0,
        verification=None,
        runtime_options={},
    )
    mel_filters = torch.zeros(DIMS.n_mels, N_FREQUENCIES)  # their output is not used
    (path / MEL_FILTERS_FILE).write_bytes(save({"mel_filters": mel_filters}))
    return Engine(path, manifest)
