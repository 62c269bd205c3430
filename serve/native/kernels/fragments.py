"""Tensors as the matrix unit holds them, for the Gluon kernels of cross-attention.

A Gluon program says itself which number lies in which register of which thread. Here they are
loaded from global memory straight to where `mma.sync` m16n8k16 (PTX ISA, "Matrix Fragments") wants
them, so nothing passes through shared memory on the way. What makes that possible: neither the
order in which a product adds up its channels matters, as long as both sides have the same, nor the
order of keys, nor which channel a column of the result is. So a thread's sixteen neighbouring int8
of a key, and eight of a value, come by one load each. In what follows the first axis is the warp.

INT8 becomes float16 without arithmetic: u = number + 128 in the low byte of a float16 is the
subnormal u * 2 ** -24, which the matrix unit multiplies exactly. Whoever reads the product takes
off what 128 adds: nothing for scores, from which softmax takes their largest anyway.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def"

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.constexpr_function
def mma_layout(warps: int) -> gl.NVMMADistributedLayout:
    """Of a product's result, (warps, 16, n): each warp has a product of its own."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@triton.constexpr_function
def _linear(
    registers: list[list[int]], lanes: list[list[int]], shape: list[int]
) -> gl.DistributedLinearLayout:
    """Bases of registers and lanes, each in the last two axes; the warps are the first axis."""
    wide = [[[0, *base] for base in bases] for bases in (registers, lanes)]
    warps = [[1 << i, 0, 0] for i in range(shape[0].bit_length() - 1)]
    return gl.DistributedLinearLayout(*wide, warps, [], shape)


@triton.constexpr_function
def _far(begin: int, keys: int) -> list[list[int]]:
    """Bases of all keys from `begin` on."""
    return [[1 << i, 0] for i in range(begin.bit_length() - 1, keys.bit_length() - 1)]


@triton.constexpr_function
def keys_layout(warps: int, keys: int, int8: bool) -> gl.DistributedLinearLayout:
    """Keys as loaded: of int8 in words of four, (warps, keys, 16), else (warps, keys, 64)."""
    near, lanes = ([1, 2], [4, 8]) if int8 else ([1, 2, 4, 8], [16, 32])
    registers = [[0, base] for base in near] + _far(8, keys)
    threads = [[0, base] for base in lanes] + [[1, 0], [2, 0], [4, 0]]
    return _linear(registers, threads, [warps, keys, 16 if int8 else 64])


@triton.constexpr_function
def values_layout(warps: int, keys: int, int8: bool) -> gl.DistributedLinearLayout:
    """Values as loaded, of the same shapes."""
    near, lanes = ([1], [2, 4, 8]) if int8 else ([1, 2, 4], [8, 16, 32])
    registers = [[0, base] for base in near] + [[1, 0], [8, 0]] + _far(16, keys)
    threads = [[2, 0], [4, 0]] + [[0, base] for base in lanes]
    return _linear(registers, threads, [warps, keys, 16 if int8 else 64])


@triton.constexpr_function
def query_layout(warps: int) -> gl.DistributedLinearLayout:
    """Queries as loaded, (warps, 16, 64): every warp has them all."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]]
    return _linear(registers, [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]], [warps, 16, 64])


@triton.constexpr_function
def rows_layout(warps: int, rows: int, n: int) -> gl.DistributedLinearLayout:
    """The first rows of a product's result, (warps, rows, n)."""
    registers = [[0, 1]] + [[8, 0]] * (rows == 16)
    registers += [[0, 1 << i] for i in range(3, n.bit_length() - 1)]
    return _linear(registers, [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [warps, rows, n])


@gluon.jit
def along(n: gl.constexpr, axis: gl.constexpr, layout: gl.constexpr) -> gl.tensor:
    """0 to n - 1 along one axis of a layout of three, the other axes of length 1."""
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
    """Which of eight neighbouring keys stands at a place, so that four lanes read four in a row."""
    return (place & -8) | ((place >> 1) & 3) | ((place & 1) << 2)


@gluon.jit
def load_run(at, row, there: int, layout: gl.constexpr, eviction: gl.constexpr) -> gl.tensor:
    """Keys or values from a row on, a run for every warp; zeros beyond those that are there."""
    warps: gl.constexpr = layout.shape[0]
    run: gl.constexpr = layout.shape[1]
    step: gl.constexpr = layout.shape[2]
    key = along(warps, 0, layout) * run + key_at(along(run, 1, layout))
    at = (at + row * step) + (key * step + along(step, 2, layout))
    return gl.load(at, mask=key < there, other=0, eviction_policy=eviction)


@gluon.jit
def channel_at(column) -> gl.tensor:
    """Which channel a column of what `values_operand` gives is."""
    return column % 8 * 8 + column // 8


@gluon.jit
def top_rows(x, rows: gl.constexpr) -> gl.tensor:
    """(warps, 16, n) as the matrix unit gives it -> its first rows."""
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
    """(warps, rows, n), as `rows_layout` says, and rows of zeros: what multiplies from the left."""
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
    """The sign bits of float16 numbers: zeros, of any sign, which the compiler takes for numbers.

    Zeros that it knew of it would put beside the other operands anew for every product.
    """
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, 0x80008000;", "=r,r", [x], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def query_operand(query, int8: gl.constexpr, mma: gl.constexpr) -> gl.tensor:
    """float16 (warps, rows, 64) as `query_layout` says; its channels in the order of the keys'."""
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
    """Keys as loaded -> what queries are multiplied by, (warps, 64, keys)."""
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
    """Values as loaded -> what weights are multiplied by, (warps, keys, 64); see `channel_at`."""
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
    """Values as loaded, but for a thread's order: two neighbouring keys follow each other."""
    registers = [[1, 0], [0, 1], [8, 0], *_far(16, keys)]
    return _linear(registers, [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]], [warps, keys, 16])


@gluon.jit
def _halves(words) -> gl.tensor:
    """int32 (…), four int8 each -> float16 (…, 2, 2), number j at [j % 2, j // 2].

    Two words at a time, those that follow each other in a thread, so that what the matrix unit
    wants in one register is made in one.
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
    """x, broadcast to the shape of the other."""
    return x + gl.zeros_like(other).to(x.dtype)


@gluon.jit
def power(x) -> gl.tensor:
    """2 ** x, float32."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def barrier() -> None:
    """All of the program's threads have come so far, and what they have stored is stored."""
    gl.inline_asm_elementwise("bar.sync 0; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
