"""Compiles what a runtime launches, for a compute capability, on a machine without a GPU.

A program by itself, for what is interpreted cannot be compiled in the same process. The operations
run on a CPU's tensors, and each launch ends where the compiler has made its binary.
"""

import collections
import dataclasses
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from serve.native.kernels.decoder import TritonOps
from serve.native.kernels.encoder import Fp8Encoder, TritonEncoder
from serve.native.kernels.flash import flash_attention
from serve.native.kernels.reference_ops import CrossKV, Matrix, Norm
from serve.native.kernels.smooth import smooth
from serve.native.kernels.step_batch import SlotGroups, StepBatch
from serve.native.kernels.warp import warp
from serve.native.rules.kernel import TritonRules
from serve.native.rules.state import new_state
from tests.serve.native.rules.rows import DIMS, FACTS, picks_of

HEADS, KEYS, D, CONTEXT = 3, 1500, 192, 448
SHARED = {80: 166_912, 89: 101_376, 90: 232_448}
"""Bytes of shared memory that one program may have, by compute capability."""
made = collections.Counter()


class NoDriver:
    """What the compiler asks about the device."""

    def __init__(self, capability):
        self._capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only(capability):
    """From now on a launch compiles."""
    run = JITFunction.run

    def compiled(self, *args, warmup, **kwargs):
        binary = run(self, *args, warmup=True, **kwargs)
        made[self.__name__] += 1
        assert binary.asm["cubin"]
        assert binary.metadata.shared <= SHARED[capability], self.__name__
        return binary

    JITFunction.run = compiled
    triton.runtime.driver.set_active(NoDriver(capability))


def feeds(count, multi_token, source, tokens_per_row):
    """So many feeds of two slots' rows."""
    rows = torch.arange(count)
    groups = SlotGroups(
        torch.tensor([0, 1]), torch.tensor([0, 1]), torch.tensor([1, count - 1]), max(1, count - 1)
    )
    ids = torch.zeros((count, CONTEXT), dtype=torch.int64)
    table = torch.zeros((count, CONTEXT), dtype=torch.int32) if source else None
    return StepBatch(
        ids, rows, torch.full_like(rows, 9), groups, table, multi_token, 10, tokens_per_row
    )


def matrix(n_out, n_in, int8):
    kind = torch.int8 if int8 else torch.float16
    scale = torch.ones(n_out) if int8 else None
    return Matrix(torch.zeros(n_out, n_in, dtype=kind), torch.zeros(n_out).half(), scale)


def layer(ops, count, multi_token, source, int8, tokens_per_row=1):
    """A layer of the decoder and the logits, for so many feeds."""
    norm, feed = (
        Norm(torch.ones(D), torch.zeros(D)),
        feeds(count, multi_token, source, tokens_per_row),
    )
    own = [torch.zeros(count, CONTEXT, HEADS, 64).half() for _ in range(2)]
    kind = torch.int8 if int8 else torch.float16
    scales = [torch.ones(2, HEADS, 64) if int8 else None for _ in range(2)]
    cross = CrossKV(*(torch.zeros(2, HEADS, KEYS, 64, dtype=kind) for _ in range(2)), *scales)
    x = ops.embed(feed, torch.zeros(900, D).half(), torch.zeros(CONTEXT, D).half())
    mixed = ops.self_attention(ops.norm_linear(x, norm, matrix(3 * D, D, int8)), *own, feed)
    x = ops.linear_residual(mixed, matrix(D, D, int8), x)
    query = ops.norm_linear(x, norm, matrix(D, D, int8))
    x = ops.linear_residual(ops.cross_attention(query, cross, feed.groups), matrix(D, D, int8), x)
    hidden = ops.norm_linear_gelu(x, norm, matrix(4 * D, D, int8))
    x = ops.linear_residual(hidden, matrix(D, 4 * D, int8), x)
    words = dataclasses.replace(matrix(8300, D, int8), bias=None)
    ops.logits(x, norm, words, torch.arange(min(count, 9)))


def whole_texts(ops):
    """The attention of texts that are fed at once, to INT8 and to float16."""
    feed = feeds(70, multi_token=True, source=False, tokens_per_row=1)
    groups = dataclasses.replace(feed.groups, whole_texts=True)
    own = [torch.zeros(70, CONTEXT, HEADS, 64).half() for _ in range(2)]
    qkv = torch.zeros(70, 3 * D).half()
    ops.self_attention(qkv, *own, dataclasses.replace(feed, groups=groups))
    for kind, scale in ((torch.int8, torch.ones(2, HEADS, 64)), (torch.float16, None)):
        cross = CrossKV(*(torch.zeros(2, HEADS, KEYS, 64, dtype=kind) for _ in "kv"), scale, scale)
        ops.cross_attention(qkv[:, :D].contiguous(), cross, groups)


def widest(ops, int8):
    """The products that take the most shared memory: turbo's widths, many rows."""
    for n_out, n_in in ((1280, 5120), (51866, 1280), (3840, 1280)):
        for rows in (130, 600):
            ops._linear(torch.zeros(rows, n_in).half(), ops.store(matrix(n_out, n_in, int8)))


def thinnest(ops):
    """Products of the fewest rows: one, with its layer norm, and several; of a turn, and of two."""
    norm = Norm(torch.ones(1280), torch.zeros(1280))
    for rows in (1, 5):
        x, wide = torch.zeros(rows, 1280).half(), torch.zeros(rows, 5120).half()
        hidden = ops.norm_linear_gelu(x, norm, ops.store(matrix(5120, 1280, int8=True)))
        assert hidden.shape == wide.shape
        ops.linear_residual(wide, ops.store(matrix(1280, 5120, int8=True)), x)
        words = dataclasses.replace(matrix(51866, 1280, int8=True), bias=None)
        assert isinstance(ops.logits(x, norm, ops.store(words)), torch.Tensor)


def choice(searching, drafted, overlaps):
    """The choice of the next token of three rows."""
    cpu = torch.device("cpu")
    state = new_state(3, DIMS.n_text_ctx, cpu)
    rules = TritonRules(FACTS, DIMS, cpu, max_picks=3, searching=searching)
    rules._overlaps = overlaps
    rules.advance(state, picks_of(3), torch.zeros(3, DIMS.n_vocab), drafted)


def encoder():
    """What is only there on Hopper: attention by two warpgroups, by three; products with GELU."""
    for batch in (1, 8):
        flash_attention(torch.zeros(batch, KEYS, 3 * D).half(), HEADS, 20)
    cpu, norm = torch.device("cpu"), Norm(torch.ones(D), torch.zeros(D))
    linear = Matrix(torch.zeros(4 * D, D).half(), torch.zeros(4 * D).half())
    for made in (TritonEncoder(cpu), Fp8Encoder(cpu)):
        made.linear_gelu(made.norm(torch.zeros(9, D).half(), norm), made.prepare(linear, norm))


def main(capability):
    compile_only(capability)
    ops = TritonOps(torch.device("cpu"), 600, HEADS, KEYS)
    ops._on_gpu, ops._overlaps = True, capability >= 90  # as its launches would be there
    ops._packs_int8 = capability == 90
    for ops.processors in (1, 100):
        layer(ops, 2, multi_token=False, source=False, int8=True)
        layer(ops, 6, multi_token=False, source=True, int8=False)
    layer(ops, 70, multi_token=True, source=False, int8=True)
    ops.processors = 1  # few enough for feeds to share what they read
    layer(ops, 8, multi_token=True, source=False, int8=True, tokens_per_row=4)
    whole_texts(ops)
    for int8 in (True, False):
        widest(ops, int8)
    cache = torch.zeros(1, 2, 2, HEADS, KEYS, 64, dtype=torch.int8)
    x, slots = torch.zeros(1, KEYS, 2 * D).half(), torch.tensor([1])
    ops.store_cross(x, slots, cache, torch.zeros(1, 2, 2, HEADS, 64))
    size = torch.tensor([9, 9])
    warp(smooth(torch.zeros(2, 3, 9, KEYS), size, size, 1e-30), size - 9, size, size)
    choice(searching=False, drafted=True, overlaps=ops._overlaps)
    choice(searching=True, drafted=False, overlaps=ops._overlaps)
    if capability == 90:
        encoder()
        thinnest(ops)
    print(*sorted(made))


if __name__ == "__main__":
    main(int(sys.argv[1]))
