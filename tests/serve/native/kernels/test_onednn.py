"""The operations of a CPU against their plain torch twins."""

import dataclasses

import pytest
import torch

from serve.contract.config import RuntimeConfig
from serve.contract.errors import UnavailableError
from serve.native.kernels import onednn, reference_ops
from serve.native.kernels.choose import choose
from serve.native.kernels.onednn import OneDnnOps
from serve.native.kernels.reference_ops import Matrix, Norm
from serve.native.kernels.step_batch import SlotGroups, StepBatch
from tests.serve.native.kernels.parity import CPU_DTYPES, CTX, HEADS
from tests.serve.native.kernels.test_kernels import VOCAB

CPU = torch.device("cpu")
SHAPES = [(64, 192), (384, 1536), (1536, 384)]  # depth, outputs
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
# Largest error beside the results' spread: of other orders of sums, and of 8 bits a number.
ERROR = {FLOAT32: 1e-5, BFLOAT16: 0.04}
torch.manual_seed(7)


def near(got, expected, dtype):
    error = (got.float() - expected.float()).abs().max() / expected.float().std()
    assert error < ERROR[dtype]


def sample(depth, n_out, rows=(3,)):
    x = torch.randn(*rows, depth) + 3
    norm = Norm(torch.rand(depth) + 0.5, torch.randn(depth))
    return x, norm, Matrix(torch.randn(n_out, depth) / depth**0.5, torch.randn(n_out))


def laid_out(ops, matrix, dtype):
    bias = None if matrix.bias is None else matrix.bias.to(dtype)
    return ops.store(dataclasses.replace(matrix, weight=matrix.weight.to(dtype), bias=bias))


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize(("depth", "n_out"), SHAPES)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_linear_layers_of_a_step(rows, depth, n_out, dtype):
    ops, (x, norm, matrix) = OneDnnOps(dtype), sample(depth, n_out, (rows,))
    for plain in (matrix, dataclasses.replace(matrix, bias=None)):
        own = laid_out(ops, plain, dtype)
        got = ops.norm_linear(x, norm, own)
        assert got.dtype == dtype
        near(got, reference_ops.norm_linear(x, norm, plain), dtype)
        hidden = ops.norm_linear_gelu(x, norm, own)
        near(hidden, reference_ops.norm_linear_gelu(x, norm, plain), dtype)
        residual = torch.randn(rows, n_out)
        added = ops.linear_residual(x.to(dtype), own, residual)
        assert added.dtype == FLOAT32, "the residual stream"
        near(added, reference_ops.linear_residual(x, plain, residual), dtype)


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize(("depth", "n_out"), SHAPES)
def test_linear_layers_of_the_encoder(depth, n_out, dtype):
    ops, (x, norm, wide) = OneDnnOps(dtype), sample(depth, n_out, (2, 30))
    narrow = Matrix(torch.randn(depth, n_out) / n_out**0.5, None)
    own, back = (laid_out(ops, matrix, dtype) for matrix in (wide, narrow))
    normed, mine, twin = ops.norm(x, norm), x.clone(), x.clone()
    assert normed.dtype == dtype
    near(ops.linear(normed, own), reference_ops.linear(reference_ops.norm(x, norm), wide), dtype)
    hidden = ops.linear_gelu(normed, own)
    expected = reference_ops.linear_gelu(reference_ops.norm(x, norm), wide)
    near(hidden, expected, dtype)
    shift = torch.randn(depth)
    got = ops.add_linear_last_norm(mine, hidden, back, shift, norm)
    near(got, reference_ops.add_linear_norm(twin, expected, narrow, shift, norm), dtype)
    assert mine.dtype == FLOAT32, "the residual stream"
    near(mine, twin, dtype)


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_logits_of_a_matrix_in_full(dtype):
    """They are float32 beside all else in bfloat16."""
    ops, (x, norm, matrix) = OneDnnOps(dtype), sample(128, 8300, (5,))
    matrix, wanted = dataclasses.replace(matrix, bias=None), torch.tensor([1, 3])
    got = ops.logits(x, norm, ops.store(matrix), wanted)
    assert got.dtype == FLOAT32
    near(got, reference_ops.logits(x, norm, matrix, wanted), FLOAT32)


@pytest.mark.skipif(not onednn.has_int8(), reason="needs a processor with AVX512-VNNI")
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 40])
def test_logits_of_int8_are_as_good_as_float32s(rows):
    """15 bits of each number, and sums of whole numbers: not 8 bits, as bfloat16 would have."""
    ops, (x, norm, _) = OneDnnOps(BFLOAT16), sample(512, 51865, (rows,))
    x[0] *= 100.0
    weight = torch.randint(-127, 128, (51865, 512), dtype=torch.int8)
    matrix = Matrix(weight, None, torch.rand(51865) / 1000)
    stored, expected = ops.store(matrix), reference_ops.logits(x, norm, matrix)
    got = ops.logits(x, norm, stored)
    assert (got - expected).abs().max() / expected.std() < 1e-3
    alone = torch.cat([ops.logits(row, norm, stored) for row in x.split(1)])
    assert torch.equal(alone, got), "who else is in the batch changes nothing"


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_the_past_of_rows_side_by_side_is_read_as_it_lies(dtype):
    """Rows in order, out of order, and a prompt; the bits are those of rows that are looked up."""
    ops, caches = OneDnnOps(dtype), [torch.randn(9, CTX, HEADS, 64).to(dtype) for _ in range(2)]
    table = torch.arange(9, dtype=torch.int32)[:, None].repeat(1, CTX)
    ordered = ([2, 3, 4, 5], [7, 31, 0, 40])
    prompt = ([6] * 4, [3, 4, 5, 6])
    for (rows, positions), together in (
        (ordered, True),
        (prompt, True),
        (([3, 1, 2], [9, 9, 9]), False),
    ):
        at = torch.tensor(rows), torch.tensor(positions)
        ids = torch.zeros((9, CTX), dtype=torch.int64)
        groups = SlotGroups(at[0], torch.arange(len(rows)), torch.ones_like(at[0]), 1)
        feed = StepBatch(ids, *at, groups, None, rows == [6] * 4, max(positions) + 1)
        assert bool(feed.adjacent_runs) == together
        qkv = (torch.randn(len(rows), 3 * HEADS * 64) / 8).to(dtype)
        looked_up = dataclasses.replace(feed, source=table)
        assert not looked_up.adjacent_runs
        got, expected = (ops.self_attention(qkv.clone(), *caches, one) for one in (feed, looked_up))
        assert torch.equal(got, expected)


def test_a_processor_has_what_it_can(monkeypatch):
    fast = {"amx_bf16": True, "avx512_bf16": True, "avx512_vnni": True}
    for able, dtype in ((fast, BFLOAT16), ({"avx2": True}, FLOAT32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda able=able: able)
        ops = choose("auto", CPU, VOCAB, 4)
        assert (ops.name, ops.dtype, ops.int8_vocabulary) == ("onednn", dtype, able is fast)
        assert ops.reason == f"auto: {str(dtype)[6:]}" and not ops.reads_int8
        assert choose("onednn", CPU, VOCAB, 4, compute_type="float32").dtype == FLOAT32
        if able is fast:
            assert choose("auto", CPU, VOCAB, 4, compute_type="bfloat16").dtype == BFLOAT16
        else:
            with pytest.raises(UnavailableError, match='"bfloat16" needs a processor with AMX'):
                choose("auto", CPU, VOCAB, 4, compute_type="bfloat16")
    with pytest.raises(UnavailableError, match=r"compute_type = .*cpu runs torch kernels"):
        choose("torch", CPU, VOCAB, 4, compute_type="bfloat16")
    assert choose("torch", CPU, VOCAB, 4, compute_type="float32").dtype == FLOAT32
    assert RuntimeConfig().compute_type == "auto"


def test_a_torch_without_onednn_computes_by_itself(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    ops = choose("auto", CPU, VOCAB, 4)
    assert (ops.name, ops.reason) == ("torch", "auto: this torch has no oneDNN")
    with pytest.raises(UnavailableError, match='"onednn" cannot run here: this torch has no'):
        choose("onednn", CPU, VOCAB, 4)


def test_other_processors_have_plain_torch(monkeypatch):
    monkeypatch.setattr("serve.native.kernels.choose.platform.machine", lambda: "aarch64")
    ops = choose("auto", CPU, VOCAB, 4)
    assert (ops.name, ops.dtype) == ("torch", FLOAT32)
    assert ops.reason == "auto: the processor is aarch64, not x86_64"


def test_onednn_is_refused_on_a_gpu():
    with pytest.raises(UnavailableError, match='"onednn" cannot run here: the device is cuda'):
        choose("onednn", torch.device("cuda"), VOCAB, 4)
