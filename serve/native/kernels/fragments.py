"""Load tensors into tensor-core register layouts, for the Gluon kernels of cross-attention.

A Gluon program chooses the register and thread of every element. With these layouts a thread loads
elements from global memory into the registers in which `mma.sync` m16n8k16 (PTX ISA, "Matrix
Fragments") expects them, without shared memory. The order of channels may be permuted if both
operands share the permutation. The order of keys and of output columns is free. These orders are
chosen so that one load fetches sixteen adjacent int8 of a key, or eight of a value. The first axis
is always the warp.

INT8 becomes float16 without arithmetic: u = number + 128 in the low byte of a float16 is the
subnormal u * 2 ** -24, which tensor cores multiply exactly. The caller later subtracts the effect
of the offset 128 from the weighted values. Scores need no correction: the effect is equal for all
keys, and softmax cancels it.
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
def _linear_layout(
    registers: list[list[int]], lanes: list[list[int]], shape: list[int]
) -> gl.DistributedLinearLayout:
    """Make a layout of registers and lanes, given by their bases in the last two axes."""
    bases_3d = [[[0, *base] for base in bases] for bases in (registers, lanes)]
    warps = [[1 << i, 0, 0] for i in range(shape[0].bit_length() - 1)]
    return gl.DistributedLinearLayout(*bases_3d, warps, [], shape)


@triton.constexpr_function
def _key_bases(begin: int, keys: int) -> list[list[int]]:
    """Return the layout bases of a key's index from the bit of `begin` on; both are powers of 2."""
    return [[1 << i, 0] for i in range(begin.bit_length() - 1, keys.bit_length() - 1)]


@triton.constexpr_function
def keys_layout(warps: int, keys: int, int8: bool) -> gl.DistributedLinearLayout:
    """Make the layout of loaded keys: (warps, keys, 64), or (warps, keys, 16) words of int8."""
    register_columns, lane_columns = ([1, 2], [4, 8]) if int8 else ([1, 2, 4, 8], [16, 32])
    registers = [[0, base] for base in register_columns] + _key_bases(8, keys)
    lanes = [[0, base] for base in lane_columns] + [[1, 0], [2, 0], [4, 0]]
    return _linear_layout(registers, lanes, [warps, keys, 16 if int8 else 64])


@triton.constexpr_function
def values_layout(warps: int, keys: int, int8: bool) -> gl.DistributedLinearLayout:
    """Make the layout of loaded values, with the shapes of `keys_layout`."""
    register_columns, lane_columns = ([1], [2, 4, 8]) if int8 else ([1, 2, 4], [8, 16, 32])
    registers = [[0, base] for base in register_columns] + [[1, 0], [8, 0]] + _key_bases(16, keys)
    lanes = [[2, 0], [4, 0]] + [[0, base] for base in lane_columns]
    return _linear_layout(registers, lanes, [warps, keys, 16 if int8 else 64])


@triton.constexpr_function
def query_layout(warps: int) -> gl.DistributedLinearLayout:
    """Make the layout of loaded queries, (warps, 16, 64); every warp has all of them."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]]
    return _linear_layout(registers, [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]], [warps, 16, 64])


@triton.constexpr_function
def rows_layout(warps: int, rows: int, n: int) -> gl.DistributedLinearLayout:
    """Make the layout of a product's first rows, (warps, rows, n)."""
    registers = [[0, 1]] + [[8, 0]] * (rows == 16)
    registers += [[0, 1 << i] for i in range(3, n.bit_length() - 1)]
    return _linear_layout(registers, [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [warps, rows, n])


@gluon.jit
def arange_3d(n: gl.constexpr, axis: gl.constexpr, layout: gl.constexpr) -> gl.tensor:
    """Return 0 to n - 1 along one axis of a tensor with three axes; the others have length 1."""
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
def key_index(index) -> gl.tensor:
    """Return the key at an index of the layout; in each eight, four lanes read consecutive keys."""
    return (index & -8) | ((index >> 1) & 3) | ((index & 1) << 2)


@gluon.jit
def load_run(base, row, n_keys: int, layout: gl.constexpr, eviction: gl.constexpr) -> gl.tensor:
    """Load one run of keys or values per warp, from a row on; zeros follow the first `n_keys`."""
    warps: gl.constexpr = layout.shape[0]
    run: gl.constexpr = layout.shape[1]
    row_stride: gl.constexpr = layout.shape[2]
    key = arange_3d(warps, 0, layout) * run + key_index(arange_3d(run, 1, layout))
    base = (base + row * row_stride) + (key * row_stride + arange_3d(row_stride, 2, layout))
    return gl.load(base, mask=key < n_keys, other=0, eviction_policy=eviction)


@gluon.jit
def channel_index(column) -> gl.tensor:
    """Return the channel that a column of `values_operand` holds."""
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
    """Make a left operand from (warps, rows, n) in `rows_layout`; pad it to 16 rows with zeros."""
    warps: gl.constexpr = x.shape[0]
    n: gl.constexpr = x.shape[2]
    layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    if x.shape[1] < 16:
        padded = gl.permute(gl.join(x, _signs(x)), [0, 3, 1, 2])
        return gl.convert_layout(gl.reshape(padded, [warps, 16, n]), layout, assert_trivial=True)
    else:
        return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def _signs(x) -> gl.tensor:
    """Return the sign bits of float16 numbers: zeros that the compiler does not see as constants.

    It would copy constant zeros into the operand's registers again for every product.
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
        permuted = gl.permute(
            gl.reshape(query, [warps, rows, 4, 2, 2, 2, 2]), [0, 1, 3, 6, 5, 2, 4]
        )
    else:
        permuted = gl.permute(gl.reshape(query, [warps, rows, 4, 8, 2]), [0, 1, 3, 2, 4])
    layout: gl.constexpr = rows_layout(warps, rows, 64)
    permuted = gl.reshape(permuted, [warps, rows, 64])
    return left_operand(gl.convert_layout(permuted, layout, assert_trivial=True), mma)


@gluon.jit
def keys_operand(raw, mma: gl.constexpr) -> gl.tensor:
    """Make the right operand of loaded keys, (warps, 64, keys)."""
    warps: gl.constexpr = raw.shape[0]
    keys: gl.constexpr = raw.shape[1]
    if raw.dtype == gl.int32:
        halves = gl.reshape(_int8_to_float16(raw), [warps, keys, 4, 2, 2, 2, 2])
        permuted = gl.permute(halves, [0, 3, 5, 6, 2, 4, 1])
    else:
        permuted = gl.permute(gl.reshape(raw, [warps, keys, 4, 8, 2]), [0, 3, 2, 4, 1])
    layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    return gl.convert_layout(gl.reshape(permuted, [warps, 64, keys]), layout, assert_trivial=True)


@gluon.jit
def values_operand(raw, mma: gl.constexpr) -> gl.tensor:
    """Make the right operand of loaded values, (warps, keys, 64), in `channel_index`'s order."""
    warps: gl.constexpr = raw.shape[0]
    keys: gl.constexpr = raw.shape[1]
    if raw.dtype == gl.int32:
        pairs: gl.constexpr = _pairs_layout(warps, keys)
        halves = _int8_to_float16(gl.convert_layout(raw, pairs, assert_trivial=True))
        permuted = gl.permute(gl.reshape(halves, [warps, keys, 8, 2, 2, 2]), [0, 1, 3, 5, 4, 2])
    else:
        permuted = gl.permute(gl.reshape(raw, [warps, keys, 8, 8]), [0, 1, 3, 2])
    layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    return gl.convert_layout(gl.reshape(permuted, [warps, keys, 64]), layout, assert_trivial=True)


@triton.constexpr_function
def _pairs_layout(warps: int, keys: int) -> gl.DistributedLinearLayout:
    """Make the layout of loaded values in which a thread's adjacent keys are consecutive."""
    registers = [[1, 0], [0, 1], [8, 0], *_key_bases(16, keys)]
    return _linear_layout(registers, [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]], [warps, keys, 16])


@gluon.jit
def _int8_to_float16(words) -> gl.tensor:
    """Unpack the four int8 of each int32 to float16 (…, 2, 2); byte j goes to [j % 2, j // 2].

    One assembly block converts two consecutive words of a thread, because an operand register
    holds a number of each.
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
def broadcast_like(x, other) -> gl.tensor:
    """Broadcast x to the shape of the other."""
    return x + gl.zeros_like(other).to(x.dtype)


@gluon.jit
def exp2(x) -> gl.tensor:
    """Compute 2 ** x in float32."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def barrier() -> None:
    """Wait until all threads of the program arrive; their earlier stores are then visible."""
    gl.inline_asm_elementwise("bar.sync 0; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
