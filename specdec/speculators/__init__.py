"""Speculators: what proposes a token tree before the target verifies it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.tree import TokenTree


@dataclass(frozen=True, slots=True)
class TopK:
    """The target's K most probable next tokens after each of N positions, best first.

    ``token_ids`` int32 [N, K], ``logprobs`` float32 [N, K]; ValueError where their shapes differ.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 2 or self.token_ids.shape != self.logprobs.shape:
            raise ValueError(f"token_ids {self.token_ids.shape} and logprobs {self.logprobs.shape} must both be [N, K]")

    @classmethod
    def concatenate(cls, parts: Sequence[TopK]) -> TopK:
        """Several, one after the other."""
        return cls(np.concatenate([p.token_ids for p in parts]), np.concatenate([p.logprobs for p in parts]))

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What one proposal may be.

    ``budget``: the most nodes besides the root. ``branches``: the most children of one node (1: a single path; None: any
    number). ``depth``: the deepest node, counted from the root (None: any depth). The pass emits the accepted nodes and one
    token of the target's own, so a node that is as deep as there are tokens left to emit gains nothing.
    ``ends``: the token ids that end a reply. They are not worth a node either: where the target chooses one, the pass emits it
    as the target's own token, and nothing follows it.
    ``worth`` [any length] (`specdec.cost.PassCost.worth`; None: 0): the tree may end before node w if that node scores below
    ``worth[w]`` times the sum of all scores before it and 1 for each of the ``others``, the texts in the same pass.
    """

    budget: int
    branches: int | None = None
    depth: int | None = None
    ends: frozenset[int] = frozenset()
    worth: NDArray[np.float64] | None = None
    others: int = 0


@dataclass(frozen=True, slots=True)
class Proposal:
    """A tree to verify, and why: ``match_length`` is the length of the longest context match behind it (0: none)."""

    tree: TokenTree
    match_length: int = 0


class Speculator(Protocol):
    """One conversation's source of candidates. ``top_k``: how many of the target's next tokens it wants to be shown."""

    top_k: int

    def begin(self, token_ids: Sequence[int], top: TopK | None, start: int) -> None:
        """The committed context is now exactly ``token_ids`` (a new prompt, the next turn, or a rewound one).

        ``top``, where given, is what the target says after the positions from ``start`` on.
        """

    def expect(self, token_ids: Sequence[int]) -> None:
        """After `begin`: the reply will probably be much like ``token_ids``, which are no part of the context."""

    def propose(self, request: DraftRequest) -> Proposal:
        """The most promising tree within ``request``."""
        ...

    def observe(self, tree: TokenTree, path: Sequence[int], emitted: Sequence[int], top: TopK | None) -> None:
        """One verified pass: the accepted nodes, the emitted tokens (cut at a stop), the target's view of every node."""
