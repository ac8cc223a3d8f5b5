"""TokenTree: the candidates of one step, as flat arrays.

A *token tree* holds alternative continuations of a text with their shared prefixes merged. Node 0 is the *root*: the last
committed token, whose K/V is not cached yet. Every other node is a *drafted* token that would follow its parent. One target
pass over all nodes gives the target's next-token distribution after each of them ("token tree verification", SpecInfer,
arXiv 2305.09781).

Nodes are stored best first, so every prefix of the arrays is itself a tree: a smaller node budget is a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Source(IntEnum):
    """Where a node came from: the strongest evidence for it."""

    ROOT = 0
    CONTEXT = 1
    RECYCLED = 2
    MEMORY = 3
    VOCABULARY = 4


@dataclass(frozen=True, slots=True)
class TokenTree:
    """A tree of N nodes (root included), flat.

    ``token_ids`` [N] and ``parents`` [N] (``parents[0] == -1`` and ``parents[i] < i``); siblings carry distinct tokens.
    ``scores`` [N], where given: the speculator's estimate of the probability that node i is accepted, the product of the
    conditional estimates along its path (``scores[0] == 1``). ``sources`` [N], where given: a `Source` per node.
    """

    token_ids: NDArray[np.int64]
    parents: NDArray[np.int64]
    scores: NDArray[np.float32] | None = None
    sources: NDArray[np.int8] | None = None

    @classmethod
    def root(cls, token_id: int) -> TokenTree:
        """The tree of plain decoding: the root alone."""
        return cls(np.array([token_id], np.int64), np.array([-1], np.int64), np.ones(1, np.float32), np.zeros(1, np.int8))

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> TokenTree:
        """One branch: each token follows the one before it."""
        return cls(np.asarray(token_ids, np.int64), np.arange(-1, len(token_ids) - 1, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """Whether each node follows the one before it."""
        return bool((self.parents == np.arange(-1, len(self) - 1)).all())

    def depths(self) -> NDArray[np.int64]:
        """Distance of each node from the root, [N]."""
        if self.is_chain:
            return np.arange(len(self))
        depths = np.zeros(len(self), np.int64)
        for node in range(1, len(self)):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    def expected_tokens(self, most: int | None = None) -> float:
        """How many tokens a pass over the tree will emit by its scores; of which at most ``most`` count. Without scores: 1.

        One token is the target's own, and every node that is accepted adds one: the expectation is the sum of the scores.
        """
        if self.scores is None:
            return 1.0
        return float((self.scores if most is None else self.scores[self.depths() < most]).sum())

    def ancestor_mask(self) -> NDArray[np.bool_]:
        """[N, N]: row i is True at i's ancestors and at i itself; what node i may attend to within the tree."""
        if self.is_chain:
            return np.tri(len(self), dtype=np.bool_)
        mask = np.eye(len(self), dtype=np.bool_)
        for node in range(1, len(self)):
            mask[node] |= mask[self.parents[node]]
        return mask

    def children(self) -> list[dict[int, int]]:
        """For each node, its children: token id -> node."""
        children: list[dict[int, int]] = [{} for _ in range(len(self))]
        for node, (token, parent) in enumerate(zip(self.token_ids.tolist(), self.parents.tolist(), strict=True)):
            if parent >= 0:
                children[parent][token] = node
        return children

    def path(self, node: int) -> list[int]:
        """The nodes from the root to ``node``, both included."""
        path = [node]
        while (node := int(self.parents[node])) >= 0:
            path.append(node)
        return path[::-1]

    def prefix(self, size: int) -> TokenTree:
        """The tree of the first ``size`` nodes (at least the root), views of this one's arrays."""
        keep = slice(0, max(size, 1))
        return TokenTree(
            self.token_ids[keep],
            self.parents[keep],
            None if self.scores is None else self.scores[keep],
            None if self.sources is None else self.sources[keep],
        )

    def follows(self, root: int, budget: int, vocab_size: int) -> bool:
        """Whether it may be verified where the text ends with ``root``: a tree of at most ``budget`` nodes besides the root."""
        try:
            self.check(vocab_size)
        except ValueError:
            return False
        return int(self.token_ids[0]) == root and len(self) <= budget + 1

    def check(self, vocab_size: int | None = None) -> None:
        """Raise ValueError where an invariant of the class docstring does not hold."""
        size = len(self)
        if size == 0 or self.parents.shape != (size,) or self.token_ids.shape != (size,):
            raise ValueError("a token tree needs a root, and as many parents as token ids")
        token_ids, parents = self.token_ids.tolist(), self.parents.tolist()  # cheaper than a dozen calls on small arrays
        if parents[0] != -1 or not all(0 <= parent < node for node, parent in enumerate(parents[1:], 1)):
            raise ValueError("parents[0] must be -1 and every other parent must come before its child")
        if min(token_ids) < 0 or (vocab_size is not None and max(token_ids) >= vocab_size):
            raise ValueError("a token id lies outside the vocabulary")
        if len(set(zip(parents, token_ids, strict=True))) != size:
            raise ValueError("siblings must carry distinct tokens")
        for name, array in (("scores", self.scores), ("sources", self.sources)):
            if array is not None and array.shape != (size,):
                raise ValueError(f"{name} must hold one value per node")


def common_length(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """How many tokens two texts share from the start."""
    shorter = min(len(a), len(b))
    differs = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differs[0]) if len(differs) else shorter
