"""What comparisons of kernels with their plain torch twins share."""

import torch

from serve.native.kernels.reference_ops import Matrix, Norm
from serve.native.kernels.step_batch import SlotGroups, StepBatch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float16] if ON_GPU else [torch.float32]
CPU_DTYPES = [torch.float32]  # oneDNN lays bfloat16 out on processors with AVX-512 alone
if torch.ops.mkldnn._is_mkldnn_bf16_supported():
    CPU_DTYPES.append(torch.bfloat16)
HEADS, CTX = 3, 448  # of attention
KEYS = 1500 if ON_GPU else 300
TOLERANCE = {torch.float16: 2e-3, torch.float32: 2e-6}  # ||got - twin|| / ||twin||

GELU = 5e-5  # the polynomial's error; below what FP16 can tell


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


def groups_of(*groups, max_count=None):
    """Groups from (slot, first feed, count)."""
    columns = [torch.tensor(column, device=DEVICE) for column in zip(*groups, strict=True)]
    return SlotGroups(*columns, max_count or int(columns[2].max()))


def feed_of(rows, positions, ids=None, source=None, multi_token=False):
    """Feeds of rows at positions, each in its own slot; up to twenty rows."""
    if ids is None:
        ids = torch.zeros((20, CTX), dtype=torch.int64, device=DEVICE)
    return StepBatch(
        ids=ids,
        rows=torch.tensor(rows, device=DEVICE),
        positions=torch.tensor(positions, device=DEVICE),
        groups=groups_of(*((i, i, 1) for i in range(len(rows)))),
        source=source,
        multi_token=multi_token,
        length=max(positions) + 1,
    )
