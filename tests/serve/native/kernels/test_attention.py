"""The decoder's attention against its plain torch twin: interpreted on a CPU, or on a GPU."""

import dataclasses

import pytest
import torch

from serve.native.kernels import reference_ops
from serve.native.kernels.reference_ops import CrossKV
from tests.marks import nightly
from tests.serve.native.kernels.parity import (
    CTX,
    DEVICE,
    DTYPES,
    HEADS,
    KEYS,
    ON_GPU,
    close,
    feed_of,
    groups_of,
    matrix_of,
    norm_of,
)

D = HEADS * 64


def self_caches(random, rows, dtype):
    return [random(rows, CTX, HEADS, 64, dtype=dtype) for _ in range(2)]


def check_self_attention(ops, qkv, caches, feed):
    """The twin's results, and the same numbers in the caches; returns the kernel's."""
    mine, twins = ([cache.clone() for cache in caches] for _ in range(2))
    got = ops.self_attention(qkv, *mine, feed)
    close(got, reference_ops.self_attention(qkv, *twins, feed))
    for a, b in zip(mine, twins, strict=True):
        assert torch.equal(a, b)  # what is new, and nothing else, was written
    return got


def check_single_steps(ops, random, pairs, dtype, source=None, tokens_per_row=1):
    """The bits of (row, position) pairs fed at once are those of each alone."""
    feed = feed_of(*zip(*pairs, strict=True), source=source, multi_token=True)
    feed = dataclasses.replace(feed, tokens_per_row=tokens_per_row)
    qkv = random(len(pairs), 3 * D, dtype=dtype, spread=0.5)
    caches = self_caches(random, 5, dtype)
    together = check_self_attention(ops, qkv, caches, feed)
    for i, (row, position) in enumerate(pairs):
        one = feed_of([row], [position], source=source)
        alone = ops.self_attention(qkv[i : i + 1].clone(), *caches, one)
        assert torch.equal(alone[0], together[i]), (row, position)


def own_rows(rows):
    """The table of rows that each have their own past."""
    table = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    return table[:, None].repeat(1, CTX)


@pytest.mark.parametrize("dtype", DTYPES)
def test_self_attention_of_rows_from_new_to_full(ops, random, dtype):
    feed = feed_of([4, 0, 1, 8, 3, 2, 5], [0, 1, 127, 128, 129, 300, CTX - 1])
    caches = self_caches(random, 9, dtype)
    qkv = random(7, 3 * D, dtype=dtype, spread=0.5)
    plain = check_self_attention(ops, qkv, caches, feed)
    traced = check_self_attention(ops, qkv, caches, dataclasses.replace(feed, source=own_rows(9)))
    assert torch.equal(plain, traced)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_past_of_a_row_may_stand_in_others(ops, random, dtype):
    """Five beams that changed places again and again, and an independent row."""
    source = own_rows(7)
    mixed = torch.randint(0, 5, (5, CTX), generator=torch.Generator().manual_seed(2))
    source[1:6] = (1 + mixed).to(DEVICE, torch.int32)
    source[torch.arange(1, 6), 140] = torch.arange(1, 6, dtype=torch.int32, device=DEVICE)
    feed = feed_of([1, 2, 3, 4, 5, 6], [140] * 5 + [9], source=source)
    qkv, caches = random(6, 3 * D, dtype=dtype, spread=0.5), self_caches(random, 7, dtype)
    got = check_self_attention(ops, qkv, caches, feed)
    own = check_self_attention(ops, qkv, caches, dataclasses.replace(feed, source=None))
    assert torch.equal(got[5], own[5])
    assert not torch.isclose(got[:5], own[:5]).all(dim=1).any()


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("traced", [*nightly(False), True])
def test_several_positions_of_a_row_are_the_bits_of_single_steps(ops, random, traced, dtype):
    """A prompt, a draft behind a long past and one token, fed at once and one by one."""
    spans = [(3, 0, 3), (0, 127, 129), (1, 40, 41)]
    pairs = [(row, at) for row, begin, end in spans for at in range(begin, end)]
    source = own_rows(5) if traced else None
    if traced:
        source[0, :100] = 4
    check_single_steps(ops, random, pairs, dtype, source=source)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.nightly
@pytest.mark.parametrize("each", [2, 3, 4, 5, 6])
def test_feeds_that_share_a_reading_are_the_bits_of_single_steps(ops, random, each, dtype):
    """Of rows with no past, a short and a long one, and at the end of the context."""
    ops.processors = 1  # so that these are many
    begins = {3: 0, 0: 30, 1: 126, 4: CTX - each}
    pairs = [(row, begin + i) for row, begin in begins.items() for i in range(each)]
    check_single_steps(ops, random, pairs, dtype, tokens_per_row=each)


def cross_of(ops, random, slots, dtype, int8):
    """Keys and values of the second of two layers, stored in the last slot first."""
    kind = torch.int8 if int8 else dtype
    cache = torch.zeros((2, 2, slots, HEADS, KEYS, 64), dtype=kind, device=DEVICE)
    scale = torch.zeros(2, 2, slots, HEADS, 64, device=DEVICE) if int8 else None
    x = random(slots, KEYS, 2 * 2 * D, dtype=dtype)
    ops.store_cross(x, torch.arange(slots - 1, -1, -1, device=DEVICE), cache, scale)
    return CrossKV(*cache[1], *((None, None) if scale is None else scale[1]))


def check_cross_attention(ops, q, cross, groups):
    """The twin's results for all feeds that a group names; returns the kernel's."""
    got, twin = (
        ops.cross_attention(q, cross, groups),
        reference_ops.cross_attention(q, cross, groups),
    )
    pairs = zip(groups.first.tolist(), groups.count.tolist(), strict=True)
    named = [feed for first, count in pairs for feed in range(first, first + count)]
    close(got[named], twin[named])
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [True, False])
def test_cross_attention(ops, random, int8, dtype):
    """Slots in any order, a free one, feeds without an owner, beams, more tokens than a tile."""
    cross = cross_of(reference_ops, random, 4, dtype, int8)
    q = random(40, D, dtype=dtype, spread=0.5)
    several = ((3, 35, 5), (0, 2, 21), (1, 0, 0), (1, 24, 3), (2, 28, 1), (2, 30, 2))
    for groups in (
        groups_of((0, 0, 1)),
        groups_of((2, 3, 1), (1, 9, 0), (0, 0, 1), (1, 1, 1)),
        groups_of(*several, max_count=30),
    ):
        for _ in range(2):  # the counters are zero again
            check_cross_attention(ops, q, cross, groups)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [True, False])
def test_a_feed_gets_the_same_bits_in_any_company(ops, kernels, random, monkeypatch, int8, dtype):
    cross = cross_of(reference_ops, random, 4, dtype, int8)
    q = random(40, D, dtype=dtype)

    def ask(*groups, of=ops, max_count=None):
        return of.cross_attention(q, cross, groups_of(*groups, max_count=max_count))

    single = torch.stack([ask((i % 4, i, 1))[i] for i in range(40)])
    together = ask(*((slot, 10 * slot, 10) for slot in range(4)))
    for slot in range(4):
        other = ask(*((slot, i, 1) for i in range(10 * slot, 10 * slot + 10)))
        mine = slice(10 * slot, 10 * slot + 10)
        assert torch.equal(together[mine], other[mine])
    assert torch.equal(ask((2, 2, 5), max_count=8)[2], single[2])
    assert torch.equal(ask((2, 2, 1), (0, 9, 20), max_count=30)[2], single[2])
    assert torch.equal(ask((2, 1, 30))[[2, 6, 26]], single[[2, 6, 26]])
    direct = groups_of(*((i, i, 1) for i in range(4)))
    few = q[:4].contiguous()
    got = ops.cross_attention(few, cross, dataclasses.replace(direct, direct=True))
    assert torch.equal(got, ops.cross_attention(few, cross, direct))
    assert torch.equal(got, single[:4])

    monkeypatch.setattr(kernels[0], "_MIN_WORKSPACE_TOKENS", 7)  # a workspace that needs many turns
    small = kernels[0].TritonOps(DEVICE, 3, HEADS, KEYS)
    groups = ((1, 1, 30), (0, 33, 4), (3, 38, 1))
    for _ in range(2):
        a, b = ask(*groups), ask(*groups, of=small)
        assert torch.equal(a[1:31], b[1:31]) and torch.equal(a[33:37], b[33:37])
        assert torch.equal(a[38], b[38])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [True, False])
@pytest.mark.parametrize("processors", [1, 10_000])
def test_both_ways_through_the_splits_give_the_same_bits(
    ops, kernels, random, monkeypatch, processors, int8, dtype
):
    """One program for many splits, a program for each, and free slots between busy ones."""
    cross = cross_of(reference_ops, random, 6, dtype, int8)
    q = random(40, D, dtype=dtype)
    some = ((5, 0, 5), (0, 9, 0), (2, 12, 1), (3, 5, 7), (1, 30, 8), (4, 0, 0))
    single = ((5, 5, 1), (0, 0, 0), (1, 1, 1), (2, 9, 0), (3, 11, 1), (4, 7, 0))
    for groups in (groups_of(*some), groups_of(*single)):
        with monkeypatch.context() as patched:
            patched.setattr(ops, "processors", processors)
            got = check_cross_attention(ops, q, cross, groups)
            assert torch.equal(got, ops.cross_attention(q, cross, groups)) or got.isnan().any()
        wide = dataclasses.replace(groups, max_count=9)  # beyond what goes from split to split
        other = ops.cross_attention(q, cross, wide)
        pairs = zip(groups.first.tolist(), groups.count.tolist(), strict=True)
        for first, count in pairs:
            mine = slice(first, first + count)
            assert torch.equal(got[mine], other[mine])


@pytest.mark.parametrize("dtype", DTYPES)
def test_free_slots_leave_everything_as_it_is(ops, random, dtype):
    cross = cross_of(reference_ops, random, 2, dtype, int8=True)
    q = random(3, D, dtype=dtype, spread=0.5)
    nobody = groups_of((0, 0, 0), (1, 2, 0), max_count=4)
    got = ops.cross_attention(q, cross, nobody)
    assert got.isnan().all() if ON_GPU else not got.any()  # as it was allocated
    check_cross_attention(ops, q, cross, groups_of((0, 0, 2), (1, 2, 1)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_replayed_graph_reads_what_is_fed_now(ops, random, dtype):
    """Rows, positions, the table of the past and groups change between two replays."""
    cross = cross_of(reference_ops, random, 3, dtype, int8=True)
    caches, source = self_caches(random, 9, dtype), own_rows(9)
    qkv, q = random(6, 3 * D, dtype=dtype, spread=0.5), random(6, D, dtype=dtype, spread=0.5)
    feed = feed_of([0, 1, 2, 3, 4, 5], [9] * 6, source=source)
    groups = groups_of((0, 0, 3), (1, 3, 1), (2, 4, 2), max_count=8)

    def both():
        return ops.self_attention(qkv, *caches, feed), ops.cross_attention(q, cross, groups)

    both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = both()
    feed.rows.copy_(torch.tensor([3, 8, 6, 7, 1, 0]))
    feed.positions.copy_(torch.tensor([200, 4, 447, 0, 130, 130]))
    source[3, :100] = 2
    groups.slots.copy_(torch.tensor([2, 0, 1]))
    groups.first.copy_(torch.tensor([1, 0, 0]))
    groups.count.copy_(torch.tensor([5, 1, 0]))
    graph.replay()
    for a, b in zip(replayed, both(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_finishes_its_query(ops, random, dtype):
    """Both kinds, fed by a linear layer with few rows; one token a row and several."""
    x, norm = random(5, D, dtype=dtype), norm_of(random, D)
    cross = cross_of(reference_ops, random, 3, dtype, int8=True)
    caches = self_caches(random, 3, dtype)
    mine, twins = [c.clone() for c in caches], [c.clone() for c in caches]
    ages = feed_of([0, 1, 1, 1, 2], [0, 130, 131, 132, 7], multi_token=True)
    groups = groups_of((2, 0, 1), (0, 1, 3), (1, 4, 1))
    for int8 in (True, False):
        query, qkv = (matrix_of(random, n * D, D, dtype, int8) for n in (1, 3))
        got = ops.cross_attention(ops.norm_linear(x, norm, query), cross, groups)
        twin = reference_ops.norm_linear(x, norm, query)
        # The matrix unit takes the query times the keys' scales, rounded to FP16 once more.
        close(got, reference_ops.cross_attention(twin, cross, groups), at_least=6e-3 * ON_GPU)
        got = ops.self_attention(ops.norm_linear(x, norm, qkv), *mine, ages)
        new = reference_ops.norm_linear(x, norm, qkv)
        close(got, reference_ops.self_attention(new, *twins, ages))
        for a, b in zip(mine, twins, strict=True):
            close(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_keys_and_values(ops, random, dtype):
    """Each channel's largest number keeps its value; a channel of zeros stays zeros."""
    layers, groups = 2, 4  # keys and values of each layer
    width = groups * HEADS * 64
    x = random(2, KEYS, width, dtype=dtype) * random(width, dtype=dtype).abs()
    x[0, :, 5] = 0
    made = []
    for one in (ops, reference_ops):
        shape = (layers, 2, 3, HEADS, KEYS, 64)
        cache = torch.full(shape, 77, dtype=torch.int8, device=DEVICE)
        scale = torch.full((layers, 2, 3, HEADS, 64), 0.5, device=DEVICE)
        one.store_cross(x, torch.tensor([2, 0], device=DEVICE), cache, scale)
        assert (cache[:, :, 1] == 77).all() and (scale[:, :, 1] == 0.5).all()
        made.append((cache, scale))
    (mine, my_scale), (twin, twin_scale) = made
    assert torch.allclose(my_scale, twin_scale, rtol=1e-6)
    assert (mine.int() - twin.int()).abs().max() <= 1  # a tie may be rounded either way
    assert (mine != twin).float().mean() < 1e-3
    back = (mine[:, :, 2].float() * my_scale[:, :, 2][..., None, :]).permute(3, 0, 1, 2, 4)
    worst = float(0.51 * my_scale[:, :, 2].max()) + 1e-3
    assert torch.allclose(back.reshape(KEYS, -1), x[0].float(), atol=worst)
    assert (mine[0, 0, 2, 0, :, 5] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed(ops, random, dtype):
    tokens, places = random(900, 384, dtype=dtype), random(CTX, 384, dtype=dtype)
    ids = torch.randint(0, 900, (6, CTX), device=DEVICE)
    feed = feed_of([5, 0, 2, 2, 2], [0, 3, 445, 446, 447], ids)
    twin = reference_ops.embed(feed, tokens, places)
    assert torch.equal(ops.embed(feed, tokens, places), twin)


def text_groups(*counts, slots=(2, 0, 3, 1)):
    """Groups of whole texts, one behind the other, those of no feeds among them."""
    begins = [sum(counts[:i]) for i in range(len(counts))]
    groups = groups_of(*zip(slots, begins, counts, strict=False))
    return dataclasses.replace(groups, whole_texts=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [(133, 0, 1, 65), *nightly(((64,),), ((7, 200),))], ids=str)
def test_whole_texts_attend_to_their_own_past(ops, random, counts, dtype):
    pairs = [(row, at) for row, count in enumerate(counts) for at in range(count)]
    feed = dataclasses.replace(
        feed_of(*zip(*pairs, strict=True), multi_token=True), groups=text_groups(*counts)
    )
    qkv, caches = random(len(pairs), 3 * D, dtype=dtype, spread=0.5), self_caches(random, 5, dtype)
    got = ops.self_attention(qkv, *caches, feed)
    close(got, reference_ops.self_attention(qkv, *caches, feed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [True, *nightly(False)])
def test_whole_texts_attend_to_audio(ops, random, int8, dtype):
    cross = cross_of(reference_ops, random, 4, dtype, int8)
    q = random(199, D, dtype=dtype, spread=0.5)
    check_cross_attention(ops, q, cross, text_groups(133, 0, 1, 65))
