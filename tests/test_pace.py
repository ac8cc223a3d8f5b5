"""The page never paces the engine, whoever is attached: nobody, a client, a drawing browser.

What the engine's speed depends on is counted: it waits for nobody, batches are few, and no step is sent twice. The speed itself
is measured by hand: ``pytest -n 0 -s -m measured tests/test_pace.py`` shows the figures.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from threading import Semaphore
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from browser import launch_browser, served
from gradio_client import Client
from playwright.sync_api import sync_playwright
from steps import random_steps, token_text

from specdec.devices import leave_a_core
from specdec.engine import SpeculativeEngine
from specdec.request import Request
from specdec.serving.service import Service
from ui.page import build
from ui.panel import REPEATS, PanelFeed
from ui.stream import INTERVAL, Producer

PROMPT = "Write a long text about the history of the lighthouse."
TOKENS = 160
ROUNDS = 5
ATTEMPTS = 3
"""What else runs on the machine may spoil one."""


class Meter:
    """Wall-clock tokens per second of the engine's own thread, first step to last, whoever consumes the steps.

    ``beside`` is the processor time that the rest of this process took meanwhile, as a share of the engine's thread (with
    OMP_NUM_THREADS=1): what the page costs, told apart from what else the machine is doing.
    """

    def __init__(self, engine: SpeculativeEngine) -> None:
        self._scheduler, self._request, self._step = engine.scheduler, engine.request, engine.scheduler.step
        engine.request = self.request  # type: ignore[method-assign]
        engine.scheduler.step = self.step  # type: ignore[method-assign]
        self.rate = self.beside = 0.0

    def request(self, *arguments: Any, **options: Any) -> Request:
        return self._request(*arguments, **options | {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS})

    def step(self) -> bool:
        (sequence,) = self._scheduler.sequences
        before = sequence.emitted
        worked = self._step()
        now = time.perf_counter(), time.thread_time(), time.process_time()
        if before == 0:
            self._tokens, self._start = -sequence.emitted, now
        elif sequence.emitted > before:
            wall, own, whole = (end - start for start, end in zip(self._start, now, strict=True))
            self.rate = (sequence.emitted + self._tokens) / wall
            self.beside = whole / own - 1
        return worked


def attached(url: str) -> None:
    """Chat as a program does."""
    client = Client(url, verbose=False)
    client.predict(PROMPT, api_name="/chat")
    client.close()


def drawing(url: str) -> None:
    """Chat as a person does who has opened the page and watches."""
    with sync_playwright() as playwright:
        browser = launch_browser(playwright)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(url)
        page.locator("#box textarea").fill(PROMPT)
        page.locator(".specdec .tree .node").first.wait_for()  # the page has loaded and drawn its example
        page.keyboard.press("Enter")
        page.locator("#box .stop-button").wait_for()
        page.locator("#box .submit-button").wait_for(timeout=120_000)
        browser.close()


def test_the_page_takes_a_batch_an_interval_however_fast_the_engine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of its own: handing out a batch takes 0.01 s, and the engine makes a step while the page waits."""
    now, waited = 0.0, Semaphore(1)

    def produce(put: Callable[[int], None]) -> None:
        for number in range(20):
            waited.acquire()
            put(number)

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds
        waited.release()

    monkeypatch.setattr("ui.stream.time", SimpleNamespace(monotonic=lambda: now, sleep=wait))
    monkeypatch.setattr("ui.stream.PULSE", 60)  # no empty batches on a machine that is busy
    moments, taken = [], []
    for batch in Producer(produce).batches():
        moments.append(now)
        taken += batch
        now += 0.01
    assert taken == list(range(20))
    assert np.diff(moments) == pytest.approx(INTERVAL)


def test_a_step_is_sent_as_often_and_with_as_many_bytes_at_the_end_of_a_long_reply_as_at_its_start() -> None:
    feed = PanelFeed({"name": "no model"}, {}, [], token_text)
    feed.start()
    payloads = [feed.steps([step]) for step in random_steps(400, nodes=12)]
    sent = [
        record["index"] for text in payloads for message in json.loads(text)["messages"] for record in message.get("steps", [])
    ]
    assert Counter(sent) == dict.fromkeys(range(399), REPEATS) | {399: 1}
    early, late = (statistics.fmean(len(text.encode()) for text in part) for part in (payloads[:100], payloads[-100:]))
    assert late < 1.1 * early


@pytest.mark.measured
def test_the_engine_keeps_its_pace_whoever_is_attached() -> None:
    service = Service()
    service.call(leave_a_core)
    service.use(service.call(SpeculativeEngine))
    engine = service.engine
    meter = Meter(engine)
    messages = [{"role": "user", "content": PROMPT}]
    list(service.stream(messages, do_sample=False))  # what comes first is slow
    gc.freeze()  # as the app does
    elsewhere = ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn")
    )  # no program shares the engine's process
    with served(build(service)) as url, elsewhere:

        def nobody() -> None:
            list(service.stream(messages, do_sample=False))

        ways: dict[str, Callable[[], None]] = {
            "nobody": nobody,
            "attached": lambda: elsewhere.submit(attached, url).result(),
            "drawing": lambda: elsewhere.submit(drawing, url).result(),
        }
        for _ in range(ATTEMPTS):
            shares = measured(meter, ways)
            if shares["attached"] >= 97 and shares["drawing"] >= 90:
                break
    assert shares["attached"] >= 97
    assert shares["drawing"] >= 90


def measured(meter: Meter, ways: dict[str, Callable[[], None]]) -> dict[str, float]:
    """The engine's median speed by who is attached, per cent of that with nobody; the ways take turns."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    beside: dict[str, list[float]] = {name: [] for name in ways}
    for name in list(ways) * ROUNDS:
        ways[name]()
        rates[name].append(round(meter.rate, 2))
        beside[name].append(round(meter.beside, 3))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    shares = {name: round(100 * rate / medians["nobody"], 1) for name, rate in medians.items()}
    print(f"\ntokens/s: {rates}\nper cent of nobody attached: {shares}\nprocessor time beside the engine: {beside}")
    return shares
