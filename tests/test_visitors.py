"""Several visitors on one page: a fair queue, limits that say so, and nobody sees another's text."""

from __future__ import annotations

import json
import math
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import gradio as gr
import pytest
from browser import served
from gradio.context import LocalContext
from toys import ARCHITECTURES, tiny_engine, tiny_model, tokenizer

import app
from specdec.engine import SpeculativeEngine
from specdec.prompt import Prompt
from specdec.serving.clients import client_address
from specdec.serving.line import Line, Place
from specdec.serving.service import Service
from ui import visitors
from ui.handlers import ChatHandlers, Frame
from ui.page import build
from ui.settings import MAX_TOKENS, Settings
from ui.state import MAX_TABS, Finished, Message, Tabs
from ui.stream import ReplyStreams
from ui.visitors import PRIVATE, PUBLIC, Limits, Pending, Shared, TooManyError

VALUES = ("tree", "auto", 0, 1, 0, 40, "")
LONG = ("tree", "auto", 0, 1, 0, 110, "")
SHORT = ("tree", "auto", 0, 1, 0, 8, "")


@pytest.fixture
def slow() -> ChatHandlers:
    """Over an engine whose every pass takes a while."""
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer())
    run = engine.target.run

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.05)
        return run(*arguments)

    engine.target.run = slowly  # type: ignore[method-assign]
    return ChatHandlers(Service(engine))


def visitor(name: str) -> gr.Request:
    return gr.Request(session_hash=name)


def footer(handlers: ChatHandlers, name: str) -> str:
    return handlers.tabs.chat(name).messages[1].footer


def begin(handlers: ChatHandlers, name: str) -> Iterator[Frame]:
    """The frames of a visitor's reply that has begun."""
    frames = handlers.send("question", visitor(name), *LONG)
    next(frames)
    while not handlers.tabs.chat(name).messages[1].text:
        next(frames)
    return frames


def wait(frames: Iterator[Frame], handlers: ChatHandlers, name: str, place: str) -> None:
    """Take frames until the reply's footer tells ``place``."""
    end = time.monotonic() + 30
    next(frames)
    while footer(handlers, name) != place:
        assert time.monotonic() < end, footer(handlers, name)
        next(frames)


def test_who_waits_sees_the_place_and_who_leaves_frees_theirs(slow: ChatHandlers) -> None:
    first = begin(slow, "a")
    second, third = (slow.send("question", visitor(name), *SHORT) for name in "bc")
    wait(second, slow, "b", "waiting: 1 reply is ahead of this one")
    assert "waiting: 1 reply is ahead of this one" in next(second)[2], "the panel must say so, too"
    wait(third, slow, "c", "waiting: 2 replies are ahead of this one")
    second.close()  # type: ignore[attr-defined]  # what Gradio does when the tab closes
    slow.leave(visitor("b"))
    wait(third, slow, "c", "waiting: 1 reply is ahead of this one")
    slow.stop(visitor("a"))
    list(first)
    list(third)
    assert slow.tabs.chat("c").messages[1].state == "done"
    assert slow.replies.line.idle


def test_an_audit_waits_visibly_and_frees_its_place_when_its_visitor_leaves(slow: ChatHandlers) -> None:
    list(slow.send("question", visitor("b"), *SHORT))
    first = begin(slow, "a")
    audit = slow.audit(visitor("b"))
    notices = slow.tabs.chat("b").messages[1].notices
    while not (notices and notices[-1] == "audit: waiting: 1 reply is ahead of this one"):
        next(audit)
        notices = slow.tabs.chat("b").messages[1].notices
    audit.close()  # type: ignore[attr-defined]
    assert slow.tabs.chat("b").messages[1].notices == [], "what has not come is not kept"
    end = time.monotonic() + 30
    while slow.replies.line.waiting and time.monotonic() < end:
        time.sleep(0.02)
    assert not slow.replies.line.waiting
    slow.stop(visitor("a"))
    list(first)


def test_a_comparison_waits_visibly_until_its_turn_comes(slow: ChatHandlers) -> None:
    first = begin(slow, "a")
    race = slow.comparisons.run("b", "question", ["plain", "tree"], Settings.read(*SHORT))
    told = [json.loads(next(race))["status"] for _ in range(5)]  # some are told while nothing happens
    assert (told[0], set(told[1:])) == ("The engine is getting ready …", {"Waiting: 1 reply is ahead of this one …"})
    slow.stop(visitor("a"))
    list(first)
    *told, last = [json.loads(payload) for payload in race]
    assert {"Lane 1 of 2: plain", "Lane 2 of 2: tree"} <= {payload["status"] for payload in told}
    assert len(last["lanes"]) == 2


@pytest.mark.parametrize("width", [1, 3])
def test_as_many_replies_as_there_is_room_for_share_passes_and_a_comparison_has_them_to_itself(
    slow: ChatHandlers, width: int
) -> None:
    slow.replies.line.widen(width)
    assert slow.engine.pass_cost  # measured now, which takes passes of several texts
    run, company = slow.engine.target.run, list[int]()

    def watched(spans: Any) -> Any:
        company.append(len(spans))
        return run(spans)

    slow.engine.target.run = watched  # type: ignore[method-assign]
    threads = [threading.Thread(target=lambda n=name: list(slow.send("question", visitor(n), *SHORT))) for name in "abcd"]
    settings = Settings.read(*SHORT)
    races: list[str] = []
    threads.append(
        threading.Thread(target=lambda: races.extend(slow.comparisons.run("e", "question", ["plain", "tree"], settings)))
    )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(company) == width
    lanes = json.loads(races[-1])["lanes"]
    assert {step.get("sequences", 1) for lane in lanes for step in lane["steps"]} == {1}


def served_in_order(line: Line, places: list[tuple[str, Place]]) -> str:
    """Who has their turn, one after the other, once all before them have left."""
    order, present = "", None
    while not line.idle:
        (name, present), *_ = [(name, place) for name, place in places if place.granted.done()]
        places.remove((name, present))
        order += name
        line.leave(present)
    return order


def test_visitors_take_turns_however_often_one_of_them_asks() -> None:
    line = Line()
    somebody = line.enter("x")
    places = [(name, line.enter(name)) for name in "aaaabcb"]
    assert line.ahead(places[3][1]) == 7, "whose place moves back can be told so, too"
    line.leave(somebody)
    assert served_in_order(line, places) == "abcabaa"


def test_who_comes_back_at_once_is_not_before_the_second_question_of_another() -> None:
    line = Line()
    somebody = line.enter("x")
    places = [(name, line.enter(name)) for name in "aabc"]
    line.leave(somebody)
    order = ""
    for _ in range(6):
        (name, place), *_ = [(name, place) for name, place in places if place.granted.done()]
        places.remove((name, place))
        order += name
        line.leave(place)
        if name != "a":
            places.append((name, line.enter(name)))
    assert order[:3] == "abc"
    assert "a" in order[3:6]


@pytest.mark.parametrize(
    ("forwarded_for", "proxies", "address"),
    [
        ("", 0, "10.0.0.9"),
        ("203.0.113.7", 0, "10.0.0.9"),  # the client's own words
        ("203.0.113.7", 1, "203.0.113.7"),
        ("198.51.100.1, 203.0.113.7", 1, "203.0.113.7"),
        ("198.51.100.1, 203.0.113.7, 10.0.0.1", 2, "203.0.113.7"),
        ("203.0.113.7", 2, "10.0.0.9"),  # it did not come through both of them
        ("", 1, "10.0.0.9"),
        ("203.0.113.7, ", 1, "10.0.0.9"),
    ],
)
def test_a_visitor_is_whom_the_trusted_proxy_saw_and_never_what_the_client_says(
    forwarded_for: str, proxies: int, address: str
) -> None:
    assert client_address("10.0.0.9", forwarded_for, proxies) == address


def test_who_has_an_ipv6_network_is_one_visitor() -> None:
    known = set()
    for host in ("2001:db8::1", "2001:db8::2:3", "2001:db8:0:1::1"):
        token = LocalContext.request.set(gr.Request(client={"host": host}))
        known.add(visitors.visitor())
        LocalContext.request.reset(token)
    assert known == {"2001:db8::/64", "2001:db8:0:1::/64"}
    assert visitors.visitor() is None, "nobody asks"


def test_no_visitor_sees_anothers_text(slow: ChatHandlers) -> None:
    secrets = {"a": "raspberry", "b": "platypus"}
    seen: dict[str, str] = {}

    def chat(name: str) -> None:
        frames = [*slow.send(secrets[name], visitor(name), *SHORT), *slow.send("and then", visitor(name), *SHORT)]
        seen[name] = repr(frames)

    threads = [threading.Thread(target=chat, args=(name,)) for name in secrets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert secrets["a"] in seen["a"]
    assert secrets["b"] not in seen["a"]
    assert secrets["b"] in seen["b"]
    assert secrets["a"] not in seen["b"]


def test_of_too_many_tabs_one_that_writes_is_spared() -> None:
    tabs = Tabs()
    writing = tabs.chat("0")
    writing.ask("question")
    for number in range(1, MAX_TABS + 1):
        tabs.chat(str(number))
    assert (len(tabs), tabs.shows("0", writing), "1" in tabs._chats) == (MAX_TABS, True, False)
    for chat in tabs._chats.values():
        chat.ask("question")
    tabs.chat("new")
    assert (len(tabs), "new" in tabs._chats) == (MAX_TABS, True), "where all write, the oldest goes"


def test_nobody_pushes_out_what_belongs_to_another() -> None:
    table: Shared[int] = Shared(most=8, leave=lambda key, value: left.append(key))
    left: list[str] = []
    for host, keys in (("a", 2), ("b", 40), ("c", 2)):
        token = LocalContext.request.set(gr.Request(client={"host": host}))
        for number in range(keys):
            table.put(f"{host}{number}", number)
        LocalContext.request.reset(token)
    assert {key[0] for key in left} == {"b"}
    assert len(table) == 8
    assert [key in table for key in ("a0", "a1", "c0", "c1", "b39")] == [True] * 5


def test_what_nobody_uses_is_forgotten() -> None:
    left: list[str] = []
    table: Shared[int] = Shared(most=8, seconds=0, leave=lambda key, value: left.append(key))
    table.put("old", 1)
    table.put("new", 2)
    assert (left, "new" in table) == (["old"], True)


def test_a_reply_that_was_begun_and_never_streamed_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ui.stream.UNSTREAMED", 0.0)
    handlers, streams = limited(pending=1)[0], ReplyStreams()
    for name in "abc":
        streams.begin(handlers.send)("hi", visitor(name), *SHORT)
    assert handlers.replies.pending.total == 1
    monkeypatch.setattr("ui.stream.UNSTREAMED", math.inf)
    handlers, streams = limited(pending=1)[0], ReplyStreams()
    streams.begin(handlers.send)("hi", visitor("a"), *SHORT)
    with pytest.raises(gr.Error, match="already have 1"):
        streams.begin(handlers.send)("hi", visitor("b"), *SHORT)


def test_a_visitor_has_so_many_replies_pending_and_is_told_so() -> None:
    pending = Pending(most=2)
    with pending.place(), pending.place(), pytest.raises(TooManyError, match="already have 2 replies waiting"):
        pending.place().__enter__()
    with pending.place():
        pass


def test_clients_without_a_session_share_nothing() -> None:
    with served(build(Service(tiny_engine()))) as url:
        first, second = (_call(url, "the cat sat on the mat") for _ in range(2))
    assert first == second, "the second one would have read the first one's conversation"
    assert all(json.loads(first.removeprefix("data:")))


def _call(url: str, message: str, **headers: str) -> str:
    """The last line of a reply to ``message``, asked over plain HTTP."""
    data = json.dumps({"data": [message, "", 40, 0, 1, 0, "tree", "auto"]}).encode()
    request = urllib.request.Request(f"{url}gradio_api/call/chat", data, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request) as answer:
        event = json.load(answer)["event_id"]
    with urllib.request.urlopen(f"{url}gradio_api/call/chat/{event}") as stream:
        return [line for line in stream.read().decode().splitlines() if line.startswith("data:")][-1]


def limited(**limits: Any) -> tuple[ChatHandlers, Limits]:
    most = Limits(**{"prompt_tokens": 10_000, "reply_tokens": 10_000, "seconds": math.inf} | limits)
    return ChatHandlers(Service(tiny_engine()), most), most


def test_the_limit_of_a_reply_says_so() -> None:
    handlers, _ = limited(reply_tokens=7)
    list(handlers.send("the cat sat on the mat", visitor("a"), *VALUES))
    assert "7 tok" in footer(handlers, "a")
    assert "this page's limit is 7 tokens" in footer(handlers, "a")


def test_the_limit_of_time_says_so(slow: ChatHandlers) -> None:
    handlers = ChatHandlers(Service(slow.engine), Limits(prompt_tokens=10_000, reply_tokens=10_000, seconds=0.3))
    *_, last = handlers.send("the cat sat on the mat", visitor("a"), "plain", *VALUES[1:])
    assert json.loads(last[2])["messages"][-1]["finish_reason"] == "time", "the panel must not say that the visitor did it"
    reply = handlers.tabs.chat("a").messages[1]
    assert (reply.state, bool(reply.text)) == ("stopped", True)
    assert reply.footer.endswith("stopped: this page's limit is 0 seconds")
    *_, race = handlers.comparisons.run("a", "question", ["plain", "tree"], Settings.read(*VALUES))
    assert "limit" in json.loads(race)["error"]


def test_an_audit_has_its_limit_of_time_too() -> None:
    handlers, _ = limited(seconds=0.0)
    chat = handlers.tabs.chat("a")
    chat.messages += [Message("user", "hi"), Message("assistant", "ho")]
    chat.finished = Finished(Prompt(tuple(range(9))), tuple(range(9)) * 9, Settings.read(*VALUES))
    list(handlers.audit(visitor("a")))
    assert chat.messages[1].notices == ["audit: This page's limit is 0 seconds"]


def test_the_limit_of_a_prompt_says_so() -> None:
    handlers, _ = limited(prompt_tokens=100)
    list(handlers.send("word " * 40, visitor("a"), *VALUES))
    reply = handlers.tabs.chat("a").messages[1]
    assert reply.state == "failed"
    assert reply.notices[-1] == "This page reads at most 100 tokens at once: shorten the message"


def test_what_is_far_too_long_is_refused_before_anything_of_it_is_kept() -> None:
    handlers, _ = limited(prompt_tokens=100, chat_characters=500)
    for text, values in (("word " * 4000, VALUES), ("hi", (*VALUES[:-1], "word " * 4000))):
        with pytest.raises(gr.Error, match="reads at most 100 tokens"):
            next(handlers.send(text, visitor("a"), *values))
    assert handlers.tabs.chat("a").messages == []
    handlers.tabs.chat("a").messages += [Message("user", "x" * 500), Message("assistant", "y")]
    with pytest.raises(gr.Error, match="chat is full"):
        next(handlers.send("hi", visitor("a"), *VALUES))
    assert len(handlers.tabs.chat("a").messages) == 2


def test_what_cannot_fit_is_not_even_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers, _ = limited()
    chat = handlers.tabs.chat("a")
    for _ in range(20):
        chat.messages += [Message("user", "q" * 1000), Message("assistant", "a" * 1000)]
    templated: list[int] = []
    apply = tokenizer().apply_chat_template

    def applying(messages: Any, **named: Any) -> Any:
        templated.append(sum(len(message["content"]) for message in messages))
        return apply(messages, **named)

    monkeypatch.setattr(handlers.engine.tokenizer, "apply_chat_template", applying)
    list(handlers.send("hi", visitor("a"), *SHORT))
    assert max(templated) <= handlers.replies.limits.characters(handlers.engine.target.context_limit)
    assert "40 messages were left out" in chat.messages[-1].notices[0], "the reader hears of all that was left out"


def test_a_conversation_beyond_the_limit_loses_its_oldest_messages_and_says_so() -> None:
    handlers, _ = limited(prompt_tokens=100)
    for text in ("one " * 9, "two " * 9, "three " * 9):
        list(handlers.send(text, visitor("a"), *VALUES))
    assert handlers.tabs.chat("a").messages[-1].notices[0].startswith("this page reads at most 100 tokens: the oldest")


def test_nothing_is_limited_on_ones_own_machine() -> None:
    settings = Settings(max_tokens=MAX_TOKENS)
    assert PRIVATE.settings(settings) == settings
    assert PUBLIC.settings(settings).max_tokens == PUBLIC.reply_tokens


@pytest.mark.parametrize(("host", "limits"), [("127.0.0.1", PRIVATE), ("0.0.0.0", PUBLIC)])
def test_a_host_open_to_the_network_is_limited(
    monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int, host: str, limits: Limits
) -> None:
    class Built:
        is_running = False

        def launch(self, **_: Any) -> None:
            pass

        def close(self, verbose: bool) -> None:
            pass

    given: list[Limits] = []

    def building(engine: Any, limits: Limits, **_: Any) -> Built:
        given.append(limits)
        return Built()

    monkeypatch.setattr(app, "build", building)
    monkeypatch.setattr(app, "_engine", lambda options: tiny_engine())
    assert app.main(["--host", host, "--port", str(unused_tcp_port), "--no-browser"]) == 0
    assert given == [limits]
