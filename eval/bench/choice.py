"""The cost of choosing the next tokens, alone and in searches, and that of phrases beside."""

from collections.abc import Callable

import torch

from serve.contract.engine import Engine
from serve.contract.phrases import BOOST, Trie, build_trie
from serve.native.network import Whisper
from serve.native.rules.choose import choose_advance
from serve.native.rules.definition import Rules
from serve.native.rules.phrases import Phrasebook
from serve.native.rules.state import Picks, RowState, new_state

PHRASES, TOKENS = 1000, 5  # in the list, and in each of them
LIKELY = 8  # tokens of a row, over half of which are near enough to earn something


def choice_of(
    network: Whisper, engine: Engine, slots: int, rows: int, age: int, phrases: bool
) -> Callable[[], None]:
    """A choice of tokens for every row, as often as it is called.

    Args:
        network: says which kernels, and where.
        engine: whose rules.
        slots: each with a list of phrases, all with the same, or with none.
        rows: of each slot, which search together.
        age: tokens that each row has.
        phrases: whether there is a list.
    """
    device, dims, facts = network.device, network.dims, engine.manifest.tokenizer
    book = Phrasebook(slots, device)
    rules = Rules(facts, dims, device, book)
    advance = choose_advance(network.ops.name, rules, slots * rows, rows > 1)
    state = new_state(slots * rows, dims.n_text_ctx, device)
    everyone = torch.arange(slots * rows, device=device)
    state.leader.copy_(everyone // rows * rows)
    state.beam.fill_(rows)
    state.limit.fill_(dims.n_text_ctx)
    root = book.root(0, _trie(facts.eot)) if phrases else -1
    logits = _logits(slots * rows, dims.n_vocab, facts.eot).to(device)

    def choose() -> None:
        _begin(state, age, root)
        advance(state, Picks(everyone, everyone), logits)

    return choose


def _logits(rows: int, n_vocab: int, text_ids: int) -> torch.Tensor:
    """Make logits as speech has them: a few tokens of text are likely, and all others hardly."""
    generator = torch.Generator().manual_seed(0)
    logits = 1.5 * torch.randn((rows, n_vocab), generator=generator)
    likely = torch.randint(text_ids, (rows, LIKELY), generator=generator)
    return logits.scatter(1, likely, torch.linspace(14.0, 7.0, LIKELY).expand(rows, -1))


def _begin(state: RowState, age: int, root: int) -> None:
    """Let all rows be where they are before the choice."""
    state.position.fill_(age)
    state.finished.fill_(False)
    state.root.fill_(root)
    state.node.fill_(max(root, 0))


def _trie(text_ids: int) -> Trie:
    """Of phrases of random tokens."""
    ids = torch.randint(text_ids, (PHRASES, TOKENS), generator=torch.Generator().manual_seed(0))
    return build_trie([(tuple(phrase), BOOST) for phrase in ids.tolist()])
