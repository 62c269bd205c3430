"""A quick look at a network in training: greedy text of held-out utterances, no rules."""

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from build.demo.maker.network import Whisper
from build.demo.maker.scoring import error_rate, normalise
from build.demo.maker.store import Store
from build.demo.maker.tokenizer import SpecialIds
from serve.engine import mel_filters
from serve.speech.features import WINDOW_SAMPLES, log_mel

_MAX_TOKENS = 96
_BATCH = 128


@dataclass(frozen=True)
class Quick:
    """Character error rate, and the share of windows whose language was told right."""

    cer: float
    language: float


def one_each(store: Store, indices: list[int]) -> torch.Tensor:
    """Each utterance alone in a 30 s window, (batch, 480000)."""
    out = torch.zeros(len(indices), WINDOW_SAMPLES, device=store.device)
    for row, index in enumerate(indices):
        begin, size = store.offsets[index], store.sizes[index]
        out[row, 4000 : 4000 + size] = store.pcm[begin : begin + size].float() / 32768
    return out


@torch.no_grad()
def greedy(
    network: Whisper, mel: torch.Tensor, ids: SpecialIds
) -> tuple[torch.Tensor, torch.Tensor]:
    """Languages (batch,) and text tokens (batch, t) after <|notimestamps|>."""
    source = network.model.encoder(mel)
    decoder = network.model.decoder

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(decoder(tokens, source)[:, -1], decoder.embed_tokens.weight)

    tokens = torch.full((mel.shape[0], 1), ids.sot, device=mel.device)
    first, last = ids.language("en"), ids.language("yue")
    languages = logits(tokens)[:, first : last + 1].argmax(1, keepdim=True) + first
    fixed = torch.tensor([[ids.tail("<|transcribe|>"), ids.tail("<|notimestamps|>")]])
    tokens = torch.cat([tokens, languages, fixed.to(mel.device).expand(mel.shape[0], 2)], dim=1)
    begin = tokens.shape[1]
    for _ in range(_MAX_TOKENS):
        tokens = torch.cat([tokens, logits(tokens).argmax(1, keepdim=True)], dim=1)
        if bool((tokens[:, begin:] == ids.eot).any(1).all()):
            break
    return languages[:, 0], tokens[:, begin:]


def quick_look(network: Whisper, store: Store, tokenizer: Tokenizer) -> Quick:
    """Measure on every utterance of the store."""
    ids, hypotheses, right = SpecialIds(), list[str](), 0
    network.eval()
    filters = mel_filters(network.geometry.n_mels).to(store.device)
    languages = {index: code for code, rows in store.by_language.items() for index in rows}
    for begin in range(0, len(store.sizes), _BATCH):
        rows = list(range(begin, min(begin + _BATCH, len(store.sizes))))
        mel = log_mel(one_each(store, rows), filters)
        with torch.autocast(mel.device.type, torch.bfloat16):
            told, tokens = greedy(network, mel, ids)
        right += sum(
            int(token) == ids.language(languages[row])
            for row, token in zip(rows, told.tolist(), strict=True)
        )
        for line in tokens.tolist():
            kept = line[: line.index(ids.eot)] if ids.eot in line else line
            hypotheses.append(tokenizer.decode([token for token in kept if token < ids.eot]))
    pairs = [
        (normalise(text), normalise(said))
        for text, said in zip(store.texts, hypotheses, strict=True)
    ]
    return Quick(error_rate(pairs), right / len(store.sizes))
