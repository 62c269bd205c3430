"""Keep phrase lists on the device, and boost their tokens; the reference in plain torch.

Only the few likeliest tokens of a row are boosted, so that a boost cannot add unspoken words.
"""

import numpy as np
import torch

from serve.contract.phrases import MAX_NODES, Trie
from serve.native.kernels.gpu import staged
from serve.native.rules.state import RowState

MAX_BOOSTED = 16  # boosted tokens per row at most; a power of two, at least 2 * beam
MARGIN = 5.0  # nats below the likeliest token; less likely tokens are not boosted
TOKEN_BITS = 20
_LAST_TOKEN = (1 << TOKEN_BITS) - 1


class Phrasebook:
    """The phrase lists of all slots, in memory with fixed addresses.

    There is one table per slot, and a table holds one list. A list stays in its table while a slot
    uses it, and then until another list needs the table. Slots with the same list share one copy.

    Args:
        slots: the number of slots, and of tables.
        device: the device of the rows.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        size = slots * MAX_NODES
        self.keys = torch.empty(size, dtype=torch.int64, device=device)
        """Each edge as (node << TOKEN_BITS) | token, in ascending order."""
        self.targets = torch.zeros(size, dtype=torch.int32, device=device)
        self.gains = torch.zeros(size, dtype=torch.float32, device=device)
        self.refunds = torch.zeros(size, dtype=torch.float32, device=device)
        """Nats added when a token leaves each node, at most 0."""
        last = (torch.arange(1, slots + 1, device=device) * MAX_NODES - 1) << TOKEN_BITS
        self.keys.view(slots, MAX_NODES).copy_((last | _LAST_TOKEN)[:, None])
        self._tables: list[Trie | None] = [None] * slots
        self._users: dict[int, int] = {}  # table, by slot

    @staticmethod
    def bytes_of_slot() -> int:
        """Return the bytes that each slot adds."""
        return MAX_NODES * (8 + 4 + 4 + 4)

    def root(self, slot: int, trie: Trie) -> int:
        """Assign a list to a slot, and return the list's root node for the slot's rows."""
        self._users.pop(slot, None)
        table = next((i for i, stored in enumerate(self._tables) if stored is trie), None)
        if table is None:
            used = set(self._users.values())
            unused_tables = [i for i in range(len(self._tables)) if i not in used]
            table = next((i for i in unused_tables if self._tables[i] is None), unused_tables[0])
            self._tables[table] = trie
            self._write(table, trie)
        self._users[slot] = table
        return table * MAX_NODES

    def _write(self, table: int, trie: Trie) -> None:
        """Copy a phrase list to its table, without waiting for the GPU."""
        root = table * MAX_NODES
        keys = np.full(MAX_NODES, ((root + MAX_NODES - 1) << TOKEN_BITS) | _LAST_TOKEN)
        keys[: len(trie.nodes)] = ((root + trie.nodes) << TOKEN_BITS) | trie.tokens
        for tensor, values in (
            (self.keys, keys),
            (self.targets, trie.targets + root),
            (self.gains, trie.gains),
            (self.refunds, trie.refunds),
        ):
            source = staged(torch.from_numpy(values), tensor.device)
            tensor[root : root + len(values)].copy_(source, non_blocking=True)


def trie_steps(
    book: Phrasebook,
    state: RowState,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    boostable: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute how each candidate token would continue the phrases of its row.

    Args:
        book: all lists.
        state: `root` and `node` are read at `rows`.
        rows: int64 (m,); a row without phrases keeps its node, and its tokens gain 0.
        tokens: int64 (m, n).
        boostable: bool (m, n), the tokens likely enough to be boosted; others end a match.

    Returns:
        Two tensors (m, n): int64, the node of the row's trie after the token; and float32, the
        nats added to its score, negative if a boost is taken back.
    """
    root, node = state.root[rows, None], state.node[rows, None]
    next_edge, continues = _edge(book, node, tokens)
    first_edge, begins = _edge(book, root, tokens)
    continues, begins = continues & boostable, begins & boostable
    node_refund = book.refunds[node.clamp_min(0)]
    restarted = torch.where(begins, book.targets[first_edge], root)
    nodes = torch.where(continues, book.targets[next_edge], restarted)
    gains = torch.where(begins, node_refund + book.gains[first_edge], node_refund)
    gains = torch.where(continues, book.gains[next_edge], gains)
    no_phrases = root < 0
    nodes = torch.where(no_phrases, node, nodes.long())
    return nodes, gains.masked_fill(no_phrases, 0.0)


def _edge(
    book: Phrasebook, node: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the edge of each token from a node; return its index and whether it exists."""
    key = (node << TOKEN_BITS) | tokens
    edge = torch.searchsorted(book.keys, key).clamp_max(len(book.keys) - 1)
    return edge, book.keys[edge] == key
