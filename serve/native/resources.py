"""Load an engine's weights and allocate caches and state, once per runtime."""

import dataclasses
import functools
from collections.abc import Callable

import torch

from serve.contract.config import RuntimeConfig
from serve.contract.engine import Engine, draft_dims
from serve.native.alignment import pass_bytes
from serve.native.decoder import Cache, Decoder
from serve.native.device import check_graphs
from serve.native.forced import MAX_PASS_TOKENS
from serve.native.kernels.choose import Ops, choose
from serve.native.memory import plan_memory
from serve.native.network import Whisper
from serve.native.rules.phrases import Phrasebook
from serve.native.rules.reference_rules import TokenRules
from serve.native.rules.state import RowState, new_state
from serve.speech.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class RuntimeResources:
    """A network with its caches, state and token rules, all for the same slots and rows."""

    network: Whisper
    cache: Cache
    state: RowState
    rules: TokenRules  # in kernels if the network uses them
    draft: tuple[Decoder, Cache] | None  # the draft decoder, if the engine has one
    graphs: bool  # whether steps are replayed from CUDA graphs
    plan: str  # a description of the GPU's memory; empty on a CPU

    @property
    def decoders(self) -> list[tuple[Decoder, Cache]]:
        """Every decoder with its caches."""
        first: tuple[Decoder, Cache] = (self.network, self.cache)
        return [first] if self.draft is None else [first, self.draft]


def load_resources(
    engine: Engine, config: RuntimeConfig, device: torch.device, rows: int
) -> RuntimeResources:
    """Load an engine's weights and allocate the caches and state for the slots.

    Args:
        engine: an engine of the native runtime.
        config: the numbers of slots, the kernels and the precisions.
        device: the device of all tensors.
        rows: the number of rows of all slots together.

    Raises:
        UnavailableError: the device does not support the config, or has too little memory for it.
        EngineError: the engine's tensors do not match its manifest.
    """
    dims, facts = engine.manifest.dims, engine.manifest.tokenizer
    tokens = _max_step_tokens(engine, config, rows)
    chosen = (config.encoder_precision, config.compute_type, engine.manifest.fp8)
    ops = choose(config.kernels, device, dims, tokens, *chosen)
    network, second = _load(engine, config, device, ops)
    plan = ""
    if device.type == "cuda":
        decoders = [network] if second is None else [network, second]
        plan = plan_memory(decoders, config, rows, pass_bytes(dims, facts, ops))
    if config.cuda_graph:
        check_graphs(device, ops.name)
    book, numerals = Phrasebook(config.slots, device), Tokenizer(engine).numerals
    rules_class: Callable[..., TokenRules] = TokenRules
    if ops.name == "triton":
        from serve.native.rules.kernel import TritonRules  # noqa: PLC0415 - needs triton

        searching = rows > config.slots
        rules_class = functools.partial(TritonRules, max_picks=rows, searching=searching)
    caches = (config.slots, rows, config.cross_kv)
    return RuntimeResources(
        network=network,
        cache=network.new_cache(*caches),
        state=new_state(rows, dims.n_text_ctx, device),
        rules=rules_class(facts, dims, device, book, numerals),
        draft=None if second is None else (second, second.new_cache(*caches)),
        graphs=config.cuda_graph,
        plan=plan,
    )


def _max_step_tokens(engine: Engine, config: RuntimeConfig, rows: int) -> int:
    """Return the maximum number of tokens of a decoder step.

    A step computes one token per row, the draft tokens of every slot, or an alignment pass.
    """
    tokens = rows
    if engine.manifest.draft is not None:  # a slot's first row is verified with its draft tokens
        tokens = max(rows, config.slots * (1 + config.draft_tokens))
    return max(tokens, MAX_PASS_TOKENS) if engine.manifest.tokenizer.alignment_heads else tokens


def _load(
    engine: Engine, config: RuntimeConfig, device: torch.device, ops: Ops
) -> tuple[Whisper, Decoder | None]:
    """Load the network, and the draft decoder if there is one and `runtime.draft_tokens` > 0."""
    dims, draft = engine.manifest.dims, engine.manifest.draft
    weights = engine.load_weights(device)
    network = Whisper(dims, weights, device, ops)
    if draft is None or config.draft_tokens == 0:
        return network, None
    return network, Decoder(draft_dims(dims, draft), weights, device, ops, "draft")
