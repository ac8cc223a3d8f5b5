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

    ``token_ids`` int32 [N, K], ``logprobs`` float32 [N, K].
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    @classmethod
    def concatenate(cls, parts: Sequence[TopK]) -> TopK:
        """Several, one after the other."""
        return cls(np.concatenate([p.token_ids for p in parts]), np.concatenate([p.logprobs for p in parts]))

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A tree to verify, and why: ``match_length`` is the length of the longest context match behind it (0: none).

    ``draft_probs`` is None for deterministic candidates, the only kind so far.
    """

    tree: TokenTree
    match_length: int = 0
    draft_probs: NDArray[np.float32] | None = None


class Speculator(Protocol):
    """One conversation's source of candidates. ``top_k``: how many of the target's next tokens it wants to be shown."""

    top_k: int

    def begin(self, token_ids: Sequence[int], top: TopK | None, start: int) -> None:
        """The committed context is now exactly ``token_ids`` (a new prompt, the next turn, or a rewound one).

        ``top``, where given, is what the target says after the positions from ``start`` on.
        """

    def expect(self, token_ids: Sequence[int]) -> None:
        """After `begin`: the reply will probably be much like ``token_ids``, which are no part of the context."""

    def propose(self, budget: int, branches: int | None = None, worth: NDArray[np.float64] | None = None) -> Proposal:
        """At most ``budget`` nodes besides the root; ``branches=1`` gives the best single path.

        ``worth`` (`specdec.cost.PassCost.worth`), where given, tells where it may end sooner.
        """
        ...

    def observe(self, tree: TokenTree, path: Sequence[int], emitted: Sequence[int], top: TopK | None) -> None:
        """One verified pass: the accepted nodes, the emitted tokens (cut at a stop), the target's view of every node."""
