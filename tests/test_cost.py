"""The node budget follows the measured cost curve."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.cost import PassCost

FLAT = PassCost({1: 1.0, 64: 1.0})
STEEP = PassCost({1: 1.0, 2: 2.0, 64: 64.0})


def best_width(cost: PassCost, scores: list[float] | np.ndarray) -> int:
    """Of a text alone."""
    return cost.share([np.asarray(scores, np.float32)])[0]


def test_on_a_flat_curve_every_candidate_pays() -> None:
    assert best_width(FLAT, [1, 0.5, 0.2, 0.01]) == 4


def test_on_a_steep_curve_only_a_candidate_that_saves_a_whole_pass_pays() -> None:
    assert best_width(STEEP, [1, 0.9, 0.8]) == 1
    assert best_width(PassCost({1: 1.0, 2: 1.1, 64: 30.0}), [1, 0.9, 0.05, 0.04]) == 2


def test_the_budget_maximises_expected_tokens_per_second() -> None:
    cost = PassCost({1: 26e-3, 8: 32e-3, 16: 36e-3, 32: 50e-3, 64: 80e-3})
    scores = np.concatenate([[1], np.sort(np.random.default_rng(0).random(63) ** 3)[::-1]])
    rates = [scores[:width].sum() / float(cost.seconds(width)) for width in range(1, 65)]
    assert best_width(cost, scores) == int(np.argmax(rates)) + 1


def test_the_curve_never_falls_and_follows_what_passes_cost_now() -> None:
    cost = PassCost({1: 2.0, 4: 1.0, 8: 4.0})
    assert cost.seconds(np.array([1, 4, 8, 12])).tolist() == [2.0, 2.0, 4.0, 6.0]
    for _ in range(200):
        cost.observe(8, 8.0)
    assert cost.plain == pytest.approx(4.0, rel=0.01)
    cost.observe(8, 1e9)
    assert cost.plain < 4.5, "one outlier moves the estimate a little"


@pytest.mark.parametrize(
    "seconds",
    [{1: 26e-3, 8: 32e-3, 16: 36e-3, 32: 50e-3, 64: 80e-3}, {w: 1.0 + (w > 8) + 3 * (w > 32) for w in range(1, 66)}],
    ids=["rising", "in stairs"],
)
def test_where_nothing_is_worth_its_cost_no_larger_tree_pays(seconds: dict[int, float]) -> None:
    cost, rng = PassCost(seconds), np.random.default_rng(0)
    ended = 0
    for _ in range(300):
        scores = np.concatenate([[1], np.sort(rng.random(64) ** rng.integers(2, 9))[::-1]])
        end = next((w for w in range(1, 65) if scores[w] < cost.worth()[w] * scores[:w].sum()), 65)
        assert best_width(cost, scores) <= end
        ended += end < 65
    assert ended > 100
