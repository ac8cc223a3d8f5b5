"""A real Chromium for the tests, and a Gradio app that hosts what is to be tested."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import gradio as gr
from playwright.sync_api import Browser, Playwright

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
def served(demo: gr.Blocks) -> Iterator[str]:
    """The address of ``demo``, running on a free local port."""
    _, url, _ = demo.launch(
        server_name="127.0.0.1",
        server_port=None,
        prevent_thread_lock=True,
        quiet=True,
        ssr_mode=False,
        share=False,
        run_history=False,
    )
    try:
        yield url
    finally:
        demo.close()


COUNT_LONG_TASKS = """() => {
    window.longTasks = [];
    new PerformanceObserver((list) => window.longTasks.push(...list.getEntries().map((task) => Math.round(task.duration))))
        .observe({ entryTypes: ["longtask"] });
}"""
"""Page script: from now on `window.longTasks` collects the milliseconds of every task over 50 ms."""
