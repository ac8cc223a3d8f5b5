"""Prompts: what is too long, empty or malformed is named; a long chat loses its oldest turns and says so."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from toys import ARCHITECTURES, CONTEXT, EOS, TEMPLATE, VOCAB, tiny_engine, tiny_model, tokenizer
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerFast

from specdec.engine import SpeculativeEngine
from specdec.prompt import Prompt, PromptError, encode, fair_share
from specdec.request import NEUTRAL, RequestError, acting_settings, ignored_settings
from specdec.study import chat_frame


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
    encode(chatty, turns(1), 500)  # tries the template, once
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


# --- what templates take, each tried on the template itself --------------------------------------------------------------

LOOP = TEMPLATE.replace("{{ m['content'] }}", "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}")
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + TEMPLATE
DROPS_SYSTEM = TEMPLATE.replace("<|{{", "{% if m['role'] != 'system' %}<|{{").replace("<|end|>", "<|end|>{% endif %}")
ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + TEMPLATE
)


def templated(template: Any) -> PreTrainedTokenizerFast:
    own = copy.deepcopy(tokenizer())
    own.chat_template = template
    return own


def rendered(template: str, *turns: tuple[str, Any]) -> str:
    own = templated(template)
    prompt = encode(own, [{"role": role, "content": content} for role, content in turns], 1000)
    return str(own.decode(prompt.token_ids))


def test_a_template_that_loops_over_parts_is_given_parts() -> None:
    assert rendered(LOOP, ("system", "be brief"), ("user", "hi")) == "<|system|>be brief<|end|><|user|>hi<|end|><|assistant|>"


def test_a_list_of_text_parts_is_joined_where_a_template_takes_texts() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    for template in (TEMPLATE, LOOP):
        assert rendered(template, ("user", parts)) == "<|user|>one two<|end|><|assistant|>"


@pytest.mark.parametrize("part", [{"type": "image", "url": "x"}, {"type": "text"}, "text"])
def test_a_part_that_is_no_text_is_named(part: Any) -> None:
    with pytest.raises(PromptError, match=r"part of type .* cannot be read"):
        rendered(TEMPLATE, ("user", [part]))


def test_a_template_that_leaves_out_what_the_user_said_is_refused() -> None:
    with pytest.raises(PromptError, match=r"leaves out what the user said \(hello\)"):
        rendered("{{ messages[0]['role'] }}", ("user", "hello"))
    with pytest.raises(PromptError, match=r"leaves out what the user said \(first\)"):
        rendered("{{ messages[-1]['content'] }}", ("user", "first"), ("assistant", "a"), ("user", "second"))


@pytest.mark.parametrize("template", [NO_SYSTEM, DROPS_SYSTEM], ids=["refuses", "drops"])
def test_a_system_prompt_goes_in_front_of_the_first_question_where_a_template_has_no_system_role(template: str) -> None:
    prompt = rendered(template, ("system", "be brief"), ("user", "hi"), ("assistant", "a"), ("user", "b"))
    assert prompt == "<|user|>be brief\n\nhi<|end|><|assistant|>a<|end|><|user|>b<|end|><|assistant|>"


def test_neighbours_of_one_role_become_one_message_where_a_template_demands_that_roles_alternate() -> None:
    turns = [("system", "be brief"), ("user", "a"), ("user", "b"), ("assistant", "c"), ("user", "d")]
    assert (
        rendered(ALTERNATING, *turns) == "<|user|>be brief\n\na\n\nb<|end|><|assistant|>c<|end|><|user|>d<|end|><|assistant|>"
    )
    assert "<|user|>a<|end|><|user|>b<|end|>" in rendered(TEMPLATE, *turns), "left as they are where the template takes them"


def test_a_trimmed_chat_is_brought_into_the_templates_form_too() -> None:
    own = templated(ALTERNATING)
    prompt = encode(own, turns(20), 120)
    assert prompt.trimmed > 0
    assert own.decode(prompt.token_ids).startswith("<|user|>be brief\n\nquestion")


def test_several_named_templates_without_a_default_are_named() -> None:
    with pytest.raises(PromptError, match=r"several chat templates \(rag, tool_use\) and no default"):
        encode(templated({"rag": TEMPLATE, "tool_use": TEMPLATE}), turns(1), 100)
    named = templated({"default": TEMPLATE, "tool_use": "{{ 1 }}"})
    assert encode(named, turns(1), 500).token_ids == encode(tokenizer(), turns(1), 500).token_ids


def test_a_template_that_is_studied_is_given_what_it_takes() -> None:
    frame = chat_frame(tokenizer())
    assert frame is not None
    assert chat_frame(templated(LOOP)) == chat_frame(templated(ALTERNATING)) == frame
    for unusable in (None, {"rag": TEMPLATE, "tool_use": TEMPLATE}, "{{ raise_exception('no') }}"):
        assert chat_frame(templated(unusable)) is None


def test_another_template_set_later_is_tried_anew() -> None:
    own = templated(TEMPLATE)
    encode(own, turns(1), 500)
    own.chat_template = LOOP
    assert "last question" in own.decode(encode(own, turns(1), 500).token_ids)


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_what_is_spelled_like_a_special_token_stays_text(role: str) -> None:
    spelled = tokenizer().encode("<|end|>", split_special_tokens=True)
    other = [{"role": "user", "content": "hi"}] if role != "user" else []
    token_ids = encode(tokenizer(), [{"role": role, "content": "What does <|end|> do?"}, *other], 500).token_ids
    assert token_ids.count(EOS) == 1 + len(other), "only what the template writes ends a turn"
    assert str(tuple(spelled))[1:-1] in str(token_ids)
    assert "What does <|end|> do?" in tokenizer().decode(token_ids)


def test_a_prompt_tells_that_its_template_opened_the_reasoning() -> None:
    thinking = templated(TEMPLATE.replace("<|assistant|>", "<|assistant|><think>\n"))
    assert encode(thinking, turns(1), 500).opened == "<think>\n"
    assert encode(tokenizer(), turns(1), 500).opened == ""
    closed = templated(TEMPLATE.replace("<|assistant|>", "<|assistant|><think>\n\n</think>\n\n"))
    assert encode(closed, turns(1), 500).opened == ""


# --- where a turn ends ---------------------------------------------------------------------------------------------------


def says(engine: SpeculativeEngine, *token_ids: int) -> LogitsProcessorList:
    """Make the model say ``token_ids`` after the prompt, whatever it is, then the same again."""

    def forced(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        at = (input_ids.shape[1] - length) % len(token_ids)
        return scores.index_fill(1, torch.tensor([token_ids[at]]), 1e9)

    length = len(encode(engine.tokenizer, QUESTION, 500).token_ids)
    return LogitsProcessorList([forced])


QUESTION = [{"role": "user", "content": "hi"}]


def test_a_chat_ends_at_the_end_of_turn_that_its_template_writes_and_at_the_tokenizers_end_token() -> None:
    model = tiny_model(ARCHITECTURES["llama"])
    model.generation_config.eos_token_id = VOCAB - 1
    own = templated(TEMPLATE.replace("<|end|>", "<|system|>"))  # which is not its end token
    turn_end, end = 1, EOS
    engine = SpeculativeEngine(model, own)
    for last in (turn_end, end, VOCAB - 1):
        steps = list(engine.stream(QUESTION, max_new_tokens=20, logits_processor=says(engine, 9, 10, last)))
        assert [token for step in steps for token in step.token_ids] == [9, 10, last]
        assert steps[-1].finish_reason == "eos"
    assert len(engine.generate(QUESTION, max_new_tokens=20, logits_processor=says(engine, 9), eos_token_id=VOCAB)) == 20
    plain = engine.stream("hi", max_new_tokens=6, logits_processor=says(engine, end))
    assert sum(len(step.token_ids) for step in plain) == 6, "a text is no chat"


def test_min_new_tokens_holds_for_every_end_of_a_turn() -> None:
    model = tiny_model(ARCHITECTURES["llama"])
    model.generation_config.eos_token_id = VOCAB - 1
    engine = SpeculativeEngine(model, tokenizer())
    forced = {"sequence_bias": {(EOS,): 100.0}, "max_new_tokens": 20}
    assert sum(len(step.token_ids) for step in engine.stream(QUESTION, **forced)) == 1
    assert sum(len(step.token_ids) for step in engine.stream(QUESTION, min_new_tokens=7, **forced)) == 8


def test_what_ends_one_of_several_messages_of_a_reply_does_not_end_the_reply() -> None:
    channels = (
        "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}final:{% endif %}{{ m['content'] }}"
        "<|system|>{% endfor %}<|assistant|>"
    )
    assert encode(templated(channels), QUESTION, 500).ends == {EOS}
    assert encode(templated(channels.replace("final:", "")), QUESTION, 500).ends == {EOS, 1}


# --- what the model's generation config asks for -----------------------------------------------------------------------


def configured(**settings: Any) -> SpeculativeEngine:
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer())
    for name, value in settings.items():
        setattr(engine.model.generation_config, name, value)
    return engine


UNSUPPORTED = [
    {"num_beams": 4},
    {"num_beams": 4, "num_return_sequences": 2},
    {"num_return_sequences": 3},
    {"guidance_scale": 1.5},
    {"penalty_alpha": 0.6},
    {"dola_layers": "high"},
]


@pytest.mark.parametrize("settings", UNSUPPORTED, ids=lambda settings: "-".join(settings))
def test_an_unsupported_setting_of_the_model_is_left_out_with_one_notice(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    plain, engine = tiny_engine(), configured(**settings)
    engine.model.name_or_path = f"a model with {' and '.join(settings)}"
    for _ in range(2):
        assert engine.generate(QUESTION, max_new_tokens=8) == plain.generate(QUESTION, max_new_tokens=8)
    assert [all(name in record.getMessage() for name in settings) for record in caplog.records] == [True]
    assert ignored_settings(engine.model) == settings
    assert engine.model.generation_config.to_dict().items() >= settings.items(), "the model itself is left alone"
    for name, value in settings.items():
        with pytest.raises(RequestError, match=f"{name}={value}"):
            engine.stream(QUESTION, **{name: value})
        given = GenerationConfig()
        setattr(given, name, value)
        with pytest.raises(RequestError, match=name):
            engine.stream(QUESTION, generation_config=given)


def test_the_settings_of_the_model_that_act_are_told_and_can_be_overridden() -> None:
    engine = configured(min_p=0.1, no_repeat_ngram_size=2, repetition_penalty=1.2, temperature=0.6, do_sample=True)
    acting = acting_settings(engine.model)
    assert acting.keys() == {"min_p", "no_repeat_ngram_size", "repetition_penalty", "temperature", "do_sample", "top_k"}
    assert acting_settings(engine.model, do_sample=False).keys() == {"no_repeat_ngram_size", "repetition_penalty"}
    page = {"do_sample": True, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "budget": 8, "seed": 3}
    assert acting_settings(engine.model, **page) == {"min_p": 0.1, "no_repeat_ngram_size": 2}
    overridden = page | {name: NEUTRAL[name] for name in acting_settings(engine.model, **page)}
    assert acting_settings(engine.model, **overridden) == {}
    assert engine.generate(QUESTION, max_new_tokens=20, **overridden) == tiny_engine().generate(
        QUESTION, max_new_tokens=20, **page
    )


def test_every_neutral_value_changes_nothing() -> None:
    engine = tiny_engine()
    plain = engine.generate(QUESTION, max_new_tokens=20)
    assert engine.generate(QUESTION, max_new_tokens=20, **NEUTRAL) == plain
    sampled = {"do_sample": True, "seed": 5, "max_new_tokens": 20}
    assert engine.generate(QUESTION, **NEUTRAL | sampled) == engine.generate(QUESTION, **sampled, top_k=0)


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-40])
def test_temperature_0_is_greedy(temperature: float) -> None:
    greedy = tiny_engine().generate(QUESTION, max_new_tokens=20)
    assert tiny_engine().generate(QUESTION, max_new_tokens=20, do_sample=True, temperature=temperature) == greedy
    assert configured(do_sample=True).generate(QUESTION, max_new_tokens=20, temperature=temperature) == greedy


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
        ({"temperature": float("inf"), "suppress_tokens": [5], "do_sample": True}, "temperature=inf.*finite"),
        ({"top_p": "x"}, "top_p='x'"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"top_k": "x"}, "top_k='x'"),
        ({"do_sample": "yes"}, "do_sample='yes'"),
        ({"stop_strings": 5}, "stop_strings=5"),
        ({"stop_strings": [5]}, r"stop_strings=\[5\]"),
        ({"eos_token_id": "x"}, "eos_token_id='x'"),
        ({"streamer": print}, "streamer=.*a streamer of transformers"),
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
