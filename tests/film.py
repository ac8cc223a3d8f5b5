"""The README's two pictures, taken from the running app on the embedded model: ``PYTHONPATH=. python tests/film.py``.

The film: a prompt is typed, the reply streams at its true speed, then one of its steps is told beat by beat.
"""

from __future__ import annotations

import base64
import io
import time
from pathlib import Path
from typing import Any

from browser import launch_browser, running_app
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from ui import panel

PROMPT = "Write a Python function that returns the largest of three numbers."
FILM = panel.ASSETS / "film.webp"
SCREENSHOT = panel.ASSETS / "screenshot.png"
FRAMES_PER_SECOND = 9
LARGEST = 3_000_000
FIND_STEP = """() => {
  const steps = document.querySelector('.specdec-host').panel.history.records;
  const branches = ({ parents }) => parents.filter((_, node) => node > 0 && !parents.includes(node)).length;
  const worth = ({ tree, verdict }) => Math.min(verdict.path.length - 1, 3) + Math.min(branches(tree), 8);
  const prose = ({ special }) => !Object.keys(special ?? {}).length;
  const fits = (step) => step.verdict.path.length <= 6 && prose(step);
  const better = (step, best) => fits(step) && worth(step) > worth(steps[best]);
  return steps.slice(0, -3).reduce((best, step, i) => (better(step, best) ? i : best), 0); // another one follows it
}"""


class Screencast:
    """What the page shows from now on: PNG frames, each with the second at which it was painted."""

    def __init__(self, page: Page) -> None:
        self.frames: list[tuple[float, bytes]] = []
        self._session = page.context.new_cdp_session(page)
        self._session.on("Page.screencastFrame", self._take)
        self._session.send("Page.startScreencast", {"format": "png"})

    def _take(self, frame: dict[str, Any]) -> None:
        self.frames.append((frame["metadata"]["timestamp"], base64.b64decode(frame["data"])))
        self._session.send("Page.screencastFrameAck", {"sessionId": frame["sessionId"]})

    def stop(self) -> list[tuple[float, bytes]]:
        """The frames; the last one lasts until now."""
        self._session.send("Page.stopScreencast")
        return [*self.frames, (time.time(), self.frames[-1][1])]


def act(page: Page) -> None:
    """What happens in the film."""
    page.wait_for_timeout(800)
    page.locator("#box textarea").press_sequentially(PROMPT, delay=18)
    page.wait_for_timeout(200)
    say_and_wait(page)
    page.wait_for_timeout(900)
    go_to_branching_step(page)
    page.wait_for_timeout(300)
    for beat in ("grow", "verify", "prune"):
        page.get_by_role("button", name=beat, exact=True).press("Enter")
        page.wait_for_timeout(1200)
    page.locator(".scrubber").press("ArrowRight")
    page.wait_for_timeout(4200)


def say_and_wait(page: Page) -> None:
    page.keyboard.press("Enter")
    expect(page.locator("#box .stop-button")).to_be_visible()
    expect(page.locator("#box .submit-button")).to_be_visible(timeout=60_000)


def go_to_branching_step(page: Page) -> None:
    """With the keys, from the reply's end."""
    steps = page.evaluate("document.querySelector('.specdec-host').panel.history.length")
    page.locator(".scrubber").focus()
    found = page.evaluate(FIND_STEP)
    for _ in range(steps - 1 - found):
        page.keyboard.press("ArrowLeft")
        page.wait_for_timeout(25)
    expect(page.locator(".specdec h2")).to_have_text(f"Step {found + 1}")


def film(browser: Browser, url: str) -> list[tuple[float, bytes]]:
    page = open_page(browser, url, 1180, 820)
    screencast = Screencast(page)
    act(page)
    return screencast.stop()


def screenshot(browser: Browser, url: str, file: Path) -> None:
    page = open_page(browser, url, 1440, 900)
    page.locator("#box textarea").fill(PROMPT)
    say_and_wait(page)
    go_to_branching_step(page)
    page.locator("h1").click()
    page.wait_for_timeout(2500)
    page.screenshot(path=file)


def open_page(browser: Browser, url: str, width: int, height: int) -> Page:
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
    page.goto(url)
    page.wait_for_function("window.Plotly && document.querySelector('.specdec-host')?.panel?.history.length > 0")
    return page


def save(frames: list[tuple[float, bytes]], file: Path) -> None:
    """An animated WebP that repeats for ever, at most FRAMES_PER_SECOND; a picture that stays is one long frame."""
    pictures: list[Image.Image] = []
    milliseconds: list[int] = []
    start, end = frames[0][0], frames[-1][0]
    shown = None
    for i in range(int((end - start) * FRAMES_PER_SECOND)):
        png = next(png for at, png in reversed(frames) if at <= start + i / FRAMES_PER_SECOND)
        if png is not shown:
            pictures.append(Image.open(io.BytesIO(png)).convert("RGB"))
            milliseconds.append(0)
            shown = png
        milliseconds[-1] += 1000 // FRAMES_PER_SECOND
    options: dict[str, Any] = {"quality": 72, "method": 4, "loop": 0}
    pictures[0].save(file, save_all=True, append_images=pictures[1:], duration=milliseconds, **options)
    print(f"{file}: {len(pictures)} frames, {sum(milliseconds) / 1000:.1f} s, {file.stat().st_size / 1e6:.2f} MB")
    assert file.stat().st_size < LARGEST, f"{file} is too large for the README"


def main() -> None:
    with sync_playwright() as playwright, running_app("--no-memory") as url:  # both show a first reply
        browser = launch_browser(playwright)
        frames = film(browser, url)
        screenshot(browser, url, SCREENSHOT)
        browser.close()
    save(frames, FILM)


if __name__ == "__main__":
    main()
