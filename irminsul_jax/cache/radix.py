"""Radix tree over the token sequences of one namespace: each position of a path knows the row that serves it there.

Beside the row stands its *contribution*: the depth that it gives to whatever is computed behind it on this path. A row
that was computed on this very path contributes its own depth, one that was served from elsewhere one more. Contribution
0 therefore means: pure, and in exactly its own left context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Int32, Int64, UInt8

Alive = Callable[[Int64[np.ndarray, "N"]], Bool[np.ndarray, "N"]]


@dataclass(slots=True)
class _Node:
    tokens: np.ndarray
    handles: np.ndarray
    contributions: np.ndarray
    owner: int
    """A sequence that has this node's path as its prefix."""
    children: dict[int, _Node] = field(default_factory=dict)


@dataclass(frozen=True)
class Path:
    """Rows along the longest known prefix of a sequence, dead ones included."""

    handles: Int64[np.ndarray, "N"]
    contributions: UInt8[np.ndarray, "N"]
    owner: int


def agreeing(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading positions at which two sequences agree."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


class RadixTree:
    def __init__(self) -> None:
        self._root = _Node(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.uint8), -1)

    def match(self, tokens: Int32[np.ndarray, "T"]) -> Path:
        node, position, owner = self._root, 0, -1
        handles, contributions = [node.handles], [node.contributions]
        while position < len(tokens) and (child := node.children.get(int(tokens[position]))) is not None:
            n = agreeing(child.tokens, tokens[position:])
            handles.append(child.handles[:n])
            contributions.append(child.contributions[:n])
            owner, position, node = child.owner, position + n, child
            if n < len(child.tokens):
                break
        return Path(np.concatenate(handles), np.concatenate(contributions), owner)

    def insert(
        self,
        tokens: Int32[np.ndarray, "T"],
        handles: Int64[np.ndarray, "T"],
        contributions: UInt8[np.ndarray, "T"],
        owner: int,
        alive: Alive,
    ) -> Int64[np.ndarray, "T"]:
        """Add a path and return the rows that stand on it now. A row replaces a dead one and one of larger contribution
        (so pure replaces impure, never the reverse); otherwise the earlier row stays."""
        node, position, standing = self._root, 0, []
        while position < len(tokens):
            child = node.children.get(int(tokens[position]))
            if child is None:
                leaf = _Node(tokens[position:], handles[position:], contributions[position:], owner)
                node.children[int(tokens[position])] = leaf
                standing.append(leaf.handles)
                break
            n = agreeing(child.tokens, tokens[position:])
            if n < len(child.tokens):
                _split(child, n)
            here = slice(position, position + n)
            better = ~alive(child.handles) | (contributions[here] < child.contributions)
            if better.any():
                child.handles = np.where(better, handles[here], child.handles)
                child.contributions = np.where(better, contributions[here], child.contributions)
            standing.append(child.handles)
            node, position = child, position + n
        return np.concatenate(standing)

    def prune(self, alive: Alive) -> None:
        """Forget what no match can reach any more: every path from its first dead row on."""
        stack = [self._root]
        while stack:
            node = stack.pop()
            for token, child in list(node.children.items()):
                living = alive(child.handles)
                if living.all():
                    stack.append(child)
                elif not living[0]:
                    del node.children[token]
                else:
                    _truncate(child, int(living.argmin()))

    def __len__(self) -> int:
        """Tokens that the tree holds."""
        total, stack = 0, [self._root]
        while stack:
            node = stack.pop()
            total += len(node.tokens)
            stack.extend(node.children.values())
        return total


def _split(node: _Node, at: int) -> None:
    tail = _Node(node.tokens[at:], node.handles[at:], node.contributions[at:], node.owner, node.children)
    node.children = {int(node.tokens[at]): tail}
    node.tokens, node.handles = node.tokens[:at], node.handles[:at]
    node.contributions = node.contributions[:at]


def _truncate(node: _Node, at: int) -> None:
    """Copies, since a view would keep the whole sequence in memory."""
    node.tokens, node.handles = node.tokens[:at].copy(), node.handles[:at].copy()
    node.contributions = node.contributions[:at].copy()
    node.children = {}
