"""The chat behind the page, on a tiny model in float32: its laws, without a browser."""

from __future__ import annotations

import copy
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import gradio as gr
import numpy as np
import pytest
import torch
from browser import served
from gradio_client import Client
from gradio_client.exceptions import AppError
from toys import ARCHITECTURES, TEMPLATE, count_what_is_read, replay_passes, tiny_engine, tiny_model, tokenizer

from specdec.audit import Audit
from specdec.cost import PassCost
from specdec.engine import SpeculativeEngine
from specdec.request import Decoding
from specdec.serving.service import Service
from specdec.step import Step
from ui.audit import describe, why_differing
from ui.compare import LANES, Lane
from ui.handlers import SKIP, ChatHandlers, Frame, show
from ui.markdown import safe_markdown
from ui.page import build
from ui.settings import Settings
from ui.state import MAX_MESSAGES, MAX_WARM, Chat, Message, Tabs, read_messages
from ui.stop import Clock
from ui.stream import Producer, ReplyStreams
from ui.trace import Recorder

VALUES = ("tree", "auto", 0, 1, 0, 60, "", True)
"""The setting fields as the page sends them: decoding, budget, temperature, top-p, seed, max tokens, system prompt, own."""
QUESTION, SECOND = "the cat sat on the mat", "and then the dog"


@pytest.fixture
def handlers() -> ChatHandlers:
    return ChatHandlers(Service(tiny_engine()))


@pytest.fixture
def slow() -> ChatHandlers:
    """Over an engine whose every pass takes a while; `passes` counts them."""
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer())
    handlers = ChatHandlers(Service(engine))
    run = engine.target.run

    def slowly(spans: Any) -> Any:
        time.sleep(0.02)
        handlers.passes += 1  # type: ignore[attr-defined]
        return run(spans)

    handlers.passes = 0  # type: ignore[attr-defined]
    engine.target.run = slowly  # type: ignore[method-assign]
    return handlers


def tab(name: str = "tab") -> gr.Request:
    return gr.Request(session_hash=name)


def send(handlers: ChatHandlers, text: str, name: str = "tab", values: tuple[Any, ...] = VALUES) -> list[Frame]:
    return list(handlers.send(text, tab(name), *values))


def expected(*turns: str, values: tuple[Any, ...] = VALUES) -> list[str]:
    """The replies to ``turns`` as a fresh engine gives them, each from the whole conversation."""
    messages: list[dict[str, str]] = []
    replies = []
    for text in turns:
        messages.append({"role": "user", "content": text})
        replies.append(tiny_engine().generate(messages, **Settings.read(*values).arguments()))
        messages.append({"role": "assistant", "content": replies[-1]})
    return replies


def texts(chat: Chat) -> list[str]:
    return [message.text for message in chat.messages]


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def test_a_reply_is_the_engines_and_its_footer_the_stats(handlers: ChatHandlers) -> None:
    frames = send(handlers, QUESTION)
    chat = handlers.tabs.chat("tab")
    assert texts(chat) == [QUESTION, *expected(QUESTION)]
    assert chat.messages[1].state == "done"
    assert "tok/s" in chat.messages[1].footer
    assert "plain" in chat.messages[1].footer
    assert frames[-1][0][1]["content"][0]["text"] == safe_markdown(chat.messages[1].text)


def test_a_reply_that_begins_within_the_reasoning_is_what_the_engine_says_behind_the_tag() -> None:
    own = copy.deepcopy(tokenizer())
    own.chat_template = TEMPLATE.replace("<|assistant|>", "<|assistant|><think>\n")
    handlers = ChatHandlers(Service(SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), own)))
    frames = send(handlers, QUESTION)
    reasoning, *_ = frames[-1][0][1:]
    assert reasoning["metadata"]["title"] == "Reasoning"
    reply = handlers.tabs.chat("tab").messages[1].text
    assert reply.startswith("<think>\n")
    assert reply.count("<think>") == 1
    assert safe_markdown(reply.removeprefix("<think>\n").strip()) == reasoning["content"]
    messages = [{"role": "user", "content": QUESTION}]
    assert reply.removeprefix("<think>\n") == handlers.engine.generate(messages, **Settings.read(*VALUES).arguments())


def test_the_second_turn_reads_only_what_is_new(handlers: ChatHandlers, monkeypatch: pytest.MonkeyPatch) -> None:
    send(handlers, QUESTION)
    chat = handlers.tabs.chat("tab")
    assert chat.finished is not None
    known = len(chat.finished.prompt.token_ids)
    read = count_what_is_read(monkeypatch)
    send(handlers, SECOND)
    assert chat.finished is not None
    assert 0 < sum(read) < len(chat.finished.prompt.token_ids) - known, "a random reply may read back as other tokens"
    assert texts(chat)[3] == expected(QUESTION, SECOND)[1]


@pytest.mark.parametrize(
    ("values", "seen"),
    [
        ((-1, 0, 3, 0), (0.0, 0.01, 3, 1)),
        ((1e-300, -1, -7, -5), (0.0, 0.01, -7, 1)),
        ((5, 2, 2.0, 10**6), (5.0, 1.0, 2, 4096)),
        ((None, None, 10**30, None), (0.0, 1.0, 2**63 - 1, 512)),
    ],
)
def test_numbers_out_of_range_are_brought_into_it_and_an_empty_field_is_as_by_default(
    values: tuple[Any, ...], seen: tuple[float, ...]
) -> None:
    settings = Settings.read("tree", "auto", *values, "")
    assert (settings.temperature, settings.top_p, settings.seed, settings.max_tokens) == seen


SAMPLED = ("tree", "auto", 1.0, 1, None, 24, "", True)


def test_a_retry_draws_a_new_seed_and_shows_it_unless_the_user_set_one(handlers: ChatHandlers) -> None:
    send(handlers, QUESTION, values=SAMPLED)
    chat = handlers.tabs.chat("tab")
    first = chat.messages[1]
    list(handlers.retry(tab(), *SAMPLED))
    second = chat.messages[1]
    assert first.text != second.text, "two seeds of 2**31 are the same once in as many runs"
    (seed,) = re.findall(r"seed (\d+)", second.footer)
    list(handlers.retry(tab(), *SAMPLED[:4], float(seed), *SAMPLED[5:]))
    assert chat.messages[1].text == second.text


def test_what_the_models_own_settings_do_is_shown_and_can_be_turned_off() -> None:
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer())
    plain = engine.generate([{"role": "user", "content": QUESTION}], **Settings.read(*VALUES).arguments())
    first = next(engine.stream([{"role": "user", "content": QUESTION}], do_sample=False)).token_ids[0]
    engine.model.generation_config.suppress_tokens = [first]
    engine.model.generation_config.min_p = 0.1
    handlers = ChatHandlers(Service(engine))
    assert sorted(handlers.own_settings.split(", ")) == ["min_p 0.1", f"suppress_tokens [{first}]"]
    send(handlers, QUESTION)
    assert handlers.tabs.chat("tab").messages[1].text != plain
    list(handlers.retry(tab(), *VALUES[:-1], False))
    assert handlers.tabs.chat("tab").messages[1].text == plain
    send(handlers, QUESTION, "other", (*VALUES[:2], 1.0, *VALUES[3:-1], False))
    assert handlers.tabs.chat("other").messages[1].state == "done"


@pytest.mark.parametrize(("opening", "closing"), [("<think>\n", "</think>"), ("[THINK]", "[/THINK]")])
def test_reasoning_that_the_template_opens_is_folded(opening: str, closing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = copy.deepcopy(tokenizer())
    opened.chat_template = TEMPLATE.replace("<|assistant|>", f"<|assistant|>{opening}")
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), opened)
    handlers = ChatHandlers(Service(engine))
    steps = handlers.replies.decoder.steps

    def thinking(*arguments: Any) -> Iterator[Step]:
        for step, text in zip(steps(*arguments), ["hm", closing, "\n\nyes", ""], strict=False):
            yield replace(step, text=text)

    monkeypatch.setattr(handlers.replies.decoder, "steps", thinking)
    frames = send(handlers, QUESTION)
    thought, answer = frames[-1][0][1:]
    assert (thought["metadata"], thought["content"]) == ({"title": "Reasoning", "status": "done"}, "hm")
    assert answer["content"][0]["text"] == "yes"
    assert handlers.tabs.chat("tab").messages[1].text == f"{opening}hm{closing}\n\nyes"


@pytest.mark.parametrize("field", ["temperature", "top_p", "seed", "max_tokens"])
@pytest.mark.parametrize("value", ["hot", float("nan"), [1]])
def test_what_is_no_number_is_refused_by_name(handlers: ChatHandlers, field: str, value: Any) -> None:
    with pytest.raises(gr.Error, match=f"{field} must be a number"):
        list(handlers.api("a question", tab(), **{field: value}))


@pytest.mark.parametrize("message", ["", " \n", None, 5])
def test_no_message_is_refused_and_an_edit_to_nothing_changes_nothing(handlers: ChatHandlers, message: Any) -> None:
    with pytest.raises(gr.Error, match="message must be a text"):
        list(handlers.api(message, tab()))
    send(handlers, QUESTION)
    before = texts(handlers.tabs.chat("tab"))
    list(handlers.edit(gr.EditData(None, {"index": 0, "value": "  ", "previous_value": QUESTION}), tab(), *VALUES))
    assert texts(handlers.tabs.chat("tab")) == before


def test_half_a_surrogate_pair_in_a_message_does_not_break_its_chat(handlers: ChatHandlers) -> None:
    frames = send(handlers, "a\ud800b")
    assert texts(handlers.tabs.chat("tab"))[0] == "a?b"
    json.dumps([frame[0] for frame in frames], ensure_ascii=False).encode("utf-8")


def test_edit_and_retry_begin_again_from_their_question(handlers: ChatHandlers) -> None:
    send(handlers, QUESTION)
    send(handlers, "this will be edited")
    data = gr.EditData(None, {"index": 2, "previous_value": "this will be edited", "value": [{"type": "text", "text": SECOND}]})
    list(handlers.edit(data, tab(), *VALUES))
    first, second = expected(QUESTION, SECOND)
    assert texts(handlers.tabs.chat("tab")) == [QUESTION, first, SECOND, second]
    list(handlers.retry(tab(), *VALUES))
    assert texts(handlers.tabs.chat("tab")) == [QUESTION, first, SECOND, second]


def test_undo_gives_the_question_back_to_the_box(handlers: ChatHandlers) -> None:
    send(handlers, QUESTION)
    _, box, *_ = handlers.undo(tab())
    assert box["value"] == QUESTION
    assert handlers.tabs.chat("tab").messages == []


def test_tabs_do_not_mix(handlers: ChatHandlers) -> None:
    names = ["a", "b", "c"]
    threads = [threading.Thread(target=send, args=(handlers, f"{QUESTION} {name}", name)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in names:
        question = f"{QUESTION} {name}"
        assert texts(handlers.tabs.chat(name)) == [question, *expected(question)]


def test_stop_ends_the_engine_within_a_step_and_keeps_the_partial_reply(slow: ChatHandlers) -> None:
    frames = slow.send(QUESTION, tab(), *VALUES)
    reply = next_text(slow, frames)
    slow.stop(tab())
    passes = slow.passes  # type: ignore[attr-defined]
    rest = list(frames)
    assert slow.passes <= passes + 2  # type: ignore[attr-defined]
    assert (reply.state, bool(reply.text)) == ("stopped", True)
    assert expected(QUESTION)[0].startswith(reply.text.rstrip("\N{REPLACEMENT CHARACTER}"))
    assert "stopped" in rest[-1][0][1]["content"][1]["text"]
    send(slow, SECOND)
    assert slow.tabs.chat("tab").messages[3].state == "done"


def test_a_page_that_goes_away_frees_the_engine_and_its_reply_can_be_found_again(slow: ChatHandlers) -> None:
    frames = slow.send(QUESTION, tab(), *VALUES)
    reply = next_text(slow, frames)
    chat = slow.tabs.chat("tab")
    frames.close()
    slow.leave(tab())
    wait_for(lambda: slow.replies.line.idle)
    passes = slow.passes  # type: ignore[attr-defined]
    time.sleep(0.1)
    assert slow.passes == passes  # type: ignore[attr-defined]
    assert chat.conversation is None
    assert (reply.state, bool(reply.text)) == ("stopped", True)
    slow.open(gr.EventData(None, {"id": chat.id, "messages": []}), tab("reloaded"))
    assert texts(slow.tabs.chat("reloaded")) == [QUESTION, reply.text]


def test_another_reply_is_waited_for_visibly_and_can_be_given_up(slow: ChatHandlers) -> None:
    first = slow.send(QUESTION, tab("a"), *VALUES)
    next_text(slow, first, "a")
    second = slow.send(QUESTION, tab("b"), *VALUES)
    footer = ""
    while not footer:
        next(second)
        footer = slow.tabs.chat("b").messages[1].footer
    assert footer == "waiting: 1 reply is ahead of this one"
    slow.stop(tab("b"))
    list(second)
    assert slow.tabs.chat("b").messages[1].state == "stopped"
    list(first)
    assert texts(slow.tabs.chat("a")) == [QUESTION, *expected(QUESTION)]


def test_what_is_captured_during_a_reply_or_a_comparison_is_told_while_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer(), static=True)
    monkeypatch.setattr(engine.target, "measure_cost", lambda: PassCost({1: 0.01, 64: 0.01}))
    handlers = ChatHandlers(Service(engine))
    static = replay_passes(engine.target)
    recorded = static._captured

    def slowly(*shape: int) -> Any:
        time.sleep(0.5)  # longer than the page's interval
        return recorded(*shape)

    monkeypatch.setattr(static, "_captured", slowly)
    told = set()
    for _ in handlers.send(QUESTION, tab(), *VALUES):
        told.add(handlers.tabs.chat("tab").messages[1].footer)
    assert any(footer.startswith("capturing the target pass of width ") for footer in told)
    static.drop_graphs()
    race = handlers.comparisons.run("tab", QUESTION, ["plain", "tree"], Settings.read(*VALUES))
    statuses = [json.loads(payload).get("status", "") for payload in race]
    assert any(status.startswith("Capturing the target pass of width 1 over") for status in statuses)
    assert not handlers.replies.service._told


def test_a_new_chat_takes_nothing_over_from_a_reply_that_is_still_written(slow: ChatHandlers) -> None:
    frames = slow.send(QUESTION, tab(), *VALUES)
    next_text(slow, frames)
    shown, *_ = slow.clear(tab())
    assert shown == []
    assert list(frames) == []
    assert slow.tabs.chat("tab").messages == []


@pytest.mark.parametrize("how", ["clear", "open"])
def test_a_chat_that_is_left_takes_its_partial_reply_to_the_saved_chats(slow: ChatHandlers, how: str) -> None:
    frames = slow.send(QUESTION, tab(), *VALUES)
    reply = next_text(slow, frames)
    left = slow.tabs.chat("tab")
    *_, saved = slow.clear(tab()) if how == "clear" else slow.open(gr.EventData(None, {"id": "x", "messages": []}), tab())
    told = json.loads(saved)
    assert told["left"]["id"] == left.id != told["current"]
    assert told["left"]["messages"][1]["text"] == reply.text != ""
    assert read_messages(told["left"]["messages"])[1].state == "stopped"
    list(frames)


def test_an_undone_reply_is_gone_for_good(slow: ChatHandlers) -> None:
    frames = slow.send(QUESTION, tab(), *VALUES)
    next_text(slow, frames)
    _, box, panel, *_ = slow.undo(tab())
    assert (box["submit_btn"], panel) == (True, "")
    assert list(frames) == []
    assert slow.tabs.chat("tab").finished is None, "an audit would check what nobody sees"


def test_send_or_stop_is_told_by_the_reply_that_is_there(slow: ChatHandlers) -> None:
    streams, told = ReplyStreams(), slow.settle
    streams.begin(slow.send)(QUESTION, tab(), *VALUES[:5], 4, "")
    list(streams.stream(tab()))
    streams.begin(slow.send)(SECOND, tab(), *VALUES)
    assert told(tab())[1]["stop_btn"], "the first reply is settled when the second one has begun"
    frames = streams.stream(tab())
    next(frames)
    frames.close()  # type: ignore[attr-defined]
    _, box, panel, *_ = told(tab())
    assert box["submit_btn"], "a stream that died leaves no Stop button"
    assert json.loads(panel)["messages"][-1]["kind"] == "end", "nor a panel that is live"
    list(slow.send(SECOND, tab(), *VALUES[:5], 4, ""))
    assert told(tab())[2] is SKIP, "what was heard is not told again"


def test_what_gradio_repeats_when_a_stream_ends_changes_nothing(handlers: ChatHandlers) -> None:
    streams = ReplyStreams()
    streams.begin(handlers.send)(QUESTION, tab(), *VALUES)
    *_, last = streams.stream(tab())
    assert last == (SKIP, SKIP), "the tab may show another chat by then"


def test_a_reply_that_was_begun_and_never_streamed_ends(handlers: ChatHandlers) -> None:
    streams = ReplyStreams()
    for text in (QUESTION, SECOND):
        streams.begin(handlers.send)(text, tab(), *VALUES)
    streams.begin(handlers.send)(" ", tab(), *VALUES)
    list(streams.stream(tab()))
    assert [message.state for message in handlers.tabs.chat("tab").messages[1::2]] == ["stopped", "done"]
    streams.begin(handlers.send)(QUESTION, tab(), *VALUES)
    streams.leave(tab())
    assert not handlers.tabs.chat("tab").busy


def test_opening_the_chat_that_is_shown_leaves_its_reply_alone(slow: ChatHandlers) -> None:
    frames = slow.send(QUESTION, tab(), *VALUES)
    next_text(slow, frames)
    chat = slow.tabs.chat("tab")
    _, box, panel, *_ = slow.open(gr.EventData(None, chat.to_json()), tab())
    assert (box["stop_btn"], panel) == (True, SKIP)
    list(frames)
    assert texts(chat) == [QUESTION, *expected(QUESTION)]
    assert slow.tabs.chat("tab") is chat
    assert None not in (chat.conversation, chat.finished)


def test_the_meter_is_that_of_the_chat_shown(handlers: ChatHandlers) -> None:
    send(handlers, QUESTION)
    saved = handlers.tabs.chat("tab").to_json()
    assert "context" in handlers.settle(tab())[3]
    send(handlers, SECOND)
    assert handlers.undo(tab())[3] == ""
    send(handlers, SECOND)
    handlers.clear(tab())
    send(handlers, SECOND)
    assert handlers.open(gr.EventData(None, saved), tab())[3] == ""


def test_a_deleted_chat_is_forgotten(handlers: ChatHandlers) -> None:
    for shown in (True, False):
        send(handlers, QUESTION)
        chat = handlers.tabs.chat("tab")
        if not shown:
            handlers.clear(tab())
        handlers.delete(gr.EventData(None, {"id": chat.id}), tab())
        assert handlers.tabs.chat("tab").messages == []
        handlers.open(gr.EventData(None, {"id": chat.id, "messages": []}), tab("other"))
        assert handlers.tabs.chat("other").messages == []


def test_deleting_another_chat_leaves_the_shown_one_alone(handlers: ChatHandlers) -> None:
    send(handlers, QUESTION)
    assert set(map(str, handlers.delete(gr.EventData(None, {"id": "another"}), tab()))) == {str(SKIP)}
    assert handlers.tabs.chat("tab").finished is not None


def test_an_engine_error_is_one_line_in_the_chat_and_the_chat_goes_on(
    handlers: ChatHandlers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(handlers.engine.target, "run", broken)
        frames = send(handlers, QUESTION)
    reply = handlers.tabs.chat("tab").messages[1]
    assert reply.state == "failed"
    assert "boom" in frames[-1][0][1]["content"][1]["text"]
    assert "boom" in frames[-1][2], "the panel must say so, too"
    assert "Traceback" in caplog.text
    send(handlers, SECOND)
    assert texts(handlers.tabs.chat("tab"))[3] == expected(SECOND)[0], "the failed question is left out"


def test_a_prompt_beyond_the_context_is_refused_in_plain_words(handlers: ChatHandlers) -> None:
    send(handlers, "word " * 200)
    reply = handlers.tabs.chat("tab").messages[1]
    assert reply.state == "failed"
    assert "tokens" in reply.notices[-1]


def test_a_full_context_says_what_was_left_out(handlers: ChatHandlers) -> None:
    for text in ("one " * 9, "two " * 9, "three " * 9):
        send(handlers, text, values=("tree", "auto", 0, 1, 0, 30, ""))
    assert any("oldest" in notice for notice in handlers.tabs.chat("tab").messages[-1].notices)


@pytest.mark.parametrize(
    ("budget", "noticed"), [("auto", ["draft inactive: no candidate is worth its cost in this pass"]), ("8", [])]
)
def test_a_reply_that_drafted_nothing_says_what_kept_most_of_its_steps_from_it(
    handlers: ChatHandlers, monkeypatch: pytest.MonkeyPatch, budget: str, noticed: list[str]
) -> None:
    monkeypatch.setattr(PassCost, "share", lambda cost, scores, *_: [1] * len(scores))  # where the budget is not given
    send(handlers, QUESTION, values=("tree", budget, *VALUES[2:5], 12, ""))
    assert handlers.tabs.chat("tab").messages[1].notices == noticed


def test_the_audit_confirms_the_reply(handlers: ChatHandlers) -> None:
    send(handlers, QUESTION, values=("tree", "8", 0.8, 0.9, 5, 40, ""))
    list(handlers.audit(tab()))
    chat = handlers.tabs.chat("tab")
    assert chat.finished is not None
    count = len(chat.finished.token_ids)
    plain, figures = chat.messages[1].notices[-1].split("\n")
    assert plain == "audit ✓: the model alone would draw the same token at every position."
    assert figures.startswith(f"{count} of {count} tokens are the target's own draw with the same seed. ")
    shown = show(chat.messages[1])[-1]["content"][-1]["text"]
    assert f"***{plain}***  \n{figures}  \n" in shown


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_audit_speaks_of_plain_decoding_only_where_rounding_is_no_matter(dtype: torch.dtype) -> None:
    good, bad = Audit(np.zeros(3), np.ones(3)), Audit(np.array([0, 0.25, 0]), np.ones(3))
    assert ("exactly that of plain decoding" in describe(good, 0, dtype)) == (dtype == torch.float32)
    assert "first choice is 0.000 logits" in describe(good, 0, dtype)
    assert "2 of 3 tokens are the target's own draw with the same seed." in describe(bad, 1, dtype)
    assert "The largest distance from the target's first choice is 0.250" in describe(bad, 1, dtype)
    told = describe(bad, 1, dtype)
    tied = "would draw the same token at all but 1 position. There its top two choices are nearly tied."
    assert (tied in told, "this should not happen" in told) == (dtype == torch.bfloat16, dtype == torch.float32)
    assert "this should not happen" in describe(bad, 2.5, dtype), "0.625 logits apart: that is no near tie"


def test_an_audit_during_a_reply_says_that_it_has_to_wait(slow: ChatHandlers, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(gr, "Info", said.append)
    frames = slow.send(QUESTION, tab(), *VALUES)
    next_text(slow, frames)
    assert list(slow.audit(tab())) == []
    assert len(said) == 1
    slow.stop(tab())
    list(frames)


def test_an_audit_that_is_cut_off_leaves_no_line(handlers: ChatHandlers) -> None:
    send(handlers, QUESTION)
    before = list(handlers.tabs.chat("tab").messages[1].notices)
    audit = handlers.audit(tab())
    assert next(audit)[-1] is SKIP, "only a verdict is saved"
    assert handlers.tabs.chat("tab").messages[1].notices[-1].startswith("audit")
    audit.close()
    assert handlers.tabs.chat("tab").messages[1].notices == before


def test_a_saved_chat_opens_and_goes_on(handlers: ChatHandlers) -> None:
    send(handlers, QUESTION)
    record = handlers.tabs.chat("tab").to_json()
    later = ChatHandlers(Service(handlers.engine))
    later.open(gr.EventData(None, record), tab())
    send(later, SECOND)
    assert texts(later.tabs.chat("tab"))[3] == expected(QUESTION, SECOND)[1]


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "x",
        [{}],
        [{"role": "user", "text": 3}],
        [{"role": "user", "text": "a"}],
        [{"role": "assistant", "text": "a"}] * 2,
        [{"role": "user", "text": ""}, {"role": "assistant", "text": ""}] * MAX_MESSAGES,
        [{"role": "user", "text": ""}, {"role": "assistant", "text": "", "notices": ["x"] * 1_000_000}],
    ],
    ids=lambda messages: repr(messages)[:40],
)
def test_a_malformed_saved_chat_is_refused(messages: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_messages(messages)


def test_a_chat_that_another_tab_shows_is_opened_as_a_copy() -> None:
    tabs = Tabs()
    first = tabs.open("a", "id", [Message("user", "x"), Message("assistant", "y")])
    second = tabs.open("b", "id", [])
    second.ask("z")
    assert (first.id, len(first.messages), len(second.messages)) == ("id", 2, 4)
    assert second.id != "id"


def test_only_the_latest_chats_keep_their_memory(handlers: ChatHandlers) -> None:
    for number in range(MAX_WARM + 2):
        send(handlers, QUESTION, str(number), ("plain", "auto", 0, 1, 0, 1, ""))
    warm = [chat.conversation is not None for chat in handlers.tabs._chats.values()]
    assert warm == [False] * 2 + [True] * MAX_WARM


def test_reasoning_is_folded_and_an_edit_still_finds_its_question(handlers: ChatHandlers) -> None:
    thinking, done = show(Message("assistant", "<think>hm <b>"))[0], show(Message("assistant", "<think>hm</think>\n\nyes"))
    assert thinking["metadata"]["status"] == "pending"
    assert (done[0]["metadata"]["status"], done[1]["content"][0]["text"]) == ("done", "yes")
    chat = handlers.tabs.chat("tab")
    chat.messages = [
        Message("user", QUESTION),
        Message("assistant", "<think>hm</think>yes"),
        Message("user", "x"),
        Message("assistant"),
    ]
    data = gr.EditData(None, {"index": 3, "previous_value": "x", "value": SECOND})
    list(handlers.edit(data, tab(), *VALUES))
    assert texts(chat)[:3] == [QUESTION, "<think>hm</think>yes", SECOND]


def test_the_producer_is_never_paced_by_who_takes_the_batches() -> None:
    made = threading.Event()

    def produce(put: Callable[[int], None]) -> None:
        for number in range(200):
            put(number)
        made.set()

    batches = Producer(produce).batches()
    taken = list(next(batches))
    assert made.wait(30), "all are made while nobody takes more"
    taken += [number for batch in batches for number in batch]
    assert taken == list(range(200))


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_the_lanes_of_a_comparison_say_the_same_and_are_timed_by_their_steps(
    handlers: ChatHandlers, temperature: float
) -> None:
    settings = Settings.read("tree", "8", temperature, 1, 3, 40, "")
    *_, last = handlers.comparisons.run("tab", QUESTION, ["plain", "linear", "tree"], settings)
    result = json.loads(last)
    assert result["agreement"]["same"] is True
    assert [lane["decoding"] for lane in result["lanes"]] == ["plain", "linear", "tree"]
    for lane in result["lanes"]:
        assert lane["figures"]["tokens"] == sum(len(step["token_ids"]) for step in lane["steps"])
    assert handlers.comparisons._stops._signals == {}


@pytest.mark.parametrize(
    ("said", "agreeing", "parting"),
    [
        (([5, 6, 7], [5, 6, 7], [5, 9, 7]), ["plain", "linear"], [(["tree"], 1)]),
        (([5, 6, 7], [5, 6, 8], [5, 6, 8]), ["plain"], [(["linear", "tree"], 2)]),
        (([5, 6, 7], [5, 6], [9]), ["plain"], [(["linear"], 1), (["tree"], 0)]),
    ],
)
def test_lanes_that_differ_are_told_with_who_agrees_and_how_near_a_tie_it_was(
    handlers: ChatHandlers, said: tuple[list[int], ...], agreeing: list[str], parting: list[tuple[list[str], int]]
) -> None:
    settings = Settings.read(*VALUES)
    prompt = handlers.replies.fit([{"role": "user", "content": QUESTION}], settings.max_tokens)
    told = handlers.comparisons._agreement(
        prompt, list(map(recorded, LANES, said)), settings, Clock(threading.Event(), math.inf)
    )
    margins = handlers.replies.decoder.audit(prompt, tuple(said[0]), settings, lambda: False).margins
    assert (told["same"], told["lanes"]) == (False, agreeing)
    assert [(group["lanes"], group["position"]) for group in told["apart"]] == parting
    for group in told["apart"]:
        assert group["margin"] == pytest.approx(margins[group["position"]], abs=1e-4)
        assert group["why"] == "this should not happen in float32"


def recorded(decoding: Decoding, token_ids: list[int]) -> Lane:
    """A lane that said this."""
    recorder = Recorder({}, {}, [], lambda token_ids: [])
    recorder.records.append({"token_ids": token_ids})
    return Lane(decoding, recorder)


def test_only_rounding_and_only_near_ties_are_excused() -> None:
    assert why_differing(torch.bfloat16, near=True) == "rounding decides near ties in bfloat16"
    assert why_differing(torch.bfloat16, near=False) == "this should not happen in bfloat16"
    assert why_differing(torch.float32, near=True) == "this should not happen in float32"


@contextmanager
def client(url: str) -> Iterator[Client]:
    connection = Client(url, verbose=False)
    try:
        yield connection
    finally:
        connection.close()


def test_a_client_chats_and_each_client_has_its_own_conversation() -> None:
    arguments: dict[str, Any] = {"max_tokens": 60, "api_name": "/chat"}
    with served(build(Service(tiny_engine()))) as url, client(url) as one, client(url) as other:
        assert list(one.view_api(return_format="dict", print_info=False)["named_endpoints"]) == ["/chat"]
        job = one.submit(QUESTION, **arguments)
        first, second = expected(QUESTION, SECOND)
        assert job.result(timeout=30) == first
        outputs = job.outputs()
        assert all(later.startswith(earlier) for earlier, later in pairwise(outputs))
        assert other.predict(SECOND, **arguments) == expected(SECOND)[0]
        assert one.predict(SECOND, **arguments) == second


def test_a_clients_cancel_frees_the_engine(slow: ChatHandlers) -> None:
    with served(build(Service(slow.engine))) as url, client(url) as one:
        job = one.submit(QUESTION, max_tokens=60, api_name="/chat")
        wait_for(lambda: len(job.outputs()) > 0)
        job.cancel()
        time.sleep(0.5)
        passes = slow.passes  # type: ignore[attr-defined]
        time.sleep(0.2)
        assert slow.passes == passes  # type: ignore[attr-defined]


@pytest.mark.parametrize(("option", "value"), [("decoding", "guess"), ("budget", "many")])
def test_a_client_learns_what_it_asked_wrong(option: str, value: str) -> None:
    with served(build(Service(tiny_engine()))) as url, client(url) as one, pytest.raises(AppError, match=value):
        one.predict(QUESTION, api_name="/chat", **{option: value})


def broken(*_: Any) -> Any:
    raise RuntimeError("boom")


def next_text(handlers: ChatHandlers, frames: Iterator[Frame], name: str = "tab") -> Message:
    """Advance until the reply has said something."""
    for _ in frames:
        reply = handlers.tabs.chat(name).messages[-1]
        if reply.text:
            return reply
    raise AssertionError("the reply never began")
