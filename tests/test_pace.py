"""The page never paces the engine: its speed with nobody, a client, and a drawing browser attached. Run with ``-m soak -s``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browser import launch_browser, served
from gradio_client import Client
from playwright.sync_api import sync_playwright

from specdec.engine import SpeculativeEngine
from specdec.step import Step
from ui.page import build
from ui.turns import ENGINE_THREAD, leave_a_core

PROMPT = "Write a long text about the history of the lighthouse."
TOKENS = 160
ROUNDS = 3


class Meter:
    """Wall-clock tokens per second of the engine's own thread, first step to last, whoever consumes the steps.

    ``beside`` is the processor time that the rest of this process took meanwhile, as a share of the engine's thread (with
    OMP_NUM_THREADS=1): what the page costs, told apart from what else the machine is doing.
    """

    def __init__(self, engine: SpeculativeEngine) -> None:
        self._stream = engine.stream
        engine.stream = self.stream  # type: ignore[method-assign]
        self.rate = self.beside = 0.0

    def stream(self, *arguments: Any, **options: Any) -> Iterator[Step]:
        tokens, start = 0, None
        for step in self._stream(*arguments, **options | {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS}):
            now = time.perf_counter()
            own, whole = time.thread_time(), time.process_time()
            if start is None:
                start, own_start, whole_start = now, own, whole
            else:
                tokens += len(step.token_ids)
                self.rate = tokens / (now - start)
                self.beside = (whole - whole_start) / (own - own_start) - 1
            yield step


@pytest.mark.soak
def test_the_engine_keeps_its_pace_whoever_is_attached() -> None:
    ENGINE_THREAD.submit(leave_a_core).result()
    engine = ENGINE_THREAD.submit(SpeculativeEngine).result()
    meter = Meter(engine)
    messages = [{"role": "user", "content": PROMPT}]
    with served(build(engine)) as url, sync_playwright() as playwright:
        client = Client(url, verbose=False)
        browser = launch_browser(playwright)

        def nobody() -> None:
            ENGINE_THREAD.submit(list, engine.stream(messages, do_sample=False)).result()

        def attached() -> None:
            client.predict(PROMPT, api_name="/chat")
            client.reset_session()

        def drawing() -> None:
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(url)
            page.locator("#box textarea").fill(PROMPT)
            page.keyboard.press("Enter")
            page.locator("#box .stop-button").wait_for()
            page.locator("#box .submit-button").wait_for(timeout=120_000)
            page.close()

        ways: list[Callable[[], None]] = [nobody, attached, drawing]
        rates: dict[str, list[float]] = {way.__name__: [] for way in ways}
        beside: dict[str, list[float]] = {way.__name__: [] for way in ways}
        for way in ways * ROUNDS:
            way()
            rates[way.__name__].append(meter.rate)
            beside[way.__name__].append(round(meter.beside, 3))
        browser.close()
        client.close()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    shares = {name: round(100 * rate / medians["nobody"], 1) for name, rate in medians.items()}
    print(f"\ntokens/s: {medians}\nper cent of nobody attached: {shares}\nprocessor time beside the engine: {beside}")
    assert shares["attached"] >= 97
    assert shares["drawing"] >= 90
