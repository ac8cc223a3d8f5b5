"""The HTTP API, asked by OpenAI's own client over loopback: what it says is what the engine says."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import httpx
import openai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serve import idle, until
from toys import ARCHITECTURES, CONTEXT, count_what_is_read, tiny_engine, tiny_model, tokenizer

from specdec.engine import SpeculativeEngine
from specdec.request import Request
from specdec.serving.choice import Choice
from specdec.serving.http import Api
from specdec.serving.line import Line
from specdec.serving.openai import ApiError, ChatQuestion, CompletionQuestion, read
from specdec.serving.server import serving
from specdec.serving.service import Service
from specdec.step import FinishReason, Step

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one, two, one, two"}]
PROMPT = "the cat sat on the mat. the cat sat"
GREEDY = {"temperature": 0, "max_tokens": 40}
WARM = {"temperature": 0.9, "seed": 5, "max_tokens": 40}
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 0, "seed": 5, "max_new_tokens": 40}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    service = Service(SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer()))
    yield service
    service.close()
    service.join(10)


@pytest.fixture(scope="module")
def engine(service: Service) -> SpeculativeEngine:
    service.call(lambda: service.engine.pass_cost)  # measured, by passes that no test is to count
    return service.engine


@pytest.fixture(scope="module")
def line() -> Line:
    return Line(4)


@pytest.fixture(scope="module")
def address(service: Service, line: Line) -> Iterator[str]:
    with serving(Api(service, line).app()) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none is needed", max_retries=0, timeout=60)


@pytest.fixture(autouse=True)
def nothing_stays(service: Service, line: Line) -> Iterator[None]:
    """After every test: no reply runs, and nobody waits."""
    yield
    until(lambda: idle(service) and line.idle)


def chat(client: openai.OpenAI, **arguments: Any) -> Any:
    return client.chat.completions.create(model="LlamaForCausalLM", **{"messages": MESSAGES, **arguments})


def steps(engine: SpeculativeEngine, prompt: Any = MESSAGES, **arguments: Any) -> list[Step]:
    return list(engine.stream(prompt, **arguments))


def text(steps: list[Step]) -> str:
    return "".join(step.text for step in steps)


def tokens(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


def test_a_chat_is_answered_as_by_the_engine_and_its_tokens_are_counted(
    client: openai.OpenAI, engine: SpeculativeEngine
) -> None:
    alone = steps(engine, max_new_tokens=40)
    answer = chat(client, **GREEDY)
    (choice,) = answer.choices
    assert choice.message.content == text(alone)
    assert choice.message.role == "assistant"
    assert choice.finish_reason == {"eos": "stop", "length": "length"}[str(alone[-1].finish_reason)]
    assert answer.object == "chat.completion"
    assert answer.model == "LlamaForCausalLM"
    usage, details = answer.usage, answer.usage.completion_tokens_details
    assert usage.prompt_tokens == len(engine.request(MESSAGES, None).prompt.token_ids)
    assert usage.completion_tokens == len(tokens(alone))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert details.accepted_prediction_tokens < usage.completion_tokens
    assert details.rejected_prediction_tokens >= 0
    again = chat(client, **GREEDY)
    assert again.usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


@pytest.mark.parametrize(
    ("asked", "arguments"),
    [
        ({}, {}),
        ({"top_p": 0.7}, {"top_p": 0.7}),
        ({"extra_body": {"top_k": 5}}, {"top_k": 5}),
        ({"extra_body": {"top_k": -1, "min_p": 0.2}}, {"min_p": 0.2}),
        ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
        ({"frequency_penalty": 1.5}, {"frequency_penalty": 1.5}),
        ({"extra_body": {"repetition_penalty": 1.3}}, {"repetition_penalty": 1.3}),
        ({"seed": -7}, {"seed": -7}),
        ({"temperature": 0}, {"do_sample": False}),
        ({"temperature": openai.omit}, {"temperature": 1.0}),
        ({"max_tokens": 7}, {"max_new_tokens": 7}),
        ({"max_tokens": openai.omit, "max_completion_tokens": 7}, {"max_new_tokens": 7}),
        ({"user": "me", "metadata": {"a": "b"}, "store": False, "logit_bias": {}, "n": None}, {}),
        ({"response_format": {"type": "text"}, "stop": None}, {}),
        (
            {"messages": [{**MESSAGES[0], "role": "developer"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}]},
            {},
        ),
    ],
)
def test_every_parameter_means_what_it_means_to_the_engine(
    client: openai.OpenAI, engine: SpeculativeEngine, asked: dict[str, Any], arguments: dict[str, Any]
) -> None:
    messages = [MESSAGES[0], {"role": "user", "content": "x"}] if "messages" in asked else MESSAGES
    expected = text(steps(engine, messages, **SAMPLED | arguments))
    assert chat(client, **WARM | asked).choices[0].message.content == expected
    stream = chat(client, **WARM | asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected


def test_a_text_is_completed_from_text_and_from_tokens(client: openai.OpenAI, engine: SpeculativeEngine) -> None:
    expected = text(steps(engine, PROMPT, max_new_tokens=40))
    token_ids = list(engine.request(PROMPT, None).prompt.token_ids)
    for prompt in (PROMPT, token_ids):
        answer = client.completions.create(model="", prompt=prompt, **GREEDY)
        assert answer.choices[0].text == expected
        assert answer.object == "text_completion"
    answer = client.completions.create(model="", prompt=[PROMPT, "x"], n=2, **WARM)
    assert [choice.text for choice in answer.choices] == [
        text(steps(engine, prompt, **SAMPLED | {"seed": seed})) for prompt in (PROMPT, "x") for seed in (5, 6)
    ]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    chunks = list(client.completions.create(model="", prompt=PROMPT, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert [chunk.choices[0].finish_reason is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    short = client.completions.create(model="", prompt=PROMPT, temperature=0)
    assert short.usage is not None
    assert short.usage.completion_tokens == 16


def test_a_stream_begins_with_the_role_and_ends_with_the_reason_and_the_usage_where_it_is_wanted(
    client: openai.OpenAI, engine: SpeculativeEngine
) -> None:
    chunks = list(chat(client, **GREEDY, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(tokens(steps(engine, max_new_tokens=40)))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chat(client, **GREEDY, stream=True))


def test_several_texts_of_one_request_have_consecutive_seeds_and_share_passes_and_the_prompt(
    client: openai.OpenAI, engine: SpeculativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, widths, chunks = engine.target.run, list[int](), count_what_is_read(monkeypatch)

    def count(spans: Any) -> Any:
        widths.append(len(spans))
        return run(spans)

    monkeypatch.setattr(engine.target, "run", count)
    messages = [{"role": "user", "content": "a prompt that nobody has sent yet: " + "?" * 30}]
    answer = chat(client, **WARM, n=3, messages=messages)
    assert max(widths) == 3
    assert sum(chunks) == answer.usage.prompt_tokens - 1
    monkeypatch.undo()
    expected = [steps(engine, messages, **SAMPLED | {"seed": seed}) for seed in (5, 6, 7)]
    assert [choice.message.content for choice in answer.choices] == [text(one) for one in expected]
    assert answer.usage.completion_tokens == sum(len(tokens(one)) for one in expected)
    told = ["", "", ""]
    for chunk in chat(client, **WARM, n=3, messages=messages, stream=True):
        told[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert told == [text(one) for one in expected]


def test_without_a_seed_each_answer_is_another(client: openai.OpenAI) -> None:
    assert len({chat(client, temperature=1.5, max_tokens=30).choices[0].message.content for _ in range(3)}) == 3


def test_the_stop_string_is_left_out(client: openai.OpenAI, engine: SpeculativeEngine) -> None:
    whole = text(steps(engine, max_new_tokens=40))
    stop = whole[10:13]
    expected = whole[: whole.index(stop)]
    for asked in (stop, ["not there", stop], [stop[1:] + "but not this", stop]):
        (choice,) = chat(client, **GREEDY, stop=asked).choices
        assert choice.message.content == expected
        assert choice.finish_reason == "stop"
        chunks = list(chat(client, **GREEDY, stop=asked, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


@settings(deadline=None)
@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 4), min_size=12, max_size=12),
)
def test_what_a_reader_is_told_never_holds_a_stop_string_however_the_text_is_cut(
    whole: str, stops: list[str], cuts: list[int]
) -> None:
    ends = [at + len(stop) for stop in stops if (at := whole.find(stop)) >= 0]
    said = whole[: min(ends)] if ends else whole
    cut = max((len(stop) for stop in stops if said.endswith(stop)), default=0) if ends else 0
    request, step = example()
    choice = Choice(tiny_engine(), replace(request, stop_strings=tuple(stops)))
    told, start = "", 0
    while start < len(said):
        piece, start = said[start : start + cuts[0]], start + cuts[0]
        cuts = [*cuts[1:], cuts[0]]
        reason: FinishReason | None = "stop_string" if ends and start >= len(said) else None
        told += choice.add(replace(step, text=piece, finish_reason=reason)).text
        assert said.startswith(told)
        assert len(told) <= len(said) - cut
    told += "" if ends else choice.add(replace(step, text="", finish_reason="length")).text
    assert told == said[: len(said) - cut]


@cache
def example() -> tuple[Request, Step]:
    """A request and a step, to be changed."""
    engine = tiny_engine()
    return engine.request("x", None), steps(engine, "x", max_new_tokens=1)[0]


@pytest.mark.parametrize("asked", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_log_probabilities_are_those_of_the_raw_logits(
    client: openai.OpenAI, engine: SpeculativeEngine, asked: dict[str, Any]
) -> None:
    prompt = list(engine.request(MESSAGES, None).prompt.token_ids)
    said = tokens(steps(engine, **(SAMPLED if asked is WARM else {"max_new_tokens": 40})))
    with torch.inference_mode():
        logprobs = engine.model(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    said = said[:-1] if said[-1] == 0 else said  # the end of the text is not part of it
    answer = chat(client, **asked, logprobs=True, top_logprobs=4)
    content = answer.choices[0].logprobs.content
    assert "".join(one.token for one in content if one.bytes) == "".join(
        name for name in engine.token_texts(said) if "\ufffd" not in name
    )
    assert all(one.bytes is None or bytes(one.bytes).decode() == one.token for one in content)
    assert [one.logprob for one in content] == pytest.approx(
        [row[token].item() for row, token in zip(logprobs[: len(said)], said, strict=True)], abs=1e-4
    )
    for one, row in zip(content, logprobs, strict=False):
        assert [other.logprob for other in one.top_logprobs] == pytest.approx(row.topk(4)[0].tolist(), abs=1e-4)
        assert [other.token for other in one.top_logprobs] == engine.token_texts(row.topk(4)[1].tolist())
    streamed = [
        one
        for chunk in chat(client, **asked, logprobs=True, top_logprobs=4, stream=True)
        if chunk.choices[0].logprobs
        for one in chunk.choices[0].logprobs.content
    ]
    assert streamed == content
    assert chat(client, **asked, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert chat(client, **asked).choices[0].logprobs is None


def test_log_probabilities_of_a_completion_tell_where_each_token_begins_and_end_before_the_stop_string(
    client: openai.OpenAI, engine: SpeculativeEngine
) -> None:
    whole = text(steps(engine, PROMPT, max_new_tokens=40))
    for stop in (None, whole[10:13]):
        (choice,) = client.completions.create(model="", prompt=PROMPT, logprobs=2, stop=stop, **GREEDY).choices
        assert choice.logprobs is not None
        assert choice.logprobs.text_offset is not None
        assert choice.logprobs.tokens is not None
        assert choice.logprobs.top_logprobs is not None
        names, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
        assert offsets == sorted(offsets)
        assert offsets[-1] < len(choice.text)
        whole_ones = [at for at in range(1, len(names)) if not {"\ufffd", "<|user|>"} & {names[at - 1], names[at]}]
        assert whole_ones
        assert all(choice.text[offsets[at] :].startswith(names[at]) for at in whole_ones)
        assert max(map(len, choice.logprobs.top_logprobs)) == 2


@pytest.mark.parametrize("asked", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_a_prediction_spares_passes_and_changes_nothing(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    plain = chat(client, **asked)
    said = plain.choices[0].message.content

    def passes(answer: Any) -> int:
        assert answer.choices[0].message.content == said
        return int(answer.usage.completion_tokens - answer.usage.completion_tokens_details.accepted_prediction_tokens)

    good, wrong = (
        chat(client, **asked, prediction={"type": "content", "content": content}) for content in (said, "nothing like it " * 9)
    )
    parts = [{"type": "text", "text": said[:20]}, {"type": "text", "text": said[20:]}]
    assert passes(good) < 0.8 * passes(plain)  # the model says half characters, whose tokens no text gives back
    assert passes(wrong) <= 1.5 * passes(plain)
    assert passes(chat(client, **asked, prediction={"type": "content", "content": parts})) == passes(good)


def test_clients_at_the_same_time_are_told_what_each_is_told_alone(address: str, engine: SpeculativeEngine) -> None:
    prompts = [PROMPT, "x", "a quite different text", "one, two", "y", "z"]
    expected = [text(steps(engine, prompt, **SAMPLED)) for prompt in prompts]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="-") as client:
            answers = [client.completions.create(model="", prompt=prompt, **WARM) for prompt in prompts]
            return [answer.choices[0].text for answer in await asyncio.gather(*answers)]

    assert asyncio.run(ask()) == expected


CHAT: dict[str, Any] = {"messages": MESSAGES}
BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, "messages", "Field required"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "hello"}, "messages", "list"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'system'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "user", "content": "x", "name": "Ann"}]}, "messages[0].name", "not supported"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content", "only text"),
    ({"messages": [{"role": "user", "content": "x" * 2 * CONTEXT}]}, "messages", "fit the model's context"),
    ({"messages": [{"role": "user", "content": "x" * 50}] * 9}, "messages", "fit the model's context"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "half a character"),
    ({**CHAT, "no_such_thing": 1}, "no_such_thing", "not supported"),
    ({**CHAT, "tools": [{"type": "function"}]}, "tools", "not supported"),
    ({**CHAT, "tool_choice": "auto"}, "tool_choice", "not supported"),
    ({**CHAT, "response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({**CHAT, "logit_bias": {"5": 1}}, "logit_bias", "not supported"),
    ({**CHAT, "store": True}, "store", "not supported"),
    ({**CHAT, "reasoning_effort": "low"}, "reasoning_effort", "not supported"),
    ({**CHAT, "temperature": -1}, "temperature", "greater than or equal to 0"),
    ({**CHAT, "temperature": "hot"}, "temperature", "number"),
    ({**CHAT, "temperature": float("nan")}, "temperature", "finite"),
    ({**CHAT, "top_p": 2}, "top_p", "less than or equal to 1"),
    ({**CHAT, "top_k": 1.5}, "top_k", "integer"),
    ({**CHAT, "min_p": -1}, "min_p", "greater"),
    ({**CHAT, "max_tokens": 0}, "max_tokens", "greater"),
    ({**CHAT, "max_tokens": True}, "max_tokens", "integer"),
    ({**CHAT, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differ"),
    ({**CHAT, "stop": [""]}, "stop[0]", "at least 1 character"),
    ({**CHAT, "stop": 5}, "stop", "list"),
    ({**CHAT, "seed": "x"}, "seed", "integer"),
    ({**CHAT, "seed": 2**70}, "seed", "less than"),
    ({**CHAT, "n": 0}, "n", "greater"),
    ({**CHAT, "n": 1000}, "n", "at most 64"),
    ({**CHAT, "presence_penalty": 3}, "presence_penalty", "less"),
    ({**CHAT, "frequency_penalty": -3}, "frequency_penalty", "greater"),
    ({**CHAT, "repetition_penalty": 0}, "repetition_penalty", "greater"),
    ({**CHAT, "logprobs": 3}, "logprobs", "boolean"),
    ({**CHAT, "top_logprobs": 3}, "top_logprobs", "logprobs=true"),
    ({**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "less"),
    ({**CHAT, "stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({**CHAT, "stream": True, "stream_options": {"extra": 1}}, "stream_options.extra", "not supported"),
    ({**CHAT, "prediction": "a text"}, "prediction", "dictionary"),
    ({**CHAT, "prediction": {"type": "content", "content": 5}}, "prediction.content", "string"),
    ({**CHAT, "prediction": {"type": "content", "content": "\ud800"}}, "prediction.content", "half a character"),
    ({**CHAT, "stop": "\ud800"}, "stop[0]", "unicode"),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD, ids=[f"{param}-{i}" for i, (_, param, _) in enumerate(BAD)])
def test_what_cannot_be_honoured_is_refused_by_name(address: str, body: dict[str, Any], param: str | None, words: str) -> None:
    answer = httpx.post(f"{address}/v1/chat/completions", content=json.dumps(body))
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert words in error["message"]
    assert "\n" not in error["message"]


def test_the_prompt_of_a_completion_is_checked(address: str) -> None:
    for prompt in ("", [], [[]], [0.5], ["x", 5], 7, [10**9], [-1], [True], {"a": 1}):
        answer = httpx.post(f"{address}/v1/completions", json={"prompt": prompt})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt"), prompt
    for field in ({"echo": True}, {"suffix": "x"}, {"best_of": 2}, {"max_completion_tokens": 3}):
        answer = httpx.post(f"{address}/v1/completions", json={"prompt": "x", **field})
        assert answer.json()["error"]["param"] == next(iter(field))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}"])
def test_a_body_that_is_no_request_is_refused(address: str, body: bytes) -> None:
    answer = httpx.post(f"{address}/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


def test_the_client_meets_errors_of_its_own_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, temperature=5)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        chat(client, messages=[{"role": "user", "content": "x" * 50}] * 9)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-5", prompt="x")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.embeddings.create(model="", input="x")
    assert unknown.value.code == "unknown_url"


def test_the_one_model_is_listed(client: openai.OpenAI, address: str) -> None:
    (model,) = client.models.list()
    assert model.id == "LlamaForCausalLM"
    assert client.models.retrieve(model.id) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("owner/another")
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}


def test_the_key_is_asked_for_everywhere_but_for_the_health(service: Service) -> None:
    with serving(Api(service, Line(), api_key="sësame").app()) as address:
        assert httpx.get(f"{address}/health").status_code == 200
        for path in ("/v1/models", "/v1/models/x", "/v1/completions"):
            for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic sesame"}):
                method = "POST" if path.endswith("completions") else "GET"
                answer = httpx.request(method, address + path, headers=header)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        key = {b"authorization": "Bearer sësame".encode()}
        assert httpx.get(f"{address}/v1/models", headers=key).status_code == 200
        answer = httpx.post(f"{address}/v1/completions", headers=key, json={"prompt": "x", "max_tokens": 2})
        assert answer.status_code == 200


def test_a_caller_has_only_so_many_replies_pending_and_others_are_not_held_up(service: Service) -> None:
    line = Line(1)
    held = line.enter("somebody else")
    with serving(Api(service, line, pending=2).app()) as address:
        patient = openai.OpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0)
        answers: list[Any] = []
        waiting = threading.Thread(target=lambda: answers.append(chat(patient, **WARM, n=2)))
        waiting.start()
        until(lambda: line.waiting == 2)
        with pytest.raises(openai.RateLimitError) as refused:
            chat(patient, **GREEDY)
        assert refused.value.code == "rate_limit_exceeded"
        assert refused.value.response.headers["retry-after"] == "1"
        line.leave(held)
        waiting.join(60)
        assert len(answers[0].choices) == 2
        assert chat(patient, **GREEDY).choices
    assert line.idle


def test_without_a_model_and_after_the_end_it_says_so() -> None:
    service = Service()
    with serving(Api(service, Line()).app()) as address:
        for answer in (httpx.get(f"{address}/health"), httpx.post(f"{address}/v1/completions", json={"prompt": "x"})):
            assert answer.status_code == 503
            assert answer.json()["error"]["type"] == "server_error"
        service.use(tiny_engine())
        service.close()
        service.join(10)
        answer = httpx.post(f"{address}/v1/completions", json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")


class Gate:
    """Lets so many passes of a target run as it is told, and no more until it is opened."""

    def __init__(self, engine: SpeculativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allowed = threading.Semaphore(0)
        self.passes = 0
        self.opened = False
        run = engine.target.run

        def gated(spans: Any) -> Any:
            if not self.opened:
                self.allowed.acquire()
            self.passes += 1
            return run(spans)

        monkeypatch.setattr(engine.target, "run", gated)

    def open(self) -> None:
        self.opened = True
        self.allowed.release(1000)


@pytest.mark.parametrize("n", [1, 3])
def test_who_disconnects_ends_the_reply_within_one_round(
    address: str, engine: SpeculativeEngine, line: Line, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    gate = Gate(engine, monkeypatch)
    try:
        body = {"messages": MESSAGES, "stream": True, "n": n, "temperature": 2.0, "seed": 1}
        gate.allowed.release(4)
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=60) as answer:
            next(answer.iter_lines())
        until(lambda: line.idle)
        seen = gate.passes
        gate.allowed.release(1)
        until(lambda: gate.passes > seen or not engine.scheduler.sequences)
    finally:
        gate.open()
    until(lambda: not engine.scheduler.sequences)
    assert gate.passes <= seen + 4


def test_who_disconnects_while_waiting_leaves_the_line(
    address: str, line: Line, client: openai.OpenAI, engine: SpeculativeEngine
) -> None:
    held = [line.enter("somebody else") for _ in range(line.width)]
    for stream in (True, False):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{address}/v1/completions", json={"prompt": "x", "stream": stream}, timeout=0.5)
        until(lambda: line.waiting == 0)
    for place in held:
        line.leave(place)
    assert not engine.scheduler.sequences
    assert chat(client, **GREEDY).choices


def test_who_disconnects_before_the_request_is_complete_is_no_error(service: Service) -> None:
    """Where it were one, the server's log would fill with what a client did."""
    received = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    headers = [(b"host", b"localhost"), (b"content-length", b"100")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}

    async def receive() -> Any:
        return next(received)

    async def send(_: Any) -> None:
        pass

    asyncio.run(Api(service, Line()).app()(scope, receive, send))


def test_an_error_in_a_stream_is_told_in_the_stream_and_one_before_has_a_status(
    client: openai.OpenAI, address: str, engine: SpeculativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec.errors import MemoryFullError
    from specdec.sequence import Sequence

    emit, late = Sequence.emit, True

    def failing(sequence: Sequence, *arguments: Any) -> Any:
        if sequence.passes >= 2 or not late:
            raise MemoryFullError("the memory is full")
        return emit(sequence, *arguments)

    monkeypatch.setattr(Sequence, "emit", failing)
    stream = chat(client, **WARM, stream=True)
    with pytest.raises(openai.APIError, match="the memory is full"):
        list(stream)
    raw = httpx.post(f"{address}/v1/chat/completions", json={**WARM, "messages": MESSAGES, "stream": True}).text
    assert json.loads(raw.split("\n\n")[-2].removeprefix("data: "))["error"]["type"] == "server_error"
    assert "[DONE]" not in raw
    late = False
    with pytest.raises(openai.InternalServerError, match="the memory is full"):
        chat(client, **WARM)
    with pytest.raises(openai.InternalServerError, match="the memory is full"):
        chat(client, **WARM, stream=True)


def test_what_nobody_foresaw_is_told_without_its_insides(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from specdec.sequence import Sequence

    def failing(*_: Any) -> Any:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(Sequence, "emit", failing)
    with pytest.raises(openai.InternalServerError, match="its log tells why"):
        chat(client, **GREEDY)
    assert "a secret" in caplog.text


def test_the_routes_stand_beside_a_page(service: Service) -> None:
    import gradio as gr

    with gr.Blocks() as page:
        gr.Markdown("a page")
    routes = list(Api(service, Line()).router().routes)
    _, address, _ = page.launch(prevent_thread_lock=True, quiet=True, app_kwargs={"routes": routes})
    try:
        assert "gradio" in httpx.get(address).text
        client = openai.OpenAI(base_url=f"{address}v1", api_key="-")
        expected = chat(client, **GREEDY).choices[0].message.content
        stream = chat(client, **GREEDY, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected
    finally:
        page.close(verbose=False)


def test_a_request_is_read_without_a_server() -> None:
    question = read(CompletionQuestion, b'{"prompt": "x", "n": null, "user": "me"}')
    assert question.prompts == ["x"]
    with pytest.raises(ApiError, match="not supported"):
        read(ChatQuestion, json.dumps({**CHAT, "audio": {}}).encode())


@pytest.fixture(scope="module")
def embedded() -> Iterator[openai.OpenAI]:
    """A client of the embedded model in float32."""
    service = Service(SpeculativeEngine(dtype="float32"))
    with serving(Api(service, Line(4)).app()) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="-", timeout=300, max_retries=0)
    service.close()
    service.join(10)


def test_an_edit_of_a_text_comes_back_in_far_fewer_passes(embedded: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Write a short poem about a river."}]
    asked: dict[str, Any] = {"model": "", "messages": messages, "temperature": 0, "max_tokens": 60}
    plain = embedded.chat.completions.create(**asked)
    said = plain.choices[0].message.content
    words = said.split(" ")
    old = " ".join([*words[:12], "ship", *words[13:28], "and so on", *words[28:]])  # the text before the edit
    told = embedded.chat.completions.create(**asked, prediction={"type": "content", "content": old})
    assert told.choices[0].message.content == said
    used = [answer.usage for answer in (plain, told)]
    passes = [use.completion_tokens - use.completion_tokens_details.accepted_prediction_tokens for use in used]
    assert passes[1] <= passes[0] / 3
