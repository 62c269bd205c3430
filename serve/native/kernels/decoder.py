"""Run the decoder's operations as Triton-language kernels.

`reference_ops` is the reference implementation. The bits of a row's result do not depend on the
other rows. With few rows a linear layer returns partial sums (`PartialSums`), which the next kernel
adds while it reads them. This saves a kernel that only adds. Launches can be captured in a CUDA
graph.
"""
# mypy: disable-error-code="misc, no-untyped-call"

import dataclasses

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from serve.contract.manifest import HEAD_DIM
from serve.native.kernels import reference_ops
from serve.native.kernels.attention import append_kernel, embed_kernel, self_attention_kernel
from serve.native.kernels.cross import cross_kernel, cross_stream_kernel
from serve.native.kernels.gpu import is_hopper_or_later
from serve.native.kernels.launch import MAX_OVERLAPPING_ROWS, launch
from serve.native.kernels.linear import (
    Epilogue,
    EpilogueSteps,
    few_rows_kernel,
    finish_kernel,
    many_rows_kernel,
    norm_kernel,
    wide_rows_kernel,
)
from serve.native.kernels.packed import pack
from serve.native.kernels.partial_sums import Flow, PartialSums, kernel_sums, or_unused
from serve.native.kernels.prefill_attention import attend_to_audio, attend_to_texts
from serve.native.kernels.reference_ops import LAYER_NORM_EPS, CrossKV, Matrix, Norm
from serve.native.kernels.skinny_gemm import SKINNY_ROWS, can_normalise, multiply_skinny
from serve.native.kernels.splits import RUNS, CrossCache, SplitConfig, SplitGroups, Workspace
from serve.native.kernels.step_batch import SlotGroups, StepBatch
from serve.native.kernels.store import quantize_kernel
from serve.native.kernels.tiles import (
    FEW_ROWS,
    choose_float16_tile,
    choose_tile,
    is_faster_in_float16,
    split_depth,
)

_MAX_PARTIAL_LOGIT_ROWS = 8  # rows with which the vocabulary projection ends as partial sums
_CROSS_RUN = {torch.int8: 64, torch.float16: 32}  # keys per run of cross-attention
_TILE = 16  # tokens of a slot per matrix instruction
_HALF_TILE = 8  # maximum tokens of a slot for a half tile, and for `cross_stream_kernel`
_STREAM_WARPS, _STREAM_REGISTERS = 12, 168  # warps per multiprocessor, registers per thread
_MIN_WORKSPACE_TOKENS = 1152  # in cross-attention's workspace; a larger step runs in chunks
_MIN_PROGRAMS = 1024  # programs; with fewer, several programs share the tiles of a large group
_SELF_BLOCK, _SELF_WARPS = 32, 1  # keys per iteration, and warps, of self-attention
_SELF_TOKENS_PER_PROGRAM = (1, 2, 3, 4)  # tokens of a row that one program may compute
_SELF_PROGRAMS_PER_PROCESSOR = 16  # programs per multiprocessor at which tokens share programs
_MAX_PREFETCH_TOKENS = 16  # tokens; with more, so many programs run that they hide the latency
_FINISH_BLOCK = 512  # outputs per program
_QUANTIZE_CHANNELS, _QUANTIZE_BLOCK = 32, 64  # channels per program, positions per load


class TritonOps:
    """The kernels and the workspace that they share; all launches must be on one stream.

    Args:
        device: a CUDA device, or a CPU under Triton's interpreter.
        rows: the maximum number of tokens of a decoder step; prefill may have more.
        heads: the number of decoder heads.
        n_keys: the number of encoder positions.
    """

    def __init__(self, device: torch.device, rows: int, heads: int, n_keys: int) -> None:
        self._on_gpu = device.type == "cuda"
        self._overlaps = is_hopper_or_later(device)
        self.processors, self._packs_int8 = 1, False
        if self._on_gpu:
            self.processors = torch.cuda.get_device_properties(device).multi_processor_count
            # On Hopper the skinny GEMM has the bits of larger products. Other GPUs are untested.
            self._packs_int8 = torch.cuda.get_device_capability(device)[0] == 9
        self._max_step_tokens = rows
        self._workspace_tokens = max(rows, _MIN_WORKSPACE_TOKENS)
        splits = triton.cdiv(n_keys, RUNS.value * min(_CROSS_RUN.values()))
        cross = self._workspace_tokens * heads * splits
        self._workspace = Workspace(
            partial=torch.empty(cross * HEAD_DIM, dtype=torch.float32, device=device),
            stats=torch.empty(cross * 2, dtype=torch.float32, device=device),
            arrived=torch.zeros(self._workspace_tokens * heads, dtype=torch.int32, device=device),
        )

    def _pdl(self, rows: int) -> bool:
        """Return whether a launch over this many rows overlaps the previous kernel."""
        return self._overlaps and rows <= MAX_OVERLAPPING_ROWS

    def _norm(
        self, x: torch.Tensor, delta: PartialSums | None, params: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (x + delta, its layer norm); without delta, (x, its layer norm)."""
        added, parts, quantized = kernel_sums(x if delta is None else delta)
        assert x.is_contiguous()
        width = x.shape[-1]
        rows = x.numel() // width
        out = torch.empty_like(x)
        total = x if delta is None else torch.empty_like(x)
        tensors = (x, added, total, params.weight, params.bias, out)
        scalars = (rows, LAYER_NORM_EPS, width, triton.next_power_of_2(width), parts)
        has_bias = delta is not None and delta.matrix.bias is not None
        pdl = self._pdl(rows)
        launch(norm_kernel, rows)(
            *tensors, *scalars, quantized, has_bias, pdl, num_warps=8, launch_pdl=pdl
        )
        return total, out

    def store(self, matrix: Matrix) -> Matrix:
        """Add copies of the weights that some products read faster, on Hopper and later GPUs.

        Products of many rows read float16: arithmetic is their limit, and every program would
        convert int8 again. On Hopper, products of up to eight rows read packed INT8 weights (see
        `skinny_gemm`). The results have the same bits.
        """
        if not self._overlaps:
            return matrix
        if is_faster_in_float16(self._max_step_tokens, len(matrix.weight)):
            matrix = dataclasses.replace(matrix, half_weight=matrix.weight.half())
        if self._packs_int8 and matrix.weight.dtype == torch.int8:
            thin = pack(matrix.weight, split_depth(matrix.weight.shape[1]))
            matrix = dataclasses.replace(matrix, packed_weight=thin.view(torch.int32))
        return matrix

    def _skinny_gemm(
        self,
        x: Flow,
        matrix: Matrix,
        params: Norm | None = None,
        residual: Flow | None = None,
        gelu: bool = False,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor | None:
        """Multiply x, or its layer norm, with the skinny GEMM; return None if it cannot."""
        if matrix.packed_weight is None or not isinstance(x, torch.Tensor) or len(x) > SKINNY_ROWS:
            return None
        assert not isinstance(residual, PartialSums)
        if params is not None and not (len(x) == 1 and can_normalise(x.shape[1])):
            x, params = self._norm(x, None, params)[1], None
        out = torch.empty((len(x), len(matrix.weight)), dtype=dtype or x.dtype, device=x.device)
        pdl = self._pdl(len(x))
        multiply_skinny(x, matrix, params, residual, gelu, out, self.processors, pdl)
        return out

    def norm_linear(self, x: Flow, params: Norm, matrix: Matrix) -> Flow:
        """Compute `reference_ops.norm_linear`; x is (rows, in)."""
        if (product := self._skinny_gemm(x, matrix, params)) is not None:
            return product
        return self._linear(self._normalise(x, params), matrix)

    def norm_linear_gelu(self, x: Flow, params: Norm, matrix: Matrix) -> torch.Tensor:
        """Compute `reference_ops.norm_linear_gelu`; x is (rows, in)."""
        if (product := self._skinny_gemm(x, matrix, params, gelu=True)) is not None:
            return product
        normed = self._normalise(x, params)
        if len(normed) > FEW_ROWS:
            return self._linear_with_epilogue(normed, matrix, None, gelu=True, dtype=normed.dtype)
        sums = PartialSums(self._multiply_parts(normed, matrix), matrix, normed.dtype)
        return self._finish(sums, gelu=True)

    def linear_residual(self, x: torch.Tensor, matrix: Matrix, residual: Flow) -> Flow:
        """Compute `reference_ops.linear_residual`; x is (rows, in)."""
        if (product := self._skinny_gemm(x, matrix, residual=residual)) is not None:
            return product
        if isinstance(residual, PartialSums):
            assert residual.value is not None, "a layer norm must precede the use as a residual"
            residual = residual.value
        return self._linear(x, matrix, residual)

    def logits(
        self, x: Flow, params: Norm, matrix: Matrix, logit_indices: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute `reference_ops.logits`; x is (rows, in)."""
        if isinstance(x, torch.Tensor) and logit_indices is not None:
            x, logit_indices = x.index_select(0, logit_indices), None
        if (product := self._skinny_gemm(x, matrix, params, dtype=torch.float32)) is not None:
            return product
        normed = self._normalise(x, params)
        if logit_indices is not None:
            normed = normed.index_select(0, logit_indices)
        if len(normed) > _MAX_PARTIAL_LOGIT_ROWS:
            return self._linear_with_epilogue(normed, matrix, None, gelu=False, dtype=torch.float32)
        parts = self._multiply_parts(normed, matrix)
        return self._finish(PartialSums(parts, matrix, torch.float32), gelu=False)

    def finish(self, x: Flow) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            return x
        value = self._finish(x, gelu=False)
        return value if x.residual is None else value + x.residual

    def _finish(self, x: PartialSums, gelu: bool) -> torch.Tensor:
        parts, rows, n_out = x.parts.shape
        out = torch.empty((rows, n_out), dtype=x.dtype, device=x.parts.device)
        epilogue_steps = (x.matrix.scale is not None, x.matrix.bias is not None, gelu)
        pdl = self._pdl(rows)
        tensors, scalars = (x.sums, out), (rows, n_out, parts)
        launch(finish_kernel, rows, triton.cdiv(n_out, _FINISH_BLOCK))(
            *tensors, *scalars, *epilogue_steps, _FINISH_BLOCK, pdl, num_warps=4, launch_pdl=pdl
        )
        return out

    def _normalise(self, x: Flow, params: Norm) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            return self._norm(x, None, params)[1]
        assert x.residual is not None
        x.value, normed = self._norm(x.residual, x, params)
        return normed

    def _linear(
        self, x: torch.Tensor, matrix: Matrix, residual: torch.Tensor | None = None
    ) -> Flow:
        if len(x) > FEW_ROWS:
            return self._linear_with_epilogue(x, matrix, residual, gelu=False, dtype=x.dtype)
        return PartialSums(self._multiply_parts(x, matrix), matrix, x.dtype, residual)

    def _multiply_parts(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """Compute the partial sums of a linear layer: float32 (parts, rows, out)."""
        rows, depth = x.shape
        n_out = matrix.weight.shape[0]
        assert x.is_contiguous()
        part = split_depth(depth)
        shape = (depth // part, rows, n_out)
        out = torch.empty(shape, dtype=torch.float32, device=x.device)
        packed = self._on_gpu and matrix.weight.dtype == torch.int8
        weight = matrix.weight.view(torch.int16) if packed else matrix.weight
        scalars = (rows, n_out, depth, part)
        tile = (min(part, 256), max(16, triton.next_power_of_2(rows)), 64)
        pdl = self._pdl(rows)
        launch(few_rows_kernel, triton.cdiv(n_out, 64), shape[0])(
            x, weight, out, *scalars, *tile, packed, pdl, num_warps=4, launch_pdl=pdl
        )
        return out

    def _linear_with_epilogue(
        self,
        x: torch.Tensor,
        matrix: Matrix,
        residual: torch.Tensor | None,
        gelu: bool,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        rows, depth = x.shape
        n_out = matrix.weight.shape[0]
        assert x.is_contiguous()
        out = torch.empty((rows, n_out), dtype=dtype, device=x.device)
        scale, bias = or_unused(matrix.scale, matrix.weight), or_unused(matrix.bias, x)
        epilogue = Epilogue(scale, bias, or_unused(residual, x))
        has_scale_and_bias = (matrix.scale is not None, matrix.bias is not None)
        steps = EpilogueSteps(*has_scale_and_bias, gelu, has_residual=residual is not None)
        scalars = (rows, n_out, depth, split_depth(depth))
        half_weight = matrix.half_weight if is_faster_in_float16(rows, n_out) else None
        if half_weight is None:
            tile, pdl = choose_tile(rows, n_out, depth), self._pdl(rows)
            options = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": pdl}
            tensors = (x, matrix.weight, epilogue, out)
            launch(many_rows_kernel, *tile.grid(rows, n_out))(
                *tensors, *scalars, steps, *tile.sizes, self._on_gpu, pdl, **options
            )
            return out
        # Prompts may have more rows than any step. They use the tile of the largest step, so that
        # no kernel is compiled while serving.
        tile = choose_float16_tile(min(rows, self._max_step_tokens), n_out, depth)
        launch(wide_rows_kernel, *tile.grid(rows, n_out))(
            TensorDescriptor(x, [rows, depth], [depth, 1], [tile.block_m, tile.block_k]),
            TensorDescriptor(half_weight, [n_out, depth], [depth, 1], [tile.block_n, tile.block_k]),
            epilogue,
            out,
            *scalars,
            steps,
            *tile.sizes,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return out

    def self_attention(
        self, qkv: Flow, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: StepBatch
    ) -> torch.Tensor:
        """Compute `reference_ops.self_attention`; read only existing positions of each row."""
        _, n_ctx, heads, head_dim = k_cache.shape
        if batch.groups.whole_texts and isinstance(qkv, torch.Tensor):
            return attend_to_texts(qkv, heads, batch.groups)
        sums, parts, quantized = kernel_sums(qkv)
        n_tokens, source = len(batch.rows), batch.source
        assert k_cache.is_contiguous() and v_cache.is_contiguous()
        assert source is None or source.is_contiguous()
        assert batch.rows.is_contiguous() and batch.positions.is_contiguous()
        out = torch.empty((n_tokens, heads * head_dim), dtype=qkv.dtype, device=k_cache.device)
        pdl = self._pdl(n_tokens)
        inputs = (sums, k_cache, v_cache, batch.rows, batch.positions)
        many_programs = n_tokens * heads >= _SELF_PROGRAMS_PER_PROCESSOR * self.processors
        fitting = (i for i in _SELF_TOKENS_PER_PROGRAM if batch.tokens_per_row % i == 0)
        tokens_per_program = max(fitting) if many_programs else 1
        # Then several programs compute a row.
        append_first = batch.multi_token and tokens_per_program < max(batch.tokens_per_row, 2)
        scalars = (n_tokens, heads, n_ctx, head_dim)
        if append_first:
            launch(append_kernel, heads, n_tokens)(
                *inputs, *scalars, parts, quantized, pdl, num_warps=1, launch_pdl=pdl
            )
        launch(self_attention_kernel, heads, n_tokens // tokens_per_program)(
            *inputs,
            or_unused(source, batch.rows),
            out,
            *scalars,
            block=_SELF_BLOCK,
            tokens_per_program=tokens_per_program,
            parts=parts,
            quantized=quantized,
            has_source=source is not None,
            append=not append_first,
            prefetch=not batch.multi_token and n_tokens <= _MAX_PREFETCH_TOKENS,
            pdl=pdl,
            num_warps=_SELF_WARPS,
            launch_pdl=pdl,
        )
        return out

    def cross_attention(self, q: Flow, cross: CrossKV, groups: SlotGroups) -> torch.Tensor:
        """Compute `reference_ops.cross_attention`; a token's result depends on its slot alone.

        Triton's interpreter does not support Gluon, so it gets plain torch.
        """
        if groups.whole_texts and isinstance(q, torch.Tensor):
            return attend_to_audio(q, cross, groups)
        if not self._on_gpu:
            return reference_ops.cross_attention(self.finish(q), cross, groups)
        n_tokens = q.parts.shape[1] if isinstance(q, PartialSums) else len(q)
        width = cross.k.shape[1] * cross.k.shape[3]
        out = torch.empty((n_tokens, width), dtype=q.dtype, device=cross.k.device)
        assert not groups.direct or (groups.max_count == 1 and n_tokens <= self._workspace_tokens)
        for begin in range(0, n_tokens, self._workspace_tokens):
            end = min(begin + self._workspace_tokens, n_tokens)
            self._cross_attention_chunk(q, cross, groups, out, begin, end)
        return out

    def _cross_attention_chunk(
        self, q: Flow, cross: CrossKV, groups: SlotGroups, out: torch.Tensor, begin: int, end: int
    ) -> None:
        """Compute cross-attention of tokens [begin, end), which must fit into the workspace."""
        _, heads, n_keys, _ = cross.k.shape
        sums, parts, quantized = kernel_sums(q)
        int8 = cross.k_scale is not None
        k, v = (x.view(torch.int32) if int8 else x for x in (cross.k, cross.v))
        assert k.is_contiguous() and v.is_contiguous()
        pdl = self._pdl(len(out))
        run = _CROSS_RUN[cross.k.dtype]
        config = SplitConfig(
            parts, quantized, int8, pdl, groups.direct, run, triton.cdiv(n_keys, run * RUNS.value)
        )
        k_scale, v_scale = (or_unused(x, sums.data) for x in (cross.k_scale, cross.v_scale))
        split_groups = SplitGroups(groups.slots, groups.first, groups.count)
        arguments = (sums, CrossCache(k, v, k_scale, v_scale), split_groups, out, self._workspace)
        scalars = (len(out), begin, end, heads, n_keys)
        pairs = len(groups.slots) * heads
        items, resident = config.splits * pairs, _STREAM_WARPS * self.processors
        if groups.max_count <= _HALF_TILE and 2 * items > resident:
            programs = triton.cdiv(items, triton.cdiv(items, resident))  # equal numbers of splits
            options = {"num_warps": 1, "maxnreg": _STREAM_REGISTERS, "launch_pdl": pdl}
            launch(cross_stream_kernel, programs)(*arguments, *scalars, items, config, **options)
            return
        tiles = triton.cdiv(min(groups.max_count, end - begin), _TILE)
        programs_per_pair = min(tiles, triton.cdiv(_MIN_PROGRAMS, items))
        rows = _HALF_TILE if groups.max_count <= _HALF_TILE else _TILE
        launch(cross_kernel, config.splits, pairs, programs_per_pair)(
            *arguments, *scalars, config, rows, num_warps=RUNS.value, launch_pdl=pdl
        )

    def store_cross(
        self, x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, scale: torch.Tensor | None
    ) -> None:
        if scale is None:
            reference_ops.store_cross(x, slots, cache, scale)
            return
        assert x.is_contiguous() and cache.is_contiguous() and scale.is_contiguous()
        layers, _, stack, heads, time, head_dim = cache.shape
        blocks = triton.cdiv(time, _QUANTIZE_BLOCK)
        scalars = (stack, heads, time, head_dim, _QUANTIZE_CHANNELS, _QUANTIZE_BLOCK, blocks)
        launch(quantize_kernel, head_dim // _QUANTIZE_CHANNELS, layers * 2 * heads, len(x))(
            x, slots, cache, scale, *scalars, num_warps=8
        )

    def embed(
        self, batch: StepBatch, token_embedding: torch.Tensor, position_embedding: torch.Tensor
    ) -> torch.Tensor:
        assert batch.ids.is_contiguous()
        assert batch.rows.is_contiguous() and batch.positions.is_contiguous()
        n_tokens, width = len(batch.rows), token_embedding.shape[1]
        out = token_embedding.new_empty((n_tokens, width))
        scalars = (batch.ids.shape[1], width, triton.next_power_of_2(width))
        launch(embed_kernel, n_tokens)(
            batch.ids,
            batch.rows,
            batch.positions,
            token_embedding,
            position_embedding,
            out,
            *scalars,
        )
        return out
