"""What comparisons of kernels with their plain torch twins share."""

import torch

from serve.native.kernels.definition import Matrix, Norm

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float16] if ON_GPU else [torch.float32]
TOLERANCE = {torch.float16: 2e-3, torch.float32: 2e-6}  # ||got - twin|| / ||twin||


def close(got, twin, at_least=0.0):
    assert got.shape == twin.shape and got.dtype == twin.dtype
    error = (got.double() - twin.double()).norm() / twin.double().norm()
    assert float(error) < max(at_least, TOLERANCE[DTYPES[0]]), float(error)


def norm_of(random, width):
    return Norm(1 + random(width, spread=0.2), random(width, spread=0.2))


def matrix_of(random, n_out, depth, dtype, int8, bias=True):
    offset = random(n_out, dtype=dtype) if bias else None
    if not int8:
        return Matrix(random(n_out, depth, dtype=dtype, spread=depth**-0.5), offset)
    weight = (random(n_out, depth) * 40).clamp(-127, 127).round().to(torch.int8)
    return Matrix(weight, offset, random(n_out).abs() * depth**-0.5 / 40)
