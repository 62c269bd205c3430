"""Boosts for phrases in plain torch: whose lists are on the device, and what a token earns.

Only the likeliest few tokens of a row earn anything, so that nothing is said that was not heard.
"""

import dataclasses

import numpy as np
import torch

from serve.contract.phrases import MAX_NODES, Trie
from serve.native.rules.state import RowState

LIKELIEST = 16  # tokens of a row that may earn; a power of two, at least as many as a search's
MARGIN = 5.0  # nats below the likeliest; what is less likely than that earns nothing
TOKEN_BITS = 20
_LAST_TOKEN = (1 << TOKEN_BITS) - 1


class Phrasebook:
    """The lists of phrases that slots decode with, in memory that does not move.

    Each place has room for one list, which stays there while a slot uses it and until another needs
    the place; the same list is not copied again.

    Args:
        slots: how many there are, and so places.
        device: where rows are.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        size = slots * MAX_NODES
        self.keys = torch.empty(size, dtype=torch.int64, device=device)
        """Node and token of each edge, in ascending order."""
        self.targets = torch.zeros(size, dtype=torch.int32, device=device)
        self.gains = torch.zeros(size, dtype=torch.float32, device=device)
        self.refunds = torch.zeros(size, dtype=torch.float32, device=device)
        """By node."""
        last = (torch.arange(1, slots + 1, device=device) * MAX_NODES - 1) << TOKEN_BITS
        self.keys.view(slots, MAX_NODES).copy_((last | _LAST_TOKEN)[:, None])
        self._places: list[Trie | None] = [None] * slots
        self._users: dict[int, int] = {}  # place, by slot

    @staticmethod
    def bytes_of_slot() -> int:
        """Count the memory that a slot more takes."""
        return MAX_NODES * (8 + 4 + 4 + 4)

    def root(self, slot: int, trie: Trie) -> int:
        """Take a list in; returns its root, for a slot's rows that decode with it from now on."""
        self._users.pop(slot, None)
        place = next((i for i, held in enumerate(self._places) if held is trie), None)
        if place is None:
            used = set(self._users.values())
            free = [i for i in range(len(self._places)) if i not in used]
            place = next((i for i in free if self._places[i] is None), free[0])
            self._places[place] = trie
            self._write(place, trie)
        self._users[slot] = place
        return place * MAX_NODES

    def _write(self, place: int, trie: Trie) -> None:
        """Copy a list into its place; without waiting for a GPU."""
        root = place * MAX_NODES
        keys = np.full(MAX_NODES, ((root + MAX_NODES - 1) << TOKEN_BITS) | _LAST_TOKEN)
        keys[: len(trie.nodes)] = ((root + trie.nodes) << TOKEN_BITS) | trie.tokens
        for table, values in (
            (self.keys, keys),
            (self.targets, trie.targets + root),
            (self.gains, trie.gains),
            (self.refunds, trie.refunds),
        ):
            source = torch.from_numpy(values)
            if table.is_cuda:
                source = source.pin_memory()
            table[root : root + len(values)].copy_(source, non_blocking=True)


@dataclasses.dataclass(frozen=True)
class TrieSteps:
    """What becomes of rows with each of some tokens; all of one shape."""

    nodes: torch.Tensor  # int64: where they are in their trie then
    gains: torch.Tensor  # float32: nats earned or, below 0, taken back


def steps(
    book: Phrasebook, state: RowState, rows: torch.Tensor, tokens: torch.Tensor, near: torch.Tensor
) -> TrieSteps:
    """Follow lists with tokens.

    Args:
        book: all lists.
        state: of `rows` it reads `root` and `node`.
        rows: int64 (m,); those without phrases stay where they are and earn nothing.
        tokens: int64 (m, n).
        near: bool, as tokens: who may earn; others leave.
    """
    root, node = state.root[rows, None], state.node[rows, None]
    onward, there = _edge(book, node, tokens)
    anew, begins = _edge(book, root, tokens)
    there, begins = there & near, begins & near
    refund = book.refunds[node.clamp_min(0)]
    nodes = torch.where(there, book.targets[onward], torch.where(begins, book.targets[anew], root))
    gains = torch.where(begins, refund + book.gains[anew], refund)
    gains = torch.where(there, book.gains[onward], gains)
    none = root < 0
    return TrieSteps(torch.where(none, node, nodes.long()), gains.masked_fill(none, 0.0))


def _edge(
    book: Phrasebook, node: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which edge leaves a node with a token, and whether there is one."""
    key = (node << TOKEN_BITS) | tokens
    edge = torch.searchsorted(book.keys, key).clamp_max(len(book.keys) - 1)
    return edge, book.keys[edge] == key
