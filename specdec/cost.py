"""PassCost: what a target pass costs by width, measured on this device; and the node budget that pays for itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Nodes per pass (root included) at which the curve is measured."""

_GUESTS = 512  # the most that are asked for
_MEMORY = 0.05  # least weight of an observed pass in the running correction; the first ones weigh more, as in a mean


class PassCost:
    """Seconds of one target pass by its width, interpolated between measured widths.

    The curve is measured once, at a short context; a running factor follows what passes really cost now (a longer
    context, a busier machine), so that the curve's shape and the present speed are both measured. ``each``: the seconds that
    every text beyond the first adds to a pass over the same number of nodes.
    """

    def __init__(self, seconds: Mapping[int, float], each: float = 0.0) -> None:
        self._widths = np.array(sorted(seconds), np.float64)
        curve = np.array([seconds[int(width)] for width in self._widths])
        self._curve = np.maximum.accumulate(curve)  # a wider pass is never cheaper; what says so is noise
        self._each = max(each, 0.0)
        self._factor = 1.0
        self._observed = 0
        self._worth: dict[int, NDArray[np.float64]] = {}

    def seconds(self, width: int | NDArray[np.int64], sequences: int = 1) -> NDArray[np.float64]:
        """The present cost of passes of ``width`` nodes of ``sequences`` texts; linear beyond the widest measured."""
        width = np.asarray(width, np.float64)
        inside = np.interp(width, self._widths, self._curve)
        if len(self._widths) > 1:
            slope = (self._curve[-1] - self._curve[-2]) / (self._widths[-1] - self._widths[-2])
            inside = inside + np.maximum(width - self._widths[-1], 0) * slope
        return np.asarray((inside + (sequences - 1) * self._each) * self._factor)

    @property
    def plain(self) -> float:
        """The present cost of a plain single-token pass, in seconds."""
        return float(self.seconds(1))

    def observe(self, width: int, seconds: float, sequences: int = 1) -> None:
        """Let one real pass correct the running factor (a pass over twice off is an outlier and counts as twice)."""
        ratio = np.clip(seconds / float(self.seconds(width, sequences)), 0.5, 2.0)
        self._observed += 1
        self._factor *= float(ratio) ** max(1 / (self._observed + 1), _MEMORY)

    def share(
        self, scores: Sequence[NDArray[np.float32]], width: int = 0, expected: float = 0.0, sequences: int = 1
    ) -> list[int]:
        """How many nodes (root included) to verify of each of several best-first trees with path probabilities ``scores``.

        The pass verifies ``width`` nodes besides, which are expected to emit ``expected`` tokens. Every tree keeps its root,
        whose score, 1, stands for the target's own token; beyond that the nodes of all trees compete. A pass over the best w
        nodes is expected to emit E(w) tokens, the sum of their scores; the width with the best E(w) / cost(w) wins.
        """
        if not scores:
            return []
        owners = np.repeat(np.arange(len(scores)), [len(tree) - 1 for tree in scores])
        nodes = np.concatenate([np.minimum.accumulate(tree[1:].astype(np.float64)) for tree in scores])
        order = np.argsort(-nodes, kind="stable")  # of a tree's equals the first: each keeps a part from the root on
        gains = np.concatenate([[expected + len(scores)], nodes[order]]).cumsum()
        costs = self.seconds(width + len(scores) + np.arange(len(gains)), sequences)
        taken = order[: int(np.argmax(gains / costs))]
        counts: list[int] = (1 + np.bincount(owners[taken], minlength=len(scores))).tolist()
        return counts

    def worth(self, others: int = 0) -> NDArray[np.float64]:
        """What more nodes must bring, [widest + 1], of a tree beside ``others`` texts of a token each.

        Where node w of a best-first tree scores below ``worth[w]`` times the sum of the scores before it (1 for each of the
        others among them), no larger tree has a better rate (`share`), whatever passes cost now.
        """
        if others not in self._worth:
            self._worth[others] = _worth(self.seconds(others + np.arange(1, int(self._widths[-1]) + 2), 1 + others))
        return self._worth[others]

    def guests(self, width: int, slowdown: float) -> int:
        """How many nodes a pass over ``width`` takes along until it takes ``slowdown`` times as long."""
        widths = np.arange(width, width + _GUESTS)
        return int(np.searchsorted(self.seconds(widths), slowdown * float(self.seconds(width)), side="right")) - 1


def _worth(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """`PassCost.worth` of passes that take ``seconds`` [W] by width, from 1 on.

    Nodes beyond the first w pay if they bring more than E(w) / cost(w) tokens for each second they add; the fewest seconds
    that a node may add lie on the flattest way from w to a larger width.
    """
    widths = np.arange(1, len(seconds) + 1)
    flattest = [np.min((seconds[w:] - seconds[w - 1]) / (widths[w:] - w)) for w in widths[:-1]]
    return np.concatenate([[0.0], np.array(flattest) / seconds[:-1]])
