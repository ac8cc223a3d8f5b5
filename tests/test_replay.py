"""Replay: a recorded reply scores a speculator as the engine would."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specdec.speculators import TopK
from specdec.speculators.fitting import fit, lessons, random_weights
from specdec.speculators.hybrid import HybridSpeculator
from specdec.speculators.mixer import empty_workspace, mix
from specdec.speculators.ngram import NGramSpeculator
from specdec.speculators.replay import Score, Trace, load_traces, replay, save_traces

REPLY = [3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7]


def trace() -> Trace:
    text = [1, 2, *REPLY]
    ids = np.stack([np.array(text[1:]), np.full(len(text) - 1, 9)], axis=1).astype(np.int32)
    top = TopK(ids, np.log(np.tile([[0.9, 0.1]], (len(ids), 1))).astype(np.float32))
    return Trace(0, "toy", np.array([1, 2]), np.array(REPLY), top)


@pytest.mark.parametrize("speculator", [NGramSpeculator(vocab_size=10), HybridSpeculator(vocab_size=10)])
def test_every_token_is_emitted_once_and_repetition_is_accepted(speculator: HybridSpeculator) -> None:
    score = replay(trace(), speculator, 8)
    assert score.tokens == len(REPLY)
    assert score.tokens <= score.accepted + score.passes <= score.tokens + 1
    assert score.tokens_per_pass > 1.2
    assert score.calibration > 0


def test_no_budget_is_one_token_per_pass() -> None:
    assert replay(trace(), NGramSpeculator(vocab_size=10), 0) == Score(len(REPLY), len(REPLY))


def test_round_trip(tmp_path: Path) -> None:
    save_traces(tmp_path / "traces.npz", [trace(), trace()])
    loaded = load_traces(tmp_path / "traces.npz")
    assert len(loaded) == 2
    assert loaded[1].category == "toy"
    assert np.array_equal(loaded[1].top.token_ids, trace().top.token_ids)
    assert replay(loaded[0], NGramSpeculator(vocab_size=10), 8) == replay(trace(), NGramSpeculator(vocab_size=10), 8)


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", conversations=np.zeros(1), categories=np.array(["x"]))
    with pytest.raises(ValueError, match=r"other\.npz"):
        load_traces(tmp_path / "other.npz")
    with pytest.raises(ValueError, match="view"):
        Trace(0, "toy", np.array([1]), np.array([2]), TopK(np.zeros((5, 1), np.int32), np.zeros((5, 1), np.float32)))


def test_fitting_makes_repetition_likelier() -> None:
    notes = lessons([trace()] * 3, 8, lambda: HybridSpeculator(vocab_size=10))
    assert len(notes) >= len(REPLY)
    weights = fit(notes, random_weights(np.random.default_rng(0)), epochs=30, rate=0.02, batch=8)
    work = empty_workspace()
    sure = 0.0
    for note in notes:
        mix(weights, note.opinions, note.depth, work)
        sure += work.probs[note.truth] / len(notes)
    assert sure > 0.6
