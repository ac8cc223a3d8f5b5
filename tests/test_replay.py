"""Replay: a recorded reply scores a speculator as the engine would."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from toys import EOS, VOCAB, tiny_engine

from specdec.conversation import Conversation
from specdec.speculators import TopK
from specdec.speculators.fitting import fit, lessons, prior, random_weights
from specdec.speculators.hybrid import HybridSpeculator
from specdec.speculators.mixer import WEIGHTS_SHAPE, empty_workspace, mix
from specdec.speculators.ngram import NGramSpeculator
from specdec.speculators.replay import Recorder, Recording, Score, Trace, replay
from specdec.speculators.vocabulary import Vocabulary

REPLY = [3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7]


def trace() -> Trace:
    text = [1, 2, *REPLY]
    ids = np.stack([np.array(text[1:]), np.full(len(text) - 1, 9)], axis=1).astype(np.int32)
    top = TopK(ids, np.log(np.tile([[0.9, 0.1]], (len(ids), 1))).astype(np.float32))
    return Trace(0, "toy", np.array([1, 2]), np.array(REPLY), top, len(REPLY), frozenset({0}))


@pytest.mark.parametrize("speculator", [NGramSpeculator(vocab_size=10), HybridSpeculator(vocab_size=10)])
def test_every_token_is_emitted_once_and_repetition_is_accepted(speculator: HybridSpeculator) -> None:
    score = replay(trace(), speculator, 8)
    assert score.tokens == len(REPLY)
    assert score.tokens <= score.accepted + score.passes <= score.tokens + 1
    assert score.tokens_per_pass > 1.2
    assert score.expected > score.passes


def test_no_budget_is_one_token_per_pass() -> None:
    assert replay(trace(), NGramSpeculator(vocab_size=10), 0) == Score(len(REPLY), len(REPLY), expected=len(REPLY))


def live_trace(prompts: list[str]) -> list[Trace]:
    """What the engine says to ``prompts``, one after the other in one conversation, recorded on the way."""
    engine = tiny_engine()
    recorder = Recorder(HybridSpeculator(vocab_size=VOCAB))
    chat = Conversation(engine.target, recorder)
    traces, text = [], ""
    for prompt in prompts:
        text += prompt
        prompt_ids = engine.tokenizer(text)["input_ids"]
        steps = list(engine.stream(prompt_ids, conversation=chat, max_new_tokens=24, budget=8))
        reply_ids = [token for step in steps for token in step.token_ids]
        traces.append(Trace(0, "toy", np.array(prompt_ids), np.array(reply_ids), recorder.view, 24, frozenset({EOS})))
        text += engine.tokenizer.decode(reply_ids)
    return traces


def test_a_recorded_view_is_the_targets_own_in_every_turn() -> None:
    engine = tiny_engine()
    for recorded in live_trace(["one two three", " four", " five"]):
        text = [*recorded.prompt_ids.tolist(), *recorded.reply_ids.tolist()]
        fresh = engine.target.prefill(engine.target.new_cache(), text[:-1], top_k=4)
        assert fresh is not None
        assert np.array_equal(recorded.top.token_ids[:, :4], fresh.token_ids)
        assert np.allclose(recorded.top.logprobs[:, :4], fresh.logprobs, atol=1e-4)


@pytest.mark.parametrize("budget", [4, 16])
def test_a_replay_takes_the_live_engines_passes_where_it_knows_all_that_the_speculator_sees(budget: int) -> None:
    engine = tiny_engine()
    replayed, live = HybridSpeculator(vocab_size=VOCAB, recycling=False), HybridSpeculator(vocab_size=VOCAB, recycling=False)
    chat = Conversation(engine.target, live)
    for recorded in live_trace(["abcabcabcabc", "abcabc", "xyxyxyxy"]):
        steps = list(engine.stream(recorded.prompt_ids.tolist(), conversation=chat, max_new_tokens=24, budget=budget))
        score = replay(recorded, replayed, budget)
        assert [token for step in steps for token in step.token_ids] == recorded.reply_ids.tolist()
        assert score.passes == len(steps)


def test_round_trip(tmp_path: Path) -> None:
    Recording("toy", 10, "abc.npz", (trace(), trace())).save(tmp_path / "traces.npz")
    loaded = Recording.load(tmp_path / "traces.npz")
    assert (loaded.model, loaded.vocab_size, loaded.vocabulary, len(loaded.traces)) == ("toy", 10, "abc.npz", 2)
    again = loaded.traces[1]
    assert (again.category, again.limit, again.ends) == ("toy", len(REPLY), {0})
    assert again.prompt_ids.tolist() == [1, 2]
    assert again.reply_ids.tolist() == REPLY
    assert np.array_equal(again.top.token_ids, trace().top.token_ids)
    assert np.allclose(again.top.logprobs, trace().top.logprobs, atol=1e-2)
    assert replay(again, NGramSpeculator(vocab_size=10), 8) == replay(trace(), NGramSpeculator(vocab_size=10), 8)


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", conversations=np.zeros(1), categories=np.array(["x"]))
    with pytest.raises(ValueError, match=r"other\.npz"):
        Recording.load(tmp_path / "other.npz")
    with pytest.raises(ValueError, match="view"):
        Trace(0, "toy", np.array([1]), np.array([2]), trace().top, 1, frozenset())


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


def test_the_prior_is_fitted_with_and_without_every_source_and_is_the_same_again() -> None:
    heard: list[tuple[str, float]] = []
    traces = live_trace(["one two", " three"])
    weights = prior(traces, VOCAB, Vocabulary(keys=1), lambda what, share: heard.append((what, share)))
    assert weights.shape == WEIGHTS_SHAPE
    assert np.isfinite(weights).all()
    assert [share for what, share in heard if what == "replaying"] == [0.0, 0.2, 0.4, 0.6, 0.8]
    assert len({what for what, _ in heard}) == 2
    assert np.array_equal(weights, prior(traces, VOCAB, Vocabulary(keys=1)))
