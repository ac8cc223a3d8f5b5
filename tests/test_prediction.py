"""Law 3 for predictions, and what the target says about the emitted tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from toys import PATHS, VOCAB, tiny_engine

from specdec.request import RequestError
from specdec.step import Step

PROMPT = "the cat sat on the mat. the cat sat"
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 60},
    "sampled": {"max_new_tokens": 60, "do_sample": True, "temperature": 0.9, "top_k": 0, "seed": 3},
}


def tokens(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_law_3_a_prediction_changes_nothing_but_the_passes(asked: dict[str, Any]) -> None:
    engine = tiny_engine()
    plain = list(engine.stream(PROMPT, **asked))
    said = tokens(plain)
    edited = [*said[:20], 7, 8, *said[22:40], *said[45:]]
    random = np.random.default_rng(1).integers(VOCAB, size=100).tolist()
    passes = []
    for prediction in (said, edited, random, said * 200, []):
        steps = list(engine.stream(PROMPT, prediction=prediction, **asked))
        assert tokens(steps) == said
        passes.append(len(steps))
    assert passes[0] <= len(plain) / 8
    assert passes[1] <= len(plain) / 3
    assert passes[4] == len(plain)


def test_a_prediction_is_no_part_of_the_context() -> None:
    engine = tiny_engine()
    chat = engine.conversation()
    list(engine.stream(PROMPT, conversation=chat, prediction="the cat sat on a wall", max_new_tokens=3))
    said = chat.token_ids
    again = engine.conversation()
    list(engine.stream(PROMPT, conversation=again, max_new_tokens=3))
    assert again.token_ids == said
    follow = [*said, 5, 6, 7]
    assert tokens(list(engine.stream(follow, conversation=chat, max_new_tokens=20))) == tokens(
        list(engine.stream(follow, max_new_tokens=20))
    )


@pytest.mark.parametrize("prediction", [5, [0.5], [-1], [VOCAB], [2**70], {"a": 1}])
def test_what_is_no_prediction_is_refused_by_name(prediction: Any) -> None:
    with pytest.raises(RequestError, match="prediction"):
        tiny_engine().request(PROMPT, None, prediction=prediction)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_log_probabilities_are_those_of_a_plain_forward(asked: dict[str, Any], path: str) -> None:
    engine = tiny_engine("llama", path)
    steps = list(engine.stream(PROMPT, logprobs=5, prediction=tokens(list(engine.stream(PROMPT, **asked))), **asked))
    said, prompt = tokens(steps), list(engine.request(PROMPT, None).prompt.token_ids)
    assert max(len(step.token_ids) for step in steps) > 5
    with torch.inference_mode():
        logprobs = engine.model(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    got = [step.logprobs for step in steps if step.logprobs is not None]
    own, best, ids = (np.concatenate([getattr(one, name) for one in got]) for name in ("own", "best", "token_ids"))
    assert own == pytest.approx(logprobs[range(len(said)), said].numpy(), abs=1e-4)
    values, places = logprobs.topk(5)
    assert best == pytest.approx(values.numpy(), abs=1e-4)
    assert (ids == places.numpy()).mean() > 0.99  # near ties may change places


def test_nothing_is_computed_for_who_does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.sequence.logprobs", None)
    assert all(step.logprobs is None for step in tiny_engine().stream(PROMPT, max_new_tokens=10))
