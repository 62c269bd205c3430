"""Phrases that are to come out right, as a trie over tokens: what each token that goes on earns.

Boosting by shallow fusion: a phrase's boost is spread over its tokens, and what a match that breaks
off has earned is taken back, so that a sequence is only worth more where it holds whole phrases. A
match that breaks off may be within another, as in Aho and Corasick's automaton: such edges are
found here, so that who follows the trie looks at a node and at the root, and no further.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_NODES = 1 << 15  # of a list of phrases, and as many edges
BOOST = 3.0  # nats that a phrase of weight 1 earns


@dataclasses.dataclass(frozen=True, eq=False)  # a list is equal to itself alone
class Trie:
    """The phrases of one list; node 0 is the root. Edges are in order of their node and token."""

    nodes: NDArray[np.int64]  # (edges,)
    tokens: NDArray[np.int64]  # (edges,)
    targets: NDArray[np.int32]  # (edges,)
    gains: NDArray[np.float32]  # (edges,): nats
    refunds: NDArray[np.float32]  # (nodes,): nats, at most 0, for a token that leaves


def build_trie(phrases: Sequence[tuple[tuple[int, ...], float]]) -> Trie:
    """Build the trie of token sequences, each with its boost in nats; of equal ones the highest.

    A phrase earns as much with each token. Where one begins another, that earns from there on only
    what it is worth more.

    Raises:
        ValueError: it has more than `MAX_NODES` nodes or edges.
    """
    children: list[dict[int, int]] = [{}]
    worth = [0.0]  # earned on the way from the root
    ends = [0.0]  # boost of the phrase that ends there; 0: none
    for ids, boost in sorted(phrases, key=lambda phrase: (len(phrase[0]), phrase)):
        node = 0
        for i, token in enumerate(ids, 1):
            if token not in children[node]:
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
    kept = [0.0] * len(children)  # of what is earned, what stays when the match breaks off
    fails = [0] * len(children)
    edges = list[tuple[int, int, int, float]]()
    goes = [dict(some) for some in children]
    waiting = collections.deque([0])
    while waiting:
        node = waiting.popleft()
        refund = kept[node] - worth[node]
        if fails[node]:  # what begins at the root is looked up there
            goes[node] = goes[fails[node]] | goes[node]
        for token, target in sorted(goes[node].items()):
            own = children[node].get(token) == target
            gain = worth[target] - worth[node] if own else refund + worth[target]
            edges.append((node, token, target, gain))
            if own:
                kept[target] = worth[target] if ends[target] else kept[node]
                fails[target] = goes[fails[node]].get(token, 0) if node else 0
                fails[target] = fails[target] or (goes[0].get(token, 0) if node else 0)
                waiting.append(target)
    if max(len(edges), len(children)) > MAX_NODES:
        raise ValueError(f"phrases have {len(edges)} tokens that differ, more than {MAX_NODES}")
    edges.sort()
    nodes, tokens, targets, gains = zip(*edges, strict=True) if edges else ((), (), (), ())
    return Trie(
        nodes=np.array(nodes, np.int64),
        tokens=np.array(tokens, np.int64),
        targets=np.array(targets, np.int32),
        gains=np.array(gains, np.float32),
        refunds=np.array(kept, np.float32) - np.array(worth, np.float32),
    )
