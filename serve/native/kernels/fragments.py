"""Load tensors into tensor-core register layouts, for the Gluon kernels of cross-attention.

A Gluon program chooses the register and thread of every element. These layouts load elements from
global memory directly to where `mma.sync` m16n8k16 (PTX ISA, "Matrix Fragments") expects them,
without shared memory. A product may add channels in any order that both operands share, keys may
have any order, and output columns may be permuted. One load therefore fetches sixteen adjacent
int8 of a key, or eight of a value. The first axis is always the warp.

INT8 becomes float16 without arithmetic: u = number + 128 in the low byte of a float16 is the
subnormal u * 2 ** -24, which tensor cores multiply exactly. The reader of the product subtracts
the effect of 128. Scores need no correction: it is equal for all keys, and softmax cancels it.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def"

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.constexpr_function
def mma_layout(warps: int) -> gl.NVMMADistributedLayout:
    """Make the layout of products (warps, 16, n); each warp computes its own product."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@triton.constexpr_function
def _linear(
    registers: list[list[int]], lanes: list[list[int]], shape: list[int]
) -> gl.DistributedLinearLayout:
    """Make a layout of registers and lanes, given by their bases in the last two axes."""
    wide = [[[0, *base] for base in bases] for bases in (registers, lanes)]
    warps = [[1 << i, 0, 0] for i in range(shape[0].bit_length() - 1)]
    return gl.DistributedLinearLayout(*wide, warps, [], shape)


@triton.constexpr_function
def _far(begin: int, keys: int) -> list[list[int]]:
    """Return the bases that address the keys from `begin` on."""
    return [[1 << i, 0] for i in range(begin.bit_length() - 1, keys.bit_length() - 1)]


@triton.constexpr_function
def keys_layout(warps: int, keys: int, int8: bool) -> gl.DistributedLinearLayout:
    """Make the layout of loaded keys: (warps, keys, 64), or (warps, keys, 16) words of int8."""
    near, lanes = ([1, 2], [4, 8]) if int8 else ([1, 2, 4, 8], [16, 32])
    registers = [[0, base] for base in near] + _far(8, keys)
    threads = [[0, base] for base in lanes] + [[1, 0], [2, 0], [4, 0]]
    return _linear(registers, threads, [warps, keys, 16 if int8 else 64])


@triton.constexpr_function
def values_layout(warps: int, keys: int, int8: bool) -> gl.DistributedLinearLayout:
    """Make the layout of loaded values, with the shapes of `keys_layout`."""
    near, lanes = ([1], [2, 4, 8]) if int8 else ([1, 2, 4], [8, 16, 32])
    registers = [[0, base] for base in near] + [[1, 0], [8, 0]] + _far(16, keys)
    threads = [[2, 0], [4, 0]] + [[0, base] for base in lanes]
    return _linear(registers, threads, [warps, keys, 16 if int8 else 64])


@triton.constexpr_function
def query_layout(warps: int) -> gl.DistributedLinearLayout:
    """Make the layout of loaded queries, (warps, 16, 64); every warp has all of them."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]]
    return _linear(registers, [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]], [warps, 16, 64])


@triton.constexpr_function
def rows_layout(warps: int, rows: int, n: int) -> gl.DistributedLinearLayout:
    """Make the layout of a product's first rows, (warps, rows, n)."""
    registers = [[0, 1]] + [[8, 0]] * (rows == 16)
    registers += [[0, 1 << i] for i in range(3, n.bit_length() - 1)]
    return _linear(registers, [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [warps, rows, n])


@gluon.jit
def along(n: gl.constexpr, axis: gl.constexpr, layout: gl.constexpr) -> gl.tensor:
    """Return 0 to n - 1 along one axis of a three-axis layout; the other axes have length 1."""
    if axis == 0:
        inner: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
        return gl.expand_dims(gl.expand_dims(gl.arange(0, n, inner), 1), 2)
    elif axis == 1:
        middle: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
        return gl.expand_dims(gl.expand_dims(gl.arange(0, n, middle), 0), 2)
    else:
        outer: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, layout))
        return gl.expand_dims(gl.expand_dims(gl.arange(0, n, outer), 0), 1)


@gluon.jit
def key_at(place) -> gl.tensor:
    """Return the key at a position; of each eight, four lanes read four consecutive keys."""
    return (place & -8) | ((place >> 1) & 3) | ((place & 1) << 2)


@gluon.jit
def load_run(at, row, there: int, layout: gl.constexpr, eviction: gl.constexpr) -> gl.tensor:
    """Load keys or values from a row on, one run per warp, with zeros past the first `there`."""
    warps: gl.constexpr = layout.shape[0]
    run: gl.constexpr = layout.shape[1]
    step: gl.constexpr = layout.shape[2]
    key = along(warps, 0, layout) * run + key_at(along(run, 1, layout))
    at = (at + row * step) + (key * step + along(step, 2, layout))
    return gl.load(at, mask=key < there, other=0, eviction_policy=eviction)


@gluon.jit
def channel_at(column) -> gl.tensor:
    """Return the channel of a column of `values_operand`."""
    return column % 8 * 8 + column // 8


@gluon.jit
def top_rows(x, rows: gl.constexpr) -> gl.tensor:
    """Return the first rows of a product (warps, 16, n)."""
    warps: gl.constexpr = x.shape[0]
    n: gl.constexpr = x.shape[2]
    layout: gl.constexpr = rows_layout(warps, rows, n)
    if rows < 16:
        halves = gl.permute(gl.reshape(x, [warps, 2, 8, n]), [0, 2, 3, 1])
        return gl.convert_layout(gl.split(halves)[0], layout, assert_trivial=True)
    else:
        return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def left_operand(x, mma: gl.constexpr) -> gl.tensor:
    """Make a left operand of (warps, rows, n) in `rows_layout`, padded with rows of zeros."""
    warps: gl.constexpr = x.shape[0]
    n: gl.constexpr = x.shape[2]
    layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    if x.shape[1] < 16:
        both = gl.permute(gl.join(x, _signs(x)), [0, 3, 1, 2])
        return gl.convert_layout(gl.reshape(both, [warps, 16, n]), layout, assert_trivial=True)
    else:
        return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def _signs(x) -> gl.tensor:
    """Return the sign bits of float16 numbers, which are zeros that the compiler cannot know.

    It would copy constant zeros next to the other operands again for every product.
    """
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, 0x80008000;", "=r,r", [x], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def query_operand(query, int8: gl.constexpr, mma: gl.constexpr) -> gl.tensor:
    """Make the left operand of queries, float16 (warps, rows, 64), in the keys' channel order."""
    warps: gl.constexpr = query.shape[0]
    rows: gl.constexpr = query.shape[1]
    if int8:
        folded = gl.permute(gl.reshape(query, [warps, rows, 4, 2, 2, 2, 2]), [0, 1, 3, 6, 5, 2, 4])
    else:
        folded = gl.permute(gl.reshape(query, [warps, rows, 4, 8, 2]), [0, 1, 3, 2, 4])
    layout: gl.constexpr = rows_layout(warps, rows, 64)
    folded = gl.reshape(folded, [warps, rows, 64])
    return left_operand(gl.convert_layout(folded, layout, assert_trivial=True), mma)


@gluon.jit
def keys_operand(raw, mma: gl.constexpr) -> gl.tensor:
    """Make the right operand of loaded keys, (warps, 64, keys)."""
    warps: gl.constexpr = raw.shape[0]
    keys: gl.constexpr = raw.shape[1]
    if raw.dtype == gl.int32:
        halves = gl.reshape(_halves(raw), [warps, keys, 4, 2, 2, 2, 2])
        folded = gl.permute(halves, [0, 3, 5, 6, 2, 4, 1])
    else:
        folded = gl.permute(gl.reshape(raw, [warps, keys, 4, 8, 2]), [0, 3, 2, 4, 1])
    layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    return gl.convert_layout(gl.reshape(folded, [warps, 64, keys]), layout, assert_trivial=True)


@gluon.jit
def values_operand(raw, mma: gl.constexpr) -> gl.tensor:
    """Make the right operand of loaded values, (warps, keys, 64), in `channel_at`'s order."""
    warps: gl.constexpr = raw.shape[0]
    keys: gl.constexpr = raw.shape[1]
    if raw.dtype == gl.int32:
        pairs: gl.constexpr = _pairs_layout(warps, keys)
        halves = _halves(gl.convert_layout(raw, pairs, assert_trivial=True))
        folded = gl.permute(gl.reshape(halves, [warps, keys, 8, 2, 2, 2]), [0, 1, 3, 5, 4, 2])
    else:
        folded = gl.permute(gl.reshape(raw, [warps, keys, 8, 8]), [0, 1, 3, 2])
    layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    return gl.convert_layout(gl.reshape(folded, [warps, keys, 64]), layout, assert_trivial=True)


@triton.constexpr_function
def _pairs_layout(warps: int, keys: int) -> gl.DistributedLinearLayout:
    """Make the layout of loaded values in which a thread's adjacent keys are consecutive."""
    registers = [[1, 0], [0, 1], [8, 0], *_far(16, keys)]
    return _linear(registers, [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]], [warps, keys, 16])


@gluon.jit
def _halves(words) -> gl.tensor:
    """Unpack the four int8 of each int32 to float16 (…, 2, 2); byte j goes to [j % 2, j // 2].

    One assembly block converts two consecutive words of a thread. An operand register pairs a
    number of the first word with a number of the second.
    """
    a, b, c, d = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 x, y, z, w;
        prmt.b32 x, $4, $5, 0x4400;
        prmt.b32 y, $4, $5, 0x5511;
        prmt.b32 z, $4, $5, 0x6622;
        prmt.b32 w, $4, $5, 0x7733;
        lop3.b32 $0, x, 0x80808080, 0x00ff00ff, 0x28;
        lop3.b32 $1, y, 0x80808080, 0x00ff00ff, 0x28;
        lop3.b32 $2, z, 0x80808080, 0x00ff00ff, 0x28;
        lop3.b32 $3, w, 0x80808080, 0x00ff00ff, 0x28;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r",
        [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=False,
        pack=2,
    )
    return gl.join(gl.join(a, b), gl.join(c, d))


@gluon.jit
def like(x, other) -> gl.tensor:
    """Broadcast x to the shape of the other."""
    return x + gl.zeros_like(other).to(x.dtype)


@gluon.jit
def power(x) -> gl.tensor:
    """Compute 2 ** x in float32."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def barrier() -> None:
    """Wait until all threads of the program arrive; their earlier stores are then visible."""
    gl.inline_asm_elementwise("bar.sync 0; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
