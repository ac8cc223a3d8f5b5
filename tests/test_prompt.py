"""Prompts: what is too long, empty or malformed is named; a long chat loses its oldest turns and says so."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from toys import CONTEXT, VOCAB, tiny_engine, tokenizer
from transformers import GenerationConfig

from specdec.prompt import Prompt, PromptError, encode, fair_share
from specdec.request import RequestError


def turns(count: int) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": "be brief"}]
    for i in range(count):
        messages += [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": f"answer {i}"}]
    return [*messages, {"role": "user", "content": "last question"}]


def test_a_chat_that_fits_is_not_trimmed() -> None:
    assert encode(tokenizer(), turns(2), 500).trimmed == 0


def test_a_long_chat_keeps_the_system_prompt_and_the_newest_turns() -> None:
    prompt = encode(tokenizer(), turns(20), 120)
    text = tokenizer().decode(prompt.token_ids)
    assert len(prompt.token_ids) <= 120
    assert prompt.trimmed > 0
    assert prompt.trimmed % 2 == 0, "a question goes together with its answer"
    assert "be brief" in text
    assert text.endswith("last question<|end|><|assistant|>")
    assert "question 0" not in text


def test_a_chat_leaves_its_reply_a_fair_share_of_the_context() -> None:
    messages = turns(20)
    whole = len(tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    assert encode(tokenizer(), messages, whole).trimmed == 0
    assert len(encode(tokenizer(), messages, whole, reserve=30).token_ids) <= whole - 30
    assert [fair_share(tokens, 200) for tokens in (None, 20, 100)] == [50, 20, 50]
    steps = list(tiny_engine().stream(messages, max_new_tokens=40, eos_token_id=VOCAB))
    assert steps[-1].finish_reason == "length", "not the context's end"


def test_a_long_chat_is_tokenised_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    chatty, calls = copy.deepcopy(tokenizer()), 0
    template = chatty.apply_chat_template

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return template(*args, **kwargs)

    monkeypatch.setattr(chatty, "apply_chat_template", counted)
    assert encode(chatty, turns(300), 120).trimmed > 500
    assert calls < 14


@pytest.mark.parametrize(
    "message", [{"role": "user"}, {"content": "hello"}, "hello"], ids=["no content", "no role", "no message at all"]
)
def test_a_malformed_message_is_named(message: Any) -> None:
    with pytest.raises(PromptError, match=r"needs.*content"):
        encode(tokenizer(), [{"role": "user", "content": "hi"}, message], 100)


def test_what_a_chat_template_refuses_is_named() -> None:
    strict = copy.deepcopy(tokenizer())
    strict.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(PromptError, match="System role not supported"):
        encode(strict, turns(1), 100)
    strict.chat_template = "{{ messages[0]['content'] + 'x' }}"
    with pytest.raises(PromptError, match="refuses these messages"):
        encode(strict, [{"role": "user", "content": None}], 100)  # type: ignore[dict-item]


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_id_outside_the_vocabulary_is_named(token: int) -> None:
    with pytest.raises(PromptError, match="outside the model's vocabulary"):
        tiny_engine().stream([5, token, 6])


def test_one_message_longer_than_the_context_is_named() -> None:
    with pytest.raises(PromptError, match="shorten"):
        tiny_engine().stream([{"role": "user", "content": "x" * CONTEXT}])


@pytest.mark.parametrize(
    "prompt",
    [None, 5, ["a", "b"], [[5, 6]], [5.0], {"role": "user", "content": "hi"}, np.array([[5, 6], [7, 8]]), torch.ones(2, 2)],
    ids=["None", "number", "texts", "nested", "floats", "message", "array", "tensor"],
)
def test_what_is_no_prompt_is_named(prompt: Any) -> None:
    with pytest.raises(PromptError, match="no prompt: pass a text") as caught:
        tiny_engine().stream(prompt)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("prompt", [np.array([5, 6, 7]), torch.tensor([5, 6, 7]), range(5, 8), (5, 6, 7)])
def test_token_ids_may_come_in_any_sequence(prompt: Any) -> None:
    assert encode(tokenizer(), prompt, 10) == Prompt((5, 6, 7))


@pytest.mark.parametrize("prompt", ["a\ud800", [{"role": "user", "content": "a\ud800"}]], ids=["text", "chat"])
def test_half_a_character_is_named(prompt: Any) -> None:
    with pytest.raises(PromptError, match=r"half a character \('\\ud800'"):
        encode(tokenizer(), prompt, 100)


@pytest.mark.parametrize("prompt", ["", [], Prompt(())])
def test_an_empty_prompt_is_named(prompt: Any) -> None:
    with pytest.raises(PromptError, match="empty"):
        tiny_engine().stream(prompt)


def test_a_model_without_a_chat_template_is_named() -> None:
    bare = copy.deepcopy(tokenizer())
    bare.chat_template = None
    with pytest.raises(PromptError, match="no chat template"):
        encode(bare, [{"role": "user", "content": "hi"}], 100)


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        ({"decoding": "beam"}, "decoding='beam'"),
        ({"budget": -1}, "budget=-1"),
        ({"budget": "big"}, "budget='big'"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"seed": True}, "seed=True"),
        ({"decoding": None}, "decoding=None"),
        ({"cancelled": True}, "cancelled=True"),
        ({"presence_penalty": float("nan")}, "presence_penalty=nan"),
        ({"logits_processor": 5}, "logits_processor=5"),
        ({"stopping_criteria": [5]}, r"stopping_criteria=\[5\]"),
        ({"generation_config": {}}, "generation_config={}.*GenerationConfig"),
        ({"generation_config": GenerationConfig(max_new_tokens=1.5)}, "max_new_tokens=1.5"),
        ({"max_new_tokens": 1.5}, "max_new_tokens=1.5"),
        ({"max_new_tokens": "7"}, "max_new_tokens='7'"),
        ({"max_new_tokens": True}, "max_new_tokens=True"),
        ({"temperature": "x"}, "temperature='x'"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": "x"}, "top_p='x'"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"top_k": "x"}, "top_k='x'"),
        ({"do_sample": "yes"}, "do_sample='yes'"),
        ({"stop_strings": 5}, "stop_strings=5"),
        ({"stop_strings": [5]}, r"stop_strings=\[5\]"),
        ({"eos_token_id": "x"}, "eos_token_id='x'"),
        ({"watermarking_config": 5}, "int"),
        ({"conversation": 5}, "conversation"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temprature": 0.5}, "temprature"),
        ({"num_beams": 4}, "num_beams=4"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6"),
        ({"force_words_ids": [[5]]}, "force_words_ids"),
        ({"token_healing": True}, "token_healing"),
        ({"do_sample": True, "temperature": -1.0}, "temperature"),
        ({"do_sample": True, "top_p": 7.0}, "top_p"),
    ],
)
def test_a_bad_argument_is_named_before_anything_runs(arguments: dict[str, Any], culprit: str) -> None:
    with pytest.raises(RequestError, match=culprit) as caught:
        tiny_engine().stream("hello", **arguments)
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_and_none_where_generate_takes_it_are_as_good_as_pythons() -> None:
    engine = tiny_engine()
    plain = engine.generate("hello", max_new_tokens=5, do_sample=True, temperature=0.7, seed=3, budget=4)
    arguments: dict[str, Any] = {"max_new_tokens": np.int64(5), "temperature": np.float64(0.7), "seed": np.int64(3)}
    arguments |= {"budget": np.int64(4), "stop_strings": None, "top_p": None, "presence_penalty": None}
    assert engine.generate("hello", do_sample=True, **arguments) == plain
