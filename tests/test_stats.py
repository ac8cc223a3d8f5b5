"""The figures: what was forecast and what was given count the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
from test_laws import ids
from toys import VOCAB, tiny_engine, tokenizer

from specdec.accept import Verdict
from specdec.stats import Stats
from specdec.step import Step, Timings
from specdec.tree import TokenTree

PROMPT = "one two three one two"


def step(index: int, scores: list[float] | None, path: list[int], emitted: int) -> Step:
    """A chain with the given scores, of which ``path`` was accepted and ``emitted`` tokens were said."""
    size = len(path) + 2 if scores is None else len(scores)
    tree = TokenTree(np.arange(size), np.arange(-1, size - 1), None if scores is None else np.array(scores, np.float32))
    timings = Timings(0.0, 0.0, 1.0, 0.0, 0.0)
    return Step(index, tree, Verdict(tuple(path), 9, "recovered"), tuple(range(emitted)), "", timings, 0, 0.5)


def test_a_step_is_expected_to_give_one_token_and_its_nodes_by_their_probability() -> None:
    assert step(0, [1, 0.5, 0.25], [0, 1], 2).expected_tokens == 1.75
    assert step(0, [1], [0], 1).expected_tokens == 1
    assert step(0, None, [0], 1).expected_tokens == 1, "a speculator that gives no scores"


def test_behind_the_cut_of_a_stop_string_nothing_is_expected_for_nothing_is_given() -> None:
    assert step(0, [1, 0.5, 0.25, 0.125], [0, 1, 2, 3], 2).expected_tokens == 1.5


def test_a_replys_forecast_is_the_sum_of_its_steps_forecasts() -> None:
    stats, steps = Stats(), [step(0, [1, 0.5], [0, 1], 2), step(1, [1, 0.5, 0.5], [0, 1, 2], 1)]
    for one in steps:
        stats.add(one)
    assert stats.expected == sum(one.expected_tokens for one in steps) == 2.5
    assert stats.expected_tokens_per_pass == pytest.approx(1.25)
    assert stats.tokens_per_pass == pytest.approx(1.5)
    assert stats.expected_speedup == pytest.approx(stats.speedup * 2.5 / 3)


@pytest.mark.parametrize("decoding", ["tree", "linear"])
@pytest.mark.parametrize("stop", ["eos", "special", "length"])
def test_no_tree_of_the_engine_holds_what_its_pass_could_not_emit(decoding: str, stop: str) -> None:
    """What the reply says has stood in the prompt before, so that it would be copied beyond the reply's end."""
    engine, special = tiny_engine(), "<|system|>"
    prompt = [*tokenizer()(PROMPT)["input_ids"], tokenizer().convert_tokens_to_ids(special)]
    said = ids(list(engine.stream(prompt, decoding="plain", max_new_tokens=12, eos_token_id=VOCAB)))
    text, length = (prompt + said) * 3 + prompt[:-1], 10 if stop == "length" else 24
    ends = {"eos": {said[7]}, "special": {prompt[-1]}, "length": set()}[stop]
    arguments = {"eos_token_id": said[7] if stop == "eos" else VOCAB, "stop_strings": [special] if stop == "special" else None}
    drafted = 0
    for one in engine.stream(text, decoding=decoding, budget=24, max_new_tokens=length, **arguments):
        assert ends.isdisjoint(one.tree.token_ids[1:].tolist())
        assert max(one.tree.depths()) < length
        drafted += len(one.tree) - 1
        length -= len(one.token_ids)
    assert drafted
