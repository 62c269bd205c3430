"""Compile boosted phrases into a trie over tokens, with the boost of each edge.

This is contextual biasing by shallow fusion. A phrase's boost is spread over its tokens. If a match
breaks off, its boost is subtracted again, so only complete phrases raise a sequence's score. As in
an Aho-Corasick automaton, a match that breaks off may continue as another match. The edges for this
are precomputed: a reader of the trie needs only the edges of the current node and of the root.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

MAX_PHRASES = 1000  # of a list
MAX_NODES = 1 << 15
"""Maximum number of nodes of a list of phrases, and of edges."""
BOOST = 3.0  # nats for a phrase of weight 1


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity
class Trie:
    """The trie of a list of phrases; node 0 is the root. Edges are sorted by node and token."""

    nodes: NDArray[np.int64]  # (edges,)
    tokens: NDArray[np.int64]  # (edges,)
    targets: NDArray[np.int32]  # (edges,)
    gains: NDArray[np.float32]  # (edges,): nats
    refunds: NDArray[np.float32]  # (nodes,): nats, at most 0, if the match breaks off here


def build_trie(phrases: Iterable[tuple[tuple[int, ...], float]]) -> Trie:
    """Build the trie of token sequences and their boosts in nats; duplicates get the highest.

    Each token of a phrase gets the same share. If one phrase is a prefix of another, the longer one
    adds only the difference of the two boosts.

    Args:
        phrases: the sequences; reading stops when the trie is too large.

    Raises:
        ValueError: the trie has more than `MAX_NODES` nodes or edges.
    """
    children: list[dict[int, int]] = [{}]
    path_boosts = [0.0]  # the sum of boosts on the path from the root
    phrase_boosts = [0.0]  # the boost of the phrase that ends at the node; 0: none
    for ids, boost in phrases:
        node = 0
        for i, token in enumerate(ids, 1):
            if token not in children[node]:
                _require_room(len(children))
                children[node][token] = len(children)
                children.append({})
                path_boosts.append(0.0)
                phrase_boosts.append(0.0)
            node = children[node][token]
            path_boosts[node] = max(path_boosts[node], boost * i / len(ids))
        phrase_boosts[node] = max(phrase_boosts[node], boost)
    return _with_shortcuts(children, path_boosts, phrase_boosts)


def _with_shortcuts(
    children: list[dict[int, int]], path_boosts: list[float], phrase_boosts: list[float]
) -> Trie:
    """Build the trie, with edges from a match that breaks off to its longest suffix match."""
    # The part of `path_boosts` that stays if the match breaks off.
    kept_boost = [0.0] * len(children)
    suffix_nodes, transitions = [0] * len(children), list(children)
    edges, order = list[tuple[int, int, int, float]](), [0]
    for node in order:  # the list grows during the loop
        # Edges of the root are not copied; readers look them up at the root.
        inherited = transitions[suffix_nodes[node]] if suffix_nodes[node] else {}
        _require_room(len(edges) + len(inherited) - 1)
        transitions[node] = inherited | children[node]
        for token, target in transitions[node].items():
            lost = path_boosts[node] - (0.0 if token in children[node] else kept_boost[node])
            edges.append((node, token, target, path_boosts[target] - lost))
        _require_room(len(edges) - 1)
        for token, target in children[node].items():
            kept_boost[target] = path_boosts[target] if phrase_boosts[target] else kept_boost[node]
            if node:
                suffix_nodes[target] = inherited.get(token) or transitions[0].get(token, 0)
            order.append(target)
    edges.sort()
    nodes, tokens, targets = np.array([e[:3] for e in edges], np.int64).reshape(-1, 3).T.copy()
    return Trie(
        nodes=nodes,
        tokens=tokens,
        targets=targets.astype(np.int32),
        gains=np.array([gain for *_, gain in edges], np.float32),
        refunds=(np.array(kept_boost) - np.array(path_boosts)).astype(np.float32),
    )


def _require_room(count: int) -> None:
    """Raise an error if `count` nodes or edges are already the maximum."""
    if count >= MAX_NODES:
        raise ValueError(f"phrases have more than {MAX_NODES} different tokens")
