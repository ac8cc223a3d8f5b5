"""A real Chromium for the tests, the app as a user starts it, and a Gradio app that hosts what is to be tested."""

from __future__ import annotations

import math
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gradio as gr
from playwright.sync_api import Browser, Page, Playwright, expect

import app

expect.set_options(timeout=20_000)  # a page is as slow as the machine that also runs the model
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
]


def launch_browser(playwright: Playwright) -> Browser:
    """An installed Chromium or Chrome, else Playwright's own. No browser at all is an error, never a skip."""
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    return playwright.chromium.launch(executable_path=found, args=_ARGUMENTS)


@contextmanager
def running_app(*arguments: str) -> Iterator[str]:
    """The address of the app, started with these arguments on a free local port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "app.py", "--no-browser", "--port", str(port), *arguments]
    process = subprocess.Popen(command, cwd=Path(app.__file__).parent)
    address = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 180
        while True:
            assert process.poll() is None, "the app ended"
            assert time.monotonic() < end, "the app did not come up"
            try:
                urllib.request.urlopen(address, timeout=1).close()
                break
            except OSError:
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=10)


@contextmanager
def served(demo: gr.Blocks, **appearance: Any) -> Iterator[str]:
    """The address of ``demo``, running on a free local port; ``appearance``: more arguments of its ``launch``."""
    _, url, _ = demo.launch(
        server_name="127.0.0.1",
        server_port=None,
        prevent_thread_lock=True,
        quiet=True,
        ssr_mode=False,
        share=False,
        run_history=False,
        **appearance,
    )
    try:
        yield url
    finally:
        demo.close()


@contextmanager
def traced_tasks(page: Page) -> Iterator[list[float]]:
    """While open, Chromium records its tasks; afterwards the list holds the CPU milliseconds of each on a page's main thread.

    CPU time and not wall clock: what else runs on the machine must not fail a test of the page.
    """
    session = page.context.new_cdp_session(page)
    events: list[dict[str, Any]] = []
    milliseconds: list[float] = []
    session.on("Tracing.dataCollected", lambda data: events.extend(data["value"]))
    session.send("Tracing.start", {"traceConfig": {"includedCategories": ["disabled-by-default-lighthouse"]}})
    yield milliseconds
    finished: list[object] = []
    session.on("Tracing.tracingComplete", lambda data: finished.append(data))
    session.send("Tracing.end")
    while not finished:
        page.wait_for_timeout(50)
    session.detach()
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    tasks = [event for event in events if event["name"].endswith("RunTask") and "tdur" in event]
    milliseconds += [task["tdur"] / 1000 for task in tasks if names.get((task["pid"], task["tid"])) == "CrRendererMain"]


def least(milliseconds: Callable[[], float], enough: float = 100, attempts: int = 3) -> float:
    """The milliseconds of the calmest attempt: what else the machine does only ever adds to them."""
    best = math.inf
    for _ in range(attempts):
        best = min(best, milliseconds())
        if best <= enough:
            break
    return best
