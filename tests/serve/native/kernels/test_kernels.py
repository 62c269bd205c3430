"""Every kernel against its plain torch twin: on a CPU through Triton's interpreter, or on a GPU.

Outputs that a kernel allocates hold NaN beforehand, so that an element it does not write is seen.
"""

import dataclasses

import pytest
import torch

from serve.config import RuntimeConfig
from serve.engine import DETECT_LANGUAGE, Dims, TokenizerFacts
from serve.errors import UnavailableError
from serve.native.kernels import definition
from serve.native.kernels.choose import choose
from serve.native.kernels.definition import CrossKV
from serve.native.rules.definition import Rules, new_state
from tests.serve.native.kernels.parity import DEVICE, DTYPES, ON_GPU, close, matrix_of, norm_of

HEADS, CTX, KEYS = 3, 448, 1500
ROWS = [1, 20, 33, 130] if ON_GPU else [1, 33]
# (depth, outputs): tiny, wide, deep enough for a split, and a vocabulary
SHAPES = [(64, 192), (384, 1536), (1536, 384), (128, 8300)]
if ON_GPU:
    SHAPES += [(1280, 3840), (1280, 1280), (5120, 1280), (1280, 51866)]


@pytest.fixture
def ops(kernels, monkeypatch):
    made = kernels[0].TritonOps(DEVICE, 256, HEADS, KEYS)
    empty = torch.empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, float("nan")))
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [True, False])
@pytest.mark.parametrize(("depth", "n_out"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_linear_layers(ops, random, rows, depth, n_out, int8, dtype):
    x = random(rows, depth, dtype=dtype) + 3
    norm = norm_of(random, depth)
    matrix = matrix_of(random, n_out, depth, dtype, int8)
    residual = random(rows, n_out, dtype=dtype)
    added = ops.linear_residual(x, matrix, residual)
    close(ops.finish(added), definition.linear_residual(x, matrix, residual))
    bare = dataclasses.replace(matrix, bias=None)
    close(ops.finish(ops.norm_linear(x, norm, bare)), definition.norm_linear(x, norm, bare))
    hidden = ops.norm_linear_gelu(x, norm, matrix)
    close(hidden, definition.norm_linear_gelu(x, norm, matrix))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("depth", "n_out"), [SHAPES[-1], (64, 8300)])
@pytest.mark.parametrize("rows", [1, 33])
def test_logits(ops, random, rows, depth, n_out, dtype):
    x, norm = random(rows, depth, dtype=dtype) + 3, norm_of(random, depth)
    for int8 in (True, False):
        matrix = matrix_of(random, n_out, depth, dtype, int8, bias=False)
        close(ops.logits(x, norm, matrix), definition.logits(x, norm, matrix))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 8, 20, 64, 65])
def test_layers_that_finish_each_other(ops, random, rows, int8, dtype):
    """The residual stream through a feed-forward block and into the next layer norm."""
    d, wide = (1280, 5120) if ON_GPU else (64, 192)
    x = random(rows, d, dtype=dtype)
    out = matrix_of(random, d, d, dtype, int8)
    fc1, fc2 = matrix_of(random, wide, d, dtype, int8), matrix_of(random, d, wide, dtype, int8)
    norms = [norm_of(random, d) for _ in range(2)]

    def block(ops, finish):
        y = ops.linear_residual(x, out, x)
        y = ops.linear_residual(ops.norm_linear_gelu(y, norms[0], fc1), fc2, y)
        return finish(ops.norm_linear(y, norms[1], out))

    close(block(ops, ops.finish), block(definition, lambda y: y))


@pytest.mark.parametrize("dtype", DTYPES)
def test_self_attention_of_slots_from_new_to_full(ops, random, dtype):
    ages = torch.tensor([0, 1, 127, 128, 129, 300, CTX - 1], device=DEVICE)
    slots, d = len(ages), HEADS * 64
    caches = [random(slots, HEADS, CTX, 64, dtype=dtype) for _ in range(2)]
    mine, twins = [c.clone() for c in caches], [c.clone() for c in caches]
    qkv = random(slots, 3 * d, dtype=dtype, spread=0.5)
    got = ops.self_attention(qkv, *mine, ages)
    close(got, definition.self_attention(qkv, *twins, ages))
    for a, b in zip(mine, twins, strict=True):
        assert torch.equal(a, b)  # this step's key and value, and nothing else, were written


def cross_of(ops, random, slots, dtype, int8):
    """Keys and values of the second of two layers, stored in the last slot first."""
    stack = max(slots, 2)
    kind = torch.int8 if int8 else dtype
    cache = torch.zeros((2, 2, stack, HEADS, KEYS, 64), dtype=kind, device=DEVICE)
    scale = torch.zeros(2, 2, stack, HEADS, 64, device=DEVICE) if int8 else None
    x = random(stack, KEYS, 2 * 2 * HEADS * 64, dtype=dtype)
    ops.store_cross(x, torch.arange(stack - 1, -1, -1, device=DEVICE), cache, scale)
    scales = (None, None) if scale is None else scale[1, :, :slots]
    return CrossKV(*cache[1, :, :slots], *scales)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [True, False])
@pytest.mark.parametrize("slots", [1, 2])
def test_cross_attention(ops, random, slots, int8, dtype):
    cross = cross_of(definition, random, slots, dtype, int8)
    q = random(slots, HEADS * 64, dtype=dtype, spread=0.5)
    for _ in range(2):  # the counters are zero again
        close(ops.cross_attention(q, cross), definition.cross_attention(q, cross))


@pytest.mark.parametrize("dtype", DTYPES)
def test_self_attention_over_views_of_the_caches(ops, random, dtype):
    """`Cache.up_to` shortens them; no number may depend on that."""
    positions, d = torch.tensor([0, 70, 129], device=DEVICE), HEADS * 64
    caches = [random(3, HEADS, CTX, 64, dtype=dtype) for _ in range(2)]
    qkv = random(3, 3 * d, dtype=dtype, spread=0.5)
    for one in (ops, definition):
        whole = one.self_attention(qkv, *(c.clone() for c in caches), positions)
        views = [c.clone()[:, :, :130] for c in caches]
        torch.testing.assert_close(one.self_attention(qkv, *views, positions), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_finishes_its_query(ops, random, dtype):
    """Both kinds, fed by a linear layer with few rows."""
    d = HEADS * 64
    x, norm = random(3, d, dtype=dtype), norm_of(random, d)
    cross = cross_of(definition, random, 3, dtype, int8=True)
    caches = [random(3, HEADS, CTX, 64, dtype=dtype) for _ in range(2)]
    mine, twins = [c.clone() for c in caches], [c.clone() for c in caches]
    ages = torch.tensor([0, 130, 7], device=DEVICE)
    for int8 in (True, False):
        query, qkv = (matrix_of(random, n * d, d, dtype, int8) for n in (1, 3))
        got = ops.cross_attention(ops.norm_linear(x, norm, query), cross)
        close(got, definition.cross_attention(definition.norm_linear(x, norm, query), cross))
        got = ops.self_attention(ops.norm_linear(x, norm, qkv), *mine, ages)
        new = definition.norm_linear(x, norm, qkv)
        close(got, definition.self_attention(new, *twins, ages))
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
    for one in (ops, definition):
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
    positions = torch.tensor([0, 3, 447, 9], device=DEVICE)
    twin = definition.embed(ids, positions, tokens, places)
    assert torch.equal(ops.embed(ids, positions, tokens, places), twin)


@pytest.mark.gpu  # the interpreter multiplies with NumPy, whose threads split sums by shape
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_in_any_company(ops, random, dtype):
    """Alone, among few and among many rows."""
    most = ROWS[-1]
    norm = norm_of(random, 384)
    x = random(most, 384, dtype=dtype)
    for matrix in (
        matrix_of(random, 1152, 384, dtype, int8=True),
        matrix_of(random, 1152, 384, dtype, int8=False),
    ):
        everyone = ops.finish(ops.norm_linear(x, norm, matrix))
        for rows in (1, 17, 40, 64):
            alone = ops.finish(ops.norm_linear(x[:rows], norm, matrix))
            assert torch.equal(alone, everyone[:rows]), rows
    vocabulary = matrix_of(random, 8300, 384, dtype, int8=True)
    everyone = ops.logits(x, norm, vocabulary)
    for rows in (1, 17, 40):
        assert torch.equal(ops.logits(x[:rows], norm, vocabulary), everyone[:rows]), rows


@pytest.mark.gpu
@pytest.mark.parametrize("int8", [True, False])
@pytest.mark.parametrize("d", [384, 1280])
def test_a_layer_gives_a_row_the_same_bits_in_any_company(ops, random, d, int8):
    """Unfinished and finished sums, and layer norms of either, through a whole block."""
    most, dtype = 256, torch.float16
    x = random(most, d, dtype=dtype)
    out = matrix_of(random, d, d, dtype, int8)
    fc1 = matrix_of(random, 4 * d, d, dtype, int8)
    fc2 = matrix_of(random, d, 4 * d, dtype, int8)
    norms = [norm_of(random, d) for _ in range(2)]
    words = matrix_of(random, 8300, d, dtype, int8, bias=False)

    def block(x):
        y = ops.linear_residual(x, out, x)
        y = ops.linear_residual(ops.norm_linear_gelu(y, norms[0], fc1), fc2, y)
        return ops.logits(y, norms[1], words)

    everyone = block(x)
    for rows in (1, 2, 8, 9, 16, 33, 64, 65, 128):
        for begin in (0, most - rows):
            few = block(x[begin : begin + rows].contiguous())
            assert torch.equal(few, everyone[begin : begin + rows]), rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [True, False])
def test_cross_attention_gives_the_same_bits_in_any_company(ops, random, int8, dtype):
    cross = cross_of(definition, random, 4, dtype, int8)
    q = random(4, HEADS * 64, dtype=dtype)
    scales = [None if s is None else s[:1] for s in (cross.k_scale, cross.v_scale)]
    alone = ops.cross_attention(q[:1], CrossKV(cross.k[:1], cross.v[:1], *scales))
    assert torch.equal(ops.cross_attention(q, cross)[:1], alone)


FACTS = TokenizerFacts(
    eot=4000, sot=4001, sot_prev=4002, no_speech=4003, no_timestamps=4004, timestamp_begin=4100,
    transcribe=4005, translate=4006, languages={"en": 4010, "es": 4011, "de": 4019},
    suppress_tokens=(1, 2, 7, 4001), begin_suppress_tokens=(220, 4000),
    max_initial_timestamp_index=50, alignment_heads=(),
)  # fmt: skip
VOCAB = Dims(80, 1500, 64, 1, 1, 128, 4100 + 1501, 64, 64, 1, 1, 128)


def start(state, slot, prompt, **fields):
    state.tokens[slot, : len(prompt)] = torch.tensor(prompt, device=DEVICE)
    state.prompt_len[slot] = len(prompt)
    state.sot_at[slot] = prompt.index(FACTS.sot)
    state.finished[slot] = False
    for name, value in {"limit": 40, "seed": slot, **fields}.items():
        getattr(state, name)[slot] = value


@pytest.mark.parametrize("steps", [24])
def test_the_choice_equals_the_rules_step_by_step(kernels, random, steps):
    """Random logits that favour timestamps and the end now and then, through whole sequences."""
    rules = Rules(FACTS, VOCAB, DEVICE)
    chooser = kernels[1].TritonChoice(rules, 8)
    states = [new_state(8, VOCAB.n_text_ctx, DEVICE) for _ in range(2)]
    for state in states:
        start(state, 0, (4001, 4010, 4005), timestamps=True)
        start(state, 1, (4001, DETECT_LANGUAGE, 4005), timestamps=True)
        start(state, 2, (4001, 4011, 4005, 4004))
        start(state, 3, (4002, 9, 8, 4001, 4010, 4005), timestamps=True, temperature=0.7)
        start(state, 4, (4001, DETECT_LANGUAGE, 4005, 4004), temperature=1.0, limit=9)
        start(state, 6, (4001, 4010, 4005), timestamps=True, temperature=0.2)  # 5 stays free
    mine, twin = states
    for step in range(steps):
        logits = random(7, VOCAB.n_vocab, spread=3.0)
        logits[:, FACTS.timestamp_begin :] += [-6.0, 4.0][step % 3 == 2]
        logits[:, FACTS.eot] += 8.0 * (step > 12)
        rules.advance(twin, logits, sampling=True)
        chooser.advance(mine, logits)
        for field in dataclasses.fields(twin)[1:]:  # all that is in `packed`
            a, b = getattr(mine, field.name), getattr(twin, field.name)
            if a.is_floating_point():
                assert torch.allclose(a, b, atol=2e-4), (step, field.name, a, b)
            else:
                assert torch.equal(a, b), (step, field.name, a, b)
    assert int(twin.finished[:7].sum()) >= 3


def test_the_choice_of_kernels_says_why():
    ops = choose("auto", torch.device("cpu"), VOCAB, 4)
    assert (ops.name, ops.reason) == ("torch", "auto: the device is cpu, not CUDA")
    assert choose("torch", torch.device("cpu"), VOCAB, 4).reason == 'runtime.kernels = "torch"'
    with pytest.raises(UnavailableError, match=r'"triton" cannot run here: the device is cpu'):
        choose("triton", torch.device("cpu"), VOCAB, 4)
    assert RuntimeConfig().kernels == "auto"
