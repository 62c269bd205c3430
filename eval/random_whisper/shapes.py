"""The sizes and special tokens of the published Whispers."""

import dataclasses

from serve.contract.engine import HEAD_DIM, Dims
from serve.contract.errors import ConfigError
from serve.speech.languages import LANGUAGE_NAMES

TIMESTAMPS = 1501
END = "<|endoftext|>"
START = "<|startoftranscript|>"
PROMPT = (START, "<|en|>", "<|transcribe|>", "<|notimestamps|>")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one Whisper; `dims` adds the sizes that all of them share."""

    width: int
    encoder_layers: int
    decoder_layers: int
    languages: int = 99
    n_mels: int = 80
    multilingual: bool = True
    pieces: int = 50_257  # text tokens, <|endoftext|> not counted

    @property
    def n_vocab(self) -> int:
        """Count text tokens and special tokens together."""
        return self.pieces + len(special_tokens(self))

    @property
    def dims(self) -> Dims:
        """Return the network's sizes as an engine states them."""
        width, heads, ffn = self.width, self.width // HEAD_DIM, 4 * self.width
        return Dims(
            n_mels=self.n_mels,
            n_audio_ctx=1500,
            n_audio_state=width,
            n_audio_head=heads,
            n_audio_layer=self.encoder_layers,
            n_audio_ffn=ffn,
            n_vocab=self.n_vocab,
            n_text_ctx=448,
            n_text_state=width,
            n_text_head=heads,
            n_text_layer=self.decoder_layers,
            n_text_ffn=ffn,
        )


def _english(width: int, encoder_layers: int, decoder_layers: int) -> Shape:
    return Shape(width, encoder_layers, decoder_layers, multilingual=False, pieces=50_256)


PUBLISHED = {
    "tiny": Shape(384, 4, 4),
    "tiny.en": _english(384, 4, 4),
    "base": Shape(512, 6, 6),
    "base.en": _english(512, 6, 6),
    "small": Shape(768, 12, 12),
    "small.en": _english(768, 12, 12),
    "medium": Shape(1024, 24, 24),
    "medium.en": _english(1024, 24, 24),
    "large-v2": Shape(1280, 32, 32),
    "large-v3": Shape(1280, 32, 32, languages=100, n_mels=128),
    "large-v3-turbo": Shape(1280, 32, 4, languages=100, n_mels=128),
    "distil-small.en": _english(768, 12, 4),
    "distil-medium.en": _english(1024, 24, 2),
    "distil-large-v2": Shape(1280, 32, 2),
    "distil-large-v3": Shape(1280, 32, 2, languages=100, n_mels=128),
}


def published_shape(checkpoint: str) -> Shape:
    """Find the multilingual shape that a hub id such as openai/whisper-large-v3-turbo names.

    Raises:
        ConfigError: it names none; the message lists those that exist.
    """
    known = {name: shape for name, shape in PUBLISHED.items() if shape.multilingual}
    name = checkpoint.rpartition("/")[2].removeprefix("whisper-")
    if name not in known:
        raise ConfigError(
            f"bench knows the shapes {', '.join(known)}, not build.checkpoint = {checkpoint!r}"
        )
    return known[name]


def special_tokens(shape: Shape) -> list[str]:
    """List the content of each special token, in order of id from `shape.pieces` on."""
    return [
        END,
        START,
        *language_tokens(shape),
        "<|translate|>",
        "<|transcribe|>",
        "<|startoflm|>",
        "<|startofprev|>",
        "<|nospeech|>" if shape.languages == 100 else "<|nocaptions|>",
        "<|notimestamps|>",
        *(f"<|{i * 0.02:.2f}|>" for i in range(TIMESTAMPS)),
    ]


def language_tokens(shape: Shape) -> list[str]:
    """List the languages' tokens, English first."""
    return [f"<|{code}|>" for code in list(LANGUAGE_NAMES)[: shape.languages]]


def special_ids(shape: Shape) -> dict[str, int]:
    """Return the id of each special token."""
    return {token: shape.pieces + i for i, token in enumerate(special_tokens(shape))}


def prompt_ids(shape: Shape) -> list[int]:
    """Return a multilingual decoder's prompt: English, transcribe, no timestamps."""
    ids = special_ids(shape)
    return [ids[token] for token in PROMPT]
