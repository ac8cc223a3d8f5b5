"""One thread owns the device: replies in company, steps through queues, a fair line in front."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from toys import VOCAB, tiny_engine

from specdec.request import RequestError
from specdec.serving.line import GaveUp, Line
from specdec.serving.service import ClosedError, Service
from specdec.step import Step

PROMPTS = ("the cat sat on the mat. the cat sat", "a quite different text, a quite", "one, two, one, two", "x")


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service(tiny_engine())
    yield service
    service.close()
    service.join(10)


def tokens(steps: Iterator[Step]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


def test_replies_of_several_threads_share_passes_and_say_what_each_says_alone(service: Service) -> None:
    alone = [tokens(service.engine.stream(prompt, max_new_tokens=40)) for prompt in PROMPTS]
    begun, company = threading.Barrier(len(PROMPTS)), list[int]()

    def follow(prompt: str) -> list[int]:
        begun.wait()
        steps = list(service.stream(prompt, max_new_tokens=40))
        company.extend(step.sequences for step in steps)
        return [token for step in steps for token in step.token_ids]

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        assert list(threads.map(follow, PROMPTS)) == alone
    assert max(company) > 1


def test_all_work_is_done_in_one_thread(service: Service) -> None:
    threads = {service.call(threading.get_ident)}

    def note(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        threads.add(threading.get_ident())
        return scores

    list(service.stream(PROMPTS[0], max_new_tokens=5, logits_processor=[note]))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_a_reader_who_takes_nothing_holds_nobody_up(service: Service) -> None:
    taken: SimpleQueue[Any] = SimpleQueue()
    slow = service.begin(PROMPTS[0], taken.put, max_new_tokens=30, eos_token_id=VOCAB)
    assert len(tokens(service.stream(PROMPTS[1], max_new_tokens=30, eos_token_id=VOCAB))) == 30
    while taken.get() is not None:
        pass
    assert slow.sequence.emitted == 30


def test_who_leaves_ends_the_reply_before_the_next_round(service: Service) -> None:
    chat = service.engine.conversation()
    stream = service.stream(PROMPTS[0], chat, max_new_tokens=100, eos_token_id=VOCAB)
    first = next(stream)
    stream.close()
    assert service.call(lambda: chat.text.busy) is False
    again = tokens(service.stream(PROMPTS[0], chat, max_new_tokens=5))
    assert again[: len(first.token_ids)] == list(first.token_ids[: len(again)])


def test_errors_reach_whom_they_concern_and_nobody_else(service: Service) -> None:
    def failing(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(RequestError):
        service.begin(PROMPTS[0], print, no_such_argument=1)
    good = service.stream(PROMPTS[1], max_new_tokens=30)
    first = next(good)
    with pytest.raises(ZeroDivisionError):
        list(service.stream(PROMPTS[0], logits_processor=[failing]))
    assert [*first.token_ids, *tokens(good)] == tokens(service.engine.stream(PROMPTS[1], max_new_tokens=30))
    with pytest.raises(ZeroDivisionError):
        service.call(lambda: 1 // 0)


def test_once_closed_every_reply_ends_and_nothing_more_is_computed() -> None:
    service = Service(tiny_engine())
    stream = service.stream(PROMPTS[0], max_new_tokens=150, eos_token_id=VOCAB)
    next(stream)
    service.close()
    with pytest.raises(ClosedError):
        list(stream)
    service.join(10)
    with pytest.raises(ClosedError):
        service.call(lambda: 1)
    for sequence in list(service.engine.scheduler.sequences):
        service.engine.scheduler.drop(sequence)


def test_how_many_replies_are_written_at_once_follows_what_company_costs(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec.cost import PassCost

    for cost, width in (
        (PassCost({1: 1.0, 64: 1.1}), 16),
        (PassCost({1: 1.0, 2: 2.0, 64: 64.0}), 1),
        (PassCost({1: 1.0, 4: 1.2, 64: 61.2}), 4),
    ):
        monkeypatch.setattr(service.engine.scheduler, "_cost", cost)
        assert service.widest() == width
    monkeypatch.setattr("specdec.serving.service.free_bytes", lambda _: 0)
    assert service.widest() == 1


def test_callers_take_turns_however_often_one_of_them_asks() -> None:
    line = Line()
    first = line.enter("a")
    greedy, other = [line.enter("a") for _ in range(3)], line.enter("b")
    assert first.granted.done()
    assert [line.ahead(place) for place in (*greedy, other)] == [2, 3, 4, 1]
    order = []
    places = {id(place): name for name, place in zip(("a1", "a2", "a3", "b1"), (*greedy, other), strict=True)}
    present = first
    while True:
        line.leave(present)
        running = [place for place in (*greedy, other) if place.granted.done() and places[id(place)] not in order]
        if not running:
            break
        (present,) = running
        order.append(places[id(present)])
    assert order == ["b1", "a1", "a2", "a3"]
    assert line.idle


def test_several_have_a_turn_at_once_and_who_wants_to_be_alone_is_not_overtaken() -> None:
    line = Line(2)
    one, two, three = (line.enter(name) for name in "abc")
    alone, after = line.enter("d", alone=True), line.enter("e")
    assert [place.granted.done() for place in (one, two, three, alone, after)] == [True, True, False, False, False]
    assert [line.ahead(place) for place in (three, alone, after)] == [1, 3, 3]
    line.leave(one)
    assert three.granted.done()
    line.leave(two)
    assert not alone.granted.done()
    line.leave(three)
    assert alone.granted.done()
    assert not after.granted.done()
    assert line.ahead(after) == 1
    line.leave(alone)
    assert after.granted.done()
    line.leave(after)
    assert line.idle


def test_who_gives_up_leaves_the_line() -> None:
    line, told = Line(), list[int]()
    held = line.enter("a")
    with pytest.raises(GaveUp), line.turn("b", lambda: bool(told), told.append):
        pytest.fail("it was never its turn")
    assert told == [1]
    line.leave(held)
    assert line.idle
    line.widen(3)
    with line.turn("b", lambda: False, told.append):
        assert not line.idle
