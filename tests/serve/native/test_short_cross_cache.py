"""Keys and values of short windows: silence behind them in fewer numbers, beside whole windows."""

import dataclasses

import pytest
import torch

from serve.native.kernels import reference_ops
from serve.native.kernels.onednn import OneDnnOps
from serve.native.kernels.reference_ops import CrossKV
from serve.native.short_cross_cache import ShortCaches, merge_keys
from tests.serve.native.kernels.parity import CPU_DTYPES, HEADS, groups_of

LAYERS, FRAMES, DIM = 2, 1500, 64
D = HEADS * DIM


@pytest.fixture
def silence():
    """Keys and values of which each stands in some twelve places of a window."""
    torch.manual_seed(3)
    kinds = torch.randn(LAYERS, 2, HEADS, 120, DIM)
    return kinds[..., torch.randint(0, 120, (FRAMES,)), :]


def opened(silence, *windows, dtype=torch.float32):
    """Slots of windows, (frames, d each): as they are, and with all of silence behind them."""
    whole = torch.zeros(LAYERS, 2, len(windows), HEADS, FRAMES, DIM, dtype=dtype)
    expected, short = whole.clone(), ShortCaches(whole)
    for slot, window in enumerate(windows):
        seen = window.shape[-2]
        expected[:, :, slot, :, :seen], expected[:, :, slot, :, seen:] = (
            window,
            silence[..., seen:, :],
        )
        if seen < FRAMES:
            short.prepare(seen, silence.to(dtype))
        short.assign(seen, [slot])[:, :, slot, :, :seen] = window
    mine = [CrossKV(*whole[i], short=short.by_slot(i)) for i in range(LAYERS)]
    return mine, [CrossKV(*expected[i]) for i in range(LAYERS)]


def window_of(seen):
    return torch.randn(LAYERS, 2, HEADS, seen, DIM)


def test_equal_keys_count_as_often_as_they_are_there(silence):
    few, log_weights = merge_keys(silence, 140)
    assert few.shape == (LAYERS, 2, HEADS, 140, DIM)
    counts = log_weights.exp()
    assert counts.sum(dim=-1).flatten().tolist() == pytest.approx([FRAMES] * LAYERS * HEADS)
    kinds = len(silence[0, 0, 0].unique(dim=0))
    assert ((counts > 0).sum(dim=-1) == kinds).all()
    query = torch.randn(1, HEADS, 3, DIM)
    for layer in range(LAYERS):
        got = reference_ops.attend_audio(query, *few[layer], log_weights[layer])
        whole = reference_ops.attend_audio(query, *silence[layer], None)
        assert torch.allclose(got, whole, atol=1e-4)


def test_more_kinds_of_keys_than_stay_are_put_to_the_nearest():
    torch.manual_seed(4)
    centres = 8 * torch.randn(1, 2, HEADS, 10, DIM)
    near = centres.repeat_interleave(30, dim=-2) + 0.01 * torch.randn(1, 2, HEADS, 300, DIM)
    few, log_weights = merge_keys(near, 10)
    assert log_weights.exp().flatten().tolist() == pytest.approx([30.0] * 10 * HEADS)
    places = torch.cdist(few, centres).argmin(dim=-1)
    assert torch.equal(places.sort().values, torch.arange(10).expand_as(places))
    assert torch.cdist(few, centres).min(dim=-1).values.max() < 0.1


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_attention_to_short_windows_beside_whole_ones(silence, dtype):
    """Windows of many lengths, of which some have one layout, and one is whole again."""
    ops, lengths = OneDnnOps(dtype), (500, 150, 500, FRAMES, 750, 500)
    mine, full = opened(silence, *map(window_of, lengths), dtype=dtype)
    groups = groups_of((0, 0, 5), (1, 5, 5), (2, 10, 5), (3, 15, 1), (4, 16, 3), (5, 19, 5))
    q = (torch.randn(24, D) / 8).to(dtype)  # scaled
    for own, expected in zip(mine, full, strict=True):
        got = ops.cross_attention(q, own, groups)
        exact = dataclasses.replace(expected, k=expected.k.float(), v=expected.v.float())
        twin = reference_ops.cross_attention(q.float(), exact, groups)
        error = (got.float() - twin).abs().max() / twin.std()
        assert error < (1e-4 if dtype == torch.float32 else 0.05)
        if dtype == torch.bfloat16:  # the same in any company, to the last bit
            for slot, first, count in ((0, 0, 5), (2, 10, 5), (4, 16, 3), (3, 15, 1)):
                alone = ops.cross_attention(q, own, groups_of((slot, first, count)))
                assert torch.equal(alone[first : first + count], got[first : first + count])


def test_a_slot_is_whole_again_after_a_short_window(silence):
    whole = torch.zeros(LAYERS, 2, 2, HEADS, FRAMES, DIM)
    short = ShortCaches(whole)
    assert [short.fits(seen) for seen in (100, 500, 750, 1000)] == [True, True, True, False]
    short.prepare(500, silence)
    assert short.assign(500, [1]).shape[-2] == 640
    assert [one is None for one in short.by_slot(0)] == [True, False]
    assert short.assign(FRAMES, [1]) is whole
    assert short.by_slot(0) == [None, None]
