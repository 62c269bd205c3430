"""Phrases that are to come out right, as a trie over tokens: what each token that goes on earns.

Boosting by shallow fusion: a phrase's boost is spread over its tokens, and what a match that breaks
off has earned is taken back, so that a sequence is only worth more where it holds whole phrases. A
match that breaks off may be within another, as in Aho and Corasick's automaton: such edges are
found here, so that who follows the trie looks at a node and at the root, and no further.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

MAX_PHRASES = 1000  # of a list
MAX_NODES = 1 << 15
"""The most nodes of a list of phrases, and the most edges."""
BOOST = 3.0  # nats that a phrase of weight 1 earns


@dataclasses.dataclass(frozen=True, eq=False)  # a list is equal to itself alone
class Trie:
    """The phrases of one list; node 0 is the root. Edges are in order of their node and token."""

    nodes: NDArray[np.int64]  # (edges,)
    tokens: NDArray[np.int64]  # (edges,)
    targets: NDArray[np.int32]  # (edges,)
    gains: NDArray[np.float32]  # (edges,): nats
    refunds: NDArray[np.float32]  # (nodes,): nats, at most 0, for a token that leaves


def build_trie(phrases: Iterable[tuple[tuple[int, ...], float]]) -> Trie:
    """Build the trie of token sequences, each with its boost in nats; of equal ones the highest.

    Each token of a phrase earns the same. If one phrase is a prefix of another, the longer one adds
    only the difference of the two boosts.

    Args:
        phrases: read one by one, and no further once the trie is too large.

    Raises:
        ValueError: the trie has more than `MAX_NODES` nodes or edges.
    """
    children: list[dict[int, int]] = [{}]
    worth = [0.0]  # earned on the way from the root
    ends = [0.0]  # boost of the phrase that ends there; 0: none
    for ids, boost in phrases:
        node = 0
        for i, token in enumerate(ids, 1):
            if token not in children[node]:
                _require_room(len(children))
                children[node][token] = len(children)
                children.append({})
                worth.append(0.0)
                ends.append(0.0)
            node = children[node][token]
            worth[node] = max(worth[node], boost * i / len(ids))
        ends[node] = max(ends[node], boost)
    return _with_shortcuts(children, worth, ends)


def _with_shortcuts(children: list[dict[int, int]], worth: list[float], ends: list[float]) -> Trie:
    """Build the trie, with edges from a match that breaks off to another that it is within."""
    kept = [0.0] * len(children)  # the part of `worth` that stays when the match breaks off
    fails, parents = [0] * len(children), [0] * len(children)
    goes = list(children)
    order, count = [0], 0
    for node in order:  # which grows
        # What begins at the root is looked up there.
        inherited = goes[fails[node]] if fails[node] else {}
        _require_room(count + len(inherited) - 1)
        goes[node] = inherited | children[node]
        count += len(goes[node])
        _require_room(count - 1)
        for token, target in children[node].items():
            kept[target] = worth[target] if ends[target] else kept[node]
            parents[target] = node
            if node:
                fails[target] = inherited.get(token) or goes[0].get(token, 0)
            order.append(target)
    edges = [
        (node, token, target)
        for node, targets in enumerate(goes)
        for token, target in sorted(targets.items())
    ]
    nodes, tokens, targets = np.array(edges, np.int64).reshape(-1, 3).T.copy()
    earned = np.array(worth)
    refunds = np.array(kept) - earned
    own = np.array(parents)[targets] == nodes
    gains = earned[targets] + np.where(own, -earned[nodes], refunds[nodes])
    return Trie(
        nodes=nodes,
        tokens=tokens,
        targets=targets.astype(np.int32),
        gains=gains.astype(np.float32),
        refunds=refunds.astype(np.float32),
    )


def _require_room(count: int) -> None:
    """Refuse one more node or edge beside so many."""
    if count >= MAX_NODES:
        raise ValueError(f"phrases have more than {MAX_NODES} tokens that differ")
