"""The encoder's kernels against their twins: on a GPU, else in Triton's interpreter."""

import pytest
import torch

from serve.contract.config import RuntimeConfig
from serve.contract.errors import UnavailableError
from serve.contract.manifest import Dims
from serve.native.kernels import reference_ops
from serve.native.kernels.choose import choose
from serve.native.kernels.reference_ops import Matrix
from tests.serve.native.kernels.parity import (
    DEVICE,
    DTYPES,
    GELU,
    ON_GPU,
    close,
    matrix_of,
    norm_of,
)

D, WIDE = (1280, 5120) if ON_GPU else (64, 192)
BATCHES = [1, 3] if ON_GPU else [2]


@pytest.fixture
def encoder(kernels):
    return kernels[2].TritonEncoder(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_linear_gelu(encoder, random, batch, dtype):
    for depth, n_out in ((D, WIDE), (80, D)):
        x, matrix = (
            random(batch, 150, depth, dtype=dtype),
            matrix_of(random, n_out, depth, dtype, False),
        )
        for spread in (1, 30):  # far beyond where the polynomial holds
            wide = x * spread
            close(encoder.linear_gelu(wide, matrix), reference_ops.linear_gelu(wide, matrix), GELU)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_mels", [80, 128])
@pytest.mark.parametrize("batch", BATCHES)
def test_stem(encoder, random, batch, n_mels, dtype):
    """Windows do not run into each other, and begin and end as if in silence."""
    time = 3000 if ON_GPU else 60
    features = random(batch, n_mels, time)
    convs = [matrix_of(random, D, 3 * depth, dtype, False) for depth in (n_mels, D)]
    positions = random(time // 2, D, dtype=dtype)
    close(
        encoder.stem(features, *convs, positions),
        reference_ops.stem(features, *convs, positions),
        GELU,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2, 8] if ON_GPU else [2])
def test_attention(encoder, random, batch, dtype):
    for time, heads in ((1500, 20), (128, 2), (70, 1)) if ON_GPU else ((30, 2),):
        qkv = random(batch, time, 3 * heads * 64, dtype=dtype)
        qkv[..., : heads * 64] *= 0.3  # as if 1 / 8 was in it
        got = encoder.encoder_attention(qkv, heads)
        close(got, reference_ops.encoder_attention(qkv, heads))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_knows_its_own_window_alone(encoder, random, dtype):
    """Bit for bit, and whatever the neighbours hold."""
    time, heads = (1500, 20) if ON_GPU else (30, 2)
    qkv = random(8 if ON_GPU else 3, time, 3 * heads * 64, dtype=dtype)
    alone = encoder.encoder_attention(qkv[1:2].contiguous(), heads)
    qkv[0], qkv[2] = float("nan"), float("inf")
    assert torch.equal(encoder.encoder_attention(qkv, heads)[1:2], alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_residual_stream(encoder, random, dtype):
    x, y = random(2, 75, D, dtype=dtype), random(2, 75, WIDE, dtype=dtype)
    matrix = matrix_of(random, D, WIDE, dtype, False, bias=False)
    norm, shift = norm_of(random, D), random(D)
    close(encoder.norm(x, norm), reference_ops.norm(x, norm))
    mine, twin = x.clone(), x.clone()
    got = encoder.add_linear_norm(mine, y, matrix, shift, norm)
    close(got, reference_ops.add_linear_norm(twin, y, matrix, shift, norm))
    close(mine, twin)


def values(scaled):
    width = scaled.values.shape[-1]
    return scaled.values.float().view(-1, width) * scaled.scale[:, None]


def test_what_fp8_outputs_can_reach(kernels, random):
    """No row behind a layer norm gives more, however unlike the others it is."""
    matrix, norm = matrix_of(random, 96, D, torch.float32, False), norm_of(random, D)
    most = kernels[2].reach(matrix, norm)
    rows = random(500, D, dtype=torch.float32)
    rows[:96] = matrix.weight * norm.weight  # the worst for one output each
    rows[96:200, :-1] = 0  # all in one number
    found = reference_ops.linear(reference_ops.norm(rows, norm), matrix).abs().max()
    assert 0.3 * most < found < most


@pytest.mark.gpu  # FP8 needs a GPU of compute capability 9.0
def test_fp8_rows_are_scaled_as_the_twin_says(kernels, random):
    encoder = kernels[2].Fp8Encoder(DEVICE)
    x, norm = random(2, 75, D, dtype=torch.float16), norm_of(random, D)
    for got, expected in (
        (encoder.norm(x, norm), reference_ops.norm(x, norm)),
        (kernels[2].scale_rows(x), x),
    ):
        twin = reference_ops.scaled(expected)
        assert torch.allclose(got.scale, twin.scale, rtol=2e-3)
        error = (values(got) - values(twin)).norm() / values(twin).norm()
        assert float(error) < 0.01  # numbers that rounding to FP16 moved across an FP8 edge


@pytest.mark.gpu
@pytest.mark.parametrize("batch", BATCHES)
def test_fp8_gelu(kernels, random, batch):
    """One scale for all of it loses no more than a scale for each row would."""
    encoder = kernels[2].Fp8Encoder(DEVICE)
    norm, matrix = norm_of(random, D), matrix_of(random, WIDE, D, torch.float16, False)
    prepared = encoder.prepare(matrix, norm)
    x = encoder.norm(random(batch, 150, D, dtype=torch.float16), norm)
    got = encoder.linear_gelu(x, prepared)
    assert (got.scale == prepared.step).all()
    weight = prepared.weight.float() * prepared.scale[:, None]
    exact = reference_ops.linear_gelu(values(x), Matrix(weight, matrix.bias.float()))
    by_row = (values(reference_ops.scaled(exact)) - exact).norm()
    assert float((values(got) - exact).norm()) < 1.05 * float(by_row)


@pytest.mark.gpu
def test_fp8_products(kernels, random):
    """What FP8 loses: about 4 % of a product of random numbers, and nothing systematic."""
    encoder = kernels[2].Fp8Encoder(DEVICE)
    x, y = (random(1, 75, width, dtype=torch.float16) for width in (D, WIDE))
    wide = matrix_of(random, WIDE, D, torch.float16, False)
    narrow = matrix_of(random, D, WIDE, torch.float16, False, bias=False)
    norm, shift = norm_of(random, D), random(D)
    got = encoder.linear(reference_ops.scaled(x), encoder.prepare(wide))
    error = (got.float() - reference_ops.linear(x, wide).float()).norm()
    assert float(error / reference_ops.linear(x, wide).float().norm()) < 0.06
    mine, twin = x.clone(), x.clone()
    for last in (False, True):
        added = encoder.add_linear_last_norm if last else encoder.add_linear_norm
        got = added(mine, y, encoder.prepare(narrow), shift, norm)
        expected = reference_ops.add_linear_norm(twin, y, narrow, shift, norm)
        got = got if last else values(got).view(expected.shape)
        assert float((got.float() - expected.float()).norm() / expected.float().norm()) < 0.08


def test_fp8_is_refused_where_it_cannot_run():
    dims = Dims(80, 1500, 64, 1, 1, 128, 5601, 448, 64, 1, 1, 128)
    with pytest.raises(UnavailableError, match=r'"fp8" needs .* 9\.0 .*cpu runs onednn kernels'):
        choose("auto", torch.device("cpu"), dims, 4, "fp8")
    with pytest.raises(UnavailableError, match="cpu runs torch kernels"):
        choose("torch", torch.device("cpu"), dims, 4, "fp8")
    assert RuntimeConfig().encoder_precision == "full"
    assert not choose("auto", torch.device("cpu"), dims, 4, "auto", proof=None).fp8
