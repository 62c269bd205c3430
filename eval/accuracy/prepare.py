"""Make what systems need to start: engines, and the checkpoint as CTranslate2 reads it.

Each is made by the tool that owns it, in a process of its own, so that nothing that it loads
counts as a system's memory.
"""

import hashlib
import importlib.metadata
import json
import sys
from pathlib import Path

from build import hub
from eval.config import EvaluationProduct
from eval.processes import run_tool
from eval.record import made_once
from serve.contract.config import Precision
from serve.contract.errors import UnavailableError

CACHE = Path(".cache") / "ctranslate2"
"""Converted checkpoints, by a hash of what made them; relative to the project's root."""

PREPARE_TIMEOUT_S = 3600.0
CONVERTED_VERSION = "4"  # a part of the cache's key; to be raised when the conversion changes
OPENAI_ENGLISH = 51_864
"""Tokens of OpenAI's English-only vocabulary, which names languages all the same."""
OPENAI_VOCABULARIES = (OPENAI_ENGLISH, 51_865, 51_866)  # multilingual; large-v3 and turbo
"""Sizes of the vocabularies of published checkpoints; no other checkpoint has one of these."""
_CONVERT = "from ctranslate2.converters.transformers import main; main()"
_SPARE_TOKEN = "<|startoflm|>"
_CHECKPOINT_FILES = (".safetensors", ".bin", ".json")
_TOKENIZER_FILES = ("tokenizer.json", "preprocessor_config.json")


def engine_of(config: EvaluationProduct, precision: Precision) -> str:
    """Return the folder of the engine of that precision: the configured one, or its sibling."""
    if precision == config.build.precision:
        return config.engine
    return f"{config.engine.rstrip('/')}-{precision}"


def prepare_engine(config: EvaluationProduct, config_path: str, precision: Precision) -> None:
    """Build the engine of that precision where it is missing or older than its checkpoint.

    Raises:
        EarshotError: the build failed; it has said why.
        MissingCheckpointError: because the checkpoint cannot be had.
    """
    command = [sys.executable, "-m", "build", "engine", "--if-stale", "--config", config_path]
    command += ["--precision", precision, "--engine", engine_of(config, precision)]
    run_tool(command, f"building the {precision} engine", PREPARE_TIMEOUT_S)


def checkpoint_folder(config: EvaluationProduct) -> Path:
    """Find the Hugging Face checkpoint's folder; a hub id is fetched into the hub's cache.

    Raises:
        UnavailableError: the checkpoint is an OpenAI file, which only Earshot reads.
        CheckpointError: the hub does not give it.
    """
    name = config.build.checkpoint
    if name.endswith(".pt"):
        raise UnavailableError(
            f"transformers and faster-whisper need a Hugging Face checkpoint, got {name}; "
            "leave these systems out with --without"
        )
    return hub.checkpoint_folder(name).path


def checkpoint_key(config: EvaluationProduct) -> str:
    """Hash the checkpoint's weights and JSON files; raises as `checkpoint_folder`."""
    digest = hashlib.sha256()
    for path in sorted(checkpoint_folder(config).iterdir()):
        if path.suffix in _CHECKPOINT_FILES:
            digest.update(path.name.encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def converted_folder(config: EvaluationProduct) -> Path:
    """Return where the CTranslate2 form of the present checkpoint lies or will lie.

    A checkpoint in this form is used as it is. For any other, the name depends on its content, on
    the release of CTranslate2 and on `CONVERTED_VERSION`.
    """
    folder = checkpoint_folder(config)
    if (folder / "model.bin").is_file():
        return folder
    made_by = (CONVERTED_VERSION, importlib.metadata.version("ctranslate2"), checkpoint_key(config))
    return CACHE / hashlib.sha256(" ".join(made_by).encode()).hexdigest()[:24]


def prepare_converted(config: EvaluationProduct) -> None:
    """Convert the checkpoint to CTranslate2 in float32, unless that was done before.

    Raises:
        EarshotError: the conversion failed; it has said why.
        UnavailableError: CTranslate2 would take the checkpoint for English-only.
    """

    def convert(partial: Path) -> None:
        command = [sys.executable, "-c", _CONVERT, "--model", str(checkpoint_folder(config))]
        command += ["--output_dir", str(partial), "--quantization", "float32", "--force"]
        command += ["--copy_files", *_TOKENIZER_FILES]
        run_tool(command, "converting the checkpoint for faster-whisper", PREPARE_TIMEOUT_S)
        mark_multilingual(partial)

    made_once(converted_folder(config), convert)


def mark_multilingual(folder: Path) -> None:
    """Let CTranslate2 see that a converted checkpoint knows languages.

    Since 4.7.0 it takes for English-only what has no empty token, which OpenAI's multilingual
    vocabularies have and others need not. Such a model would get no language token. The name of
    `<|startoflm|>`, which no reader of Whisper uses, becomes the empty one.

    Raises:
        UnavailableError: the vocabulary has no such token to spare.
    """
    tokens = vocabulary(folder)
    knows_languages = "<|transcribe|>" in tokens and len(tokens) != OPENAI_ENGLISH
    if not knows_languages or "" in tokens:
        return
    if _SPARE_TOKEN not in tokens:
        raise UnavailableError(
            "CTranslate2 would take the checkpoint for English-only: its vocabulary has neither an "
            f"empty token nor {_SPARE_TOKEN} to make one of; leave faster-whisper out with "
            "--without"
        )
    tokens[tokens.index(_SPARE_TOKEN)] = ""
    text = json.dumps(tokens, ensure_ascii=False)
    (folder / "vocabulary.json").write_text(text, encoding="utf-8")


def vocabulary(folder: Path) -> list[str]:
    """Read the tokens of a converted checkpoint."""
    path = folder / "vocabulary.json"
    if not path.is_file():  # of earlier releases, a token a line
        return (folder / "vocabulary.txt").read_text(encoding="utf-8").split("\n")[:-1]
    tokens: list[str] = json.loads(path.read_text(encoding="utf-8"))
    return tokens
