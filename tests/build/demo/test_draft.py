"""How the demo's draft is made: the teacher's own output, and what guesses would gain. No GPU."""

import torch
from torch.nn import functional as F

from build.checkpoint import open_checkpoint
from build.demo.maker.draft import first_draft, greedy, prompt_size, tokens_per_check
from build.demo.maker.labels import IGNORE, Segment, Style
from build.demo.maker.labels import build as build_labels
from build.demo.maker.network import Decoder, Geometry
from build.demo.maker.tokenizer import SpecialIds
from build.draft import with_draft

IDS = SpecialIds()
VOCAB, EOT = 11, 10


def _chain(ids: torch.Tensor) -> torch.Tensor:
    """A decoder whose next token depends on all before it."""
    columns = torch.arange(1, ids.shape[1] + 1)
    return F.one_hot((ids * columns).cumsum(1) % VOCAB, VOCAB).float()


def _one_by_one(row: list[int], prompt: int) -> list[int]:
    told = row[:prompt]
    while len(told) < len(row) + 1 and told[-1] != EOT:
        told.append(int(_chain(torch.tensor([told]))[0, -1].argmax()))
    return told[prompt:]


def test_the_teachers_output_is_that_of_decoding_token_by_token():
    torch.manual_seed(3)
    guesses = torch.randint(0, VOCAB - 1, (40, 14))
    sizes = torch.randint(1, 4, (40,))
    inputs, labels, logits = greedy(_chain, guesses, sizes, EOT)
    settled = 0
    for row, size in enumerate(sizes.tolist()):
        expected = _one_by_one(guesses[row].tolist(), size)
        known = labels[row][labels[row] != IGNORE].tolist()
        assert known == expected[: len(known)]
        assert len(known) >= min(12, len(expected))  # each round settles at least one
        assert (labels[row, : size - 1] == IGNORE).all()
        assert inputs[row, size : size + len(known) - 1].tolist() == expected[: len(known) - 1]
        settled += known[-1] == EOT
    assert settled > 10
    assert torch.equal(logits, _chain(inputs))


def test_a_prompt_ends_before_the_first_timestamp_or_text():
    segments = [Segment(0.5, 1.0, (5, 6))]
    bare = Style(timestamps=False, bare=True)
    for style, size in ((Style(), 3), (Style(previous=(9, 9)), 6), (bare, 2)):
        assert prompt_size(build_labels(segments, "es", style, IDS).inputs, IDS) == size
    assert prompt_size(build_labels([], "en", Style(), IDS).inputs, IDS) == 3


def test_what_a_check_gains_ends_at_the_first_wrong_guess():
    agreed = [True, True, False, True, True, True]
    assert tokens_per_check(agreed, 1) == (6, 4)
    assert tokens_per_check(agreed, 2) == (6, 2)
    assert tokens_per_check(agreed, 8) == (6, 2)
    assert tokens_per_check([False, False], 4) == (2, 2)


def test_the_bundled_draft_fits_the_bundled_checkpoint():
    both = with_draft(open_checkpoint("build/demo/checkpoint"), "build/demo/draft")
    assert both.draft.dims.n_text_layer == 1
    assert not any(name.startswith("encoder.") for name in both.draft.tensors)


def test_the_draft_begins_as_the_teachers_last_layer():
    geometry = Geometry(vocab_size=20, decoder_layers=3, d_model=64, heads=1, ffn=64, dropout=0.0)
    teacher = Decoder(geometry)
    draft = first_draft(teacher, geometry)
    assert len(draft.layers) == 1
    ids, source = torch.tensor([[1, 2]]), torch.randn(1, 5, 64)
    alone = Decoder(geometry)
    alone.load_state_dict(teacher.state_dict())
    del alone.layers[:2]
    torch.testing.assert_close(draft(ids, source), alone(ids, source))
