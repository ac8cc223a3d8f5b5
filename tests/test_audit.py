"""The audit: what the target says about a finished reply, on tiny models in float32."""

from __future__ import annotations

from typing import Any

import pytest
from test_static import limit_memory
from toys import ARCHITECTURES, tiny_engine, tiny_model, tokenizer

from specdec.audit import audit
from specdec.engine import SpeculativeEngine
from specdec.errors import MemoryFullError
from specdec.prompt import Prompt

PROMPT = "the cat sat on the mat. the cat sat"
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_p": 0.9, "seed": 3},
    "penalised": {"do_sample": False, "repetition_penalty": 1.4},
}


def reply(engine: SpeculativeEngine, **arguments: Any) -> tuple[Prompt, list[int]]:
    prompt = Prompt(tuple(tokenizer()(PROMPT)["input_ids"]))
    return prompt, [token for step in engine.stream(prompt, max_new_tokens=40, **arguments) for token in step.token_ids]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("decoding", ["plain", "tree"])
def test_every_token_of_a_reply_is_the_targets_own_choice(name: str, decoding: str) -> None:
    engine = tiny_engine("llama")
    prompt, token_ids = reply(engine, decoding=decoding, **SETTINGS[name])
    report = audit(engine, prompt, token_ids, **SETTINGS[name])
    assert (report.own, report.tokens, report.largest_shortfall) == (len(token_ids), len(token_ids), 0.0)
    assert report.first_difference is None
    assert (report.margins >= 0).all()


def test_a_forged_token_is_found_with_its_shortfall() -> None:
    engine = tiny_engine("llama")
    prompt, token_ids = reply(engine, do_sample=False)
    forged = [*token_ids[:7], (token_ids[7] + 1) % engine.target.vocab_size, *token_ids[8:]]
    report = audit(engine, prompt, forged, do_sample=False)
    assert report.first_difference == 7
    assert report.shortfalls[7] >= report.margins[7] > 0
    assert report.largest_shortfall >= report.shortfalls[7]


def test_a_reply_under_another_seed_is_not_the_targets_draw() -> None:
    engine = tiny_engine("llama")
    prompt, token_ids = reply(engine, do_sample=True, temperature=1.2, seed=1)
    assert audit(engine, prompt, token_ids, do_sample=True, temperature=1.2, seed=2).own < len(token_ids)


def test_an_audit_can_be_stopped() -> None:
    engine = tiny_engine("llama")
    prompt, token_ids = reply(engine, do_sample=False)
    assert audit(engine, prompt, token_ids, cancelled=lambda: True, do_sample=False).tokens == 0


def test_an_audit_takes_the_memory_of_idle_conversations_and_says_in_one_line_where_that_is_not_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer())
    room, chat = limit_memory(monkeypatch, 700), engine.conversation()
    prompt, token_ids = reply(engine, do_sample=False, conversation=chat)
    room[0] = 400
    assert audit(engine, prompt, token_ids, do_sample=False).own == len(token_ids)
    assert (chat.token_ids, chat.cache.length) == ([], 0)
    room[0] = 100
    with pytest.raises(MemoryFullError, match="out of memory"):
        audit(engine, prompt, token_ids, do_sample=False)
