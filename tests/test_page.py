"""The page as a person uses it: the real app with the embedded model in a real Chromium."""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urljoin
from urllib.request import urlopen

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import launch_browser, least, running_app, served, traced_tasks
from playwright.sync_api import Browser, BrowserContext, Page, Request, expect, sync_playwright
from steps import random_trace
from toys import ARCHITECTURES, tiny_engine, tiny_model, tokenizer, unhurried

from specdec.engine import SpeculativeEngine
from specdec.serving.service import Service
from ui.page import build
from ui.theme import launch_arguments

LIST = "List the months of the year, one a line, each with the number of its days."
LONG = "Tell a very long story about a lighthouse keeper and the sea."


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """The app, started as a user starts it."""
    with running_app("--no-memory", *os.environ.get("SPECDEC_TEST_APP", "").split()) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = launch_browser(playwright)
        yield browser
        browser.close()


@pytest.fixture
def context(browser: Browser, url: str) -> Iterator[BrowserContext]:
    """A fresh profile. Whatever a test does, nothing complains in the console and nothing is fetched from elsewhere."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    complaints: list[tuple[Page, str]] = []

    def watch(page: Page) -> None:
        def forget() -> None:  # what Gradio logs while a page is being left
            complaints[:] = [complaint for complaint in complaints if complaint[0] is not page]

        def check(request: Request) -> None:
            if not request.url.startswith((url, "data:", "blob:")):
                complaints.append((page, request.url))

        page.on("domcontentloaded", forget)
        page.on("console", lambda log: complaints.append((page, log.text)) if log.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append((page, str(error))))
        page.on("request", check)

    context.on("page", watch)
    yield context
    context.close()
    assert [text for _, text in complaints] == []


@pytest.fixture(scope="module")
def toy() -> Iterator[tuple[SpeculativeEngine, str]]:
    """A page in this process, over a tiny model whose context is soon full, and its address."""
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer())
    unhurried(engine)
    assert engine.pass_cost, "measured before a test holds the passes"
    with served(build(Service(engine)), **launch_arguments()) as address:
        yield engine, address


@pytest.fixture
def toy_page(browser: Browser, toy: tuple[SpeculativeEngine, str]) -> Iterator[Page]:
    with browser.new_context() as context:
        yield open_page(context, toy[1])


@pytest.fixture
def page(context: BrowserContext, url: str) -> Page:
    return open_page(context, url)


def open_page(context: BrowserContext, url: str) -> Page:
    page = context.new_page()
    page.set_default_timeout(30_000)
    page.goto(url)
    expect(page.locator("#box .submit-button")).to_be_visible()
    expect(page.locator("#specdec-panel .specdec")).to_be_visible()
    return page


def say(page: Page, text: str) -> None:
    page.locator("#box textarea").fill(text)
    page.keyboard.press("Enter")
    expect(page.locator("#box textarea")).to_have_value("")  # a short reply may be over before its Stop button is seen


def wait_for_text(page: Page, more_than: int = 1) -> str:
    """The last reply, as soon as it is longer than that."""
    said = page.locator(".bot-row").last.locator("[data-testid=bot]").first
    expect(said).to_have_text(re.compile(rf"[\s\S]{{{more_than + 1},}}"), timeout=30_000)
    return said.inner_text()


def limit(page: Page, tokens: int) -> None:
    """Set the most tokens of a reply, in the settings."""
    page.locator("#settings button").first.click()
    field = page.locator("#max-tokens input")
    expect(field).to_have_value("512")
    page.wait_for_timeout(300)  # the accordion slides open
    field.fill(str(tokens))
    field.press("Tab")
    expect(field).to_have_value(str(tokens))
    page.locator("#settings button").first.click()


def finish(page: Page) -> None:
    expect(page.locator("#box .submit-button")).to_be_visible(timeout=60_000)


def stop(page: Page) -> None:
    page.keyboard.press("Escape")
    finish(page)


def figures(page: Page) -> str:
    return page.locator(".bot-row").last.inner_text().splitlines()[-1].strip("\u2063")


def test_a_reply_streams_and_its_tree_is_drawn(page: Page) -> None:
    page.locator(".specdec-host").evaluate("host => { host.kept = true; }")
    page.wait_for_function("window.Plotly")
    limit(page, 60)
    panel = page.locator("#specdec-panel")
    say(page, LIST)
    early = wait_for_text(page)
    later = wait_for_text(page, len(early) + 5)
    assert later.startswith(early[: len(early) // 2])
    expect(panel.locator(".node.root").first).to_be_visible()
    finish(page)
    assert re.match(r"\d+ tok · \d+ tok/s · \d\.\d tokens/pass · \d+\.\dx plain", figures(page))
    page.locator("#specdec-panel canvas").first.focus()
    marks: set[str] = set()
    for _ in range(60):
        marks |= set(panel.locator("svg.tree .node").evaluate_all("nodes => nodes.map(node => node.getAttribute('class'))"))
        if any("accepted" in mark for mark in marks) and any("rejected" in mark for mark in marks):
            break
        page.keyboard.press("ArrowLeft")
    assert any("accepted" in mark for mark in marks), "no step with an accepted token was found"
    assert any("rejected" in mark for mark in marks), "no step with a rejected token was found"
    assert page.locator(".specdec-host").evaluate("host => host.kept === true"), "the panel was mounted anew"


@pytest.mark.measured
def test_no_task_of_the_main_thread_is_long_while_a_reply_streams(page: Page) -> None:
    page.wait_for_function("window.Plotly")
    limit(page, 60)

    def longest_task() -> float:
        with traced_tasks(page) as tasks:
            say(page, LIST)
            finish(page)
        return max(tasks)

    assert 0 < least(longest_task) <= 100


def test_a_ready_made_prompt_is_one_click(page: Page) -> None:
    limit(page, 4)
    page.get_by_role("button", name="Make a list").first.click()
    expect(page.locator(".user-row")).to_contain_text("List the months")
    finish(page)
    expect(page.get_by_role("button", name="Make a list").first).to_be_hidden()


def test_escape_stops_and_keeps_what_was_said_and_a_second_turn_works(page: Page) -> None:
    say(page, LONG)
    said = wait_for_text(page, 10)
    stop(page)
    assert "stopped" in figures(page)
    assert page.locator(".bot-row").last.inner_text().startswith(said[:10])
    limit(page, 8)
    say(page, "Thank you.")
    finish(page)
    expect(page.locator(".bot-row")).to_have_count(2)
    assert "tok" in figures(page)


def test_hostile_text_is_text(page: Page) -> None:
    limit(page, 4)
    hostile = ["<img src=x onerror=window.hacked=1>", "<b>bold</b>", "<script>window.hacked=1</script>"]
    hostile += ["![i](http://127.0.0.1:1/x.png)", "${hacked}", "{{hacked}}", "<|im_end|>", "</svg>"]
    say(page, " ".join(hostile))
    finish(page)
    message = page.locator(".user-row").last
    shown = message.inner_text().replace("\u2060", "")
    for part in hostile:
        assert part in shown
    assert message.locator("img, b, script").count() == 0
    page.locator("#chats .toggle-button").click()
    title = page.locator(".saved-chats .open")
    expect(title).to_contain_text("<img src=x onerror=window.hacked=1> <b>bold</b> <script>")
    assert title.locator("*").count() == 0
    page.locator("#chats .toggle-button").click()
    page.get_by_role("tab", name="Compare").click()
    expect(page.locator(".race-status")).to_be_visible()
    trace = random_trace(3, nodes=4)
    for step in trace["steps"]:
        step |= {"text": hostile[0], "texts": hostile[:1] * 5, "token_texts": hostile[:1] * 5, "next_text": hostile[0]}
    lane = {"decoding": "tree", "steps": trace["steps"], "figures": trace["steps"][-1]["figures"]}
    receive(page, {"lanes": [lane, lane], "agreement": {"same": True, "tokens": 9}})
    expect(page.locator(".race .lane.home")).to_have_count(2)
    expect(page.locator(".race .said").first).to_have_text(hostile[0] * 3)
    assert page.locator(".race").locator("img, b, script").count() == 0
    assert page.evaluate("window.hacked") is None


def receive(page: Page, payload: dict[str, Any]) -> None:
    """Hand a payload to a race of its own in the Compare tab."""
    page.evaluate(
        """payload => {
            const host = document.createElement("div");
            document.querySelector("#race .race").replaceChildren(host);
            new specdec.Race(host).receive(JSON.stringify(payload));
        }""",
        payload,
    )


def test_a_reload_keeps_the_partial_reply_and_frees_the_engine(page: Page, context: BrowserContext, url: str) -> None:
    say(page, LONG)
    wait_for_text(page, 20)
    page.reload()
    expect(page.locator(".bot-row")).to_be_visible()
    assert len(page.locator(".bot-row").inner_text()) > 20
    expect(page.locator("#box .submit-button")).to_be_visible()
    other = open_page(context, url)
    assert other.locator(".bot-row").count() == 0, "a second tab starts empty"
    say(other, "Hello.")
    wait_for_text(other)
    stop(other)
    assert page.locator(".user-row").inner_text().startswith("Tell a very long story")


def test_two_tabs_chat_at_once_and_do_not_mix(page: Page, context: BrowserContext, url: str) -> None:
    other = open_page(context, url)
    limit(other, 6)
    say(page, LONG)
    wait_for_text(page, 10)
    say(other, "Name a colour.")
    finish(other)
    stop(page)
    expect(other.locator(".user-row")).to_have_text("Name a colour.")
    expect(page.locator(".user-row")).to_have_text(LONG)


def test_edit_regenerate_undo_and_clear(page: Page) -> None:
    limit(page, 5)
    say(page, "Name a colour.")
    finish(page)
    page.get_by_role("button", name="Retry").click()
    page.wait_for_timeout(300)
    finish(page)
    expect(page.locator(".user-row")).to_have_count(1)
    assert figures(page).startswith("5 tok")
    page.get_by_role("button", name="Edit").click()
    page.locator("#chatbot textarea").fill("Name a fruit.")
    page.get_by_role("button", name="Submit").click()
    expect(page.locator(".user-row")).to_have_text("Name a fruit.")
    finish(page)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#box textarea")).to_have_value("Name a fruit.")
    expect(page.locator(".bot-row")).to_have_count(0)
    page.keyboard.press("Enter")
    page.locator("#box textarea").focus()
    page.keyboard.press("Enter")
    expect(page.locator(".bot-row")).to_have_count(1)
    finish(page)
    page.get_by_role("button", name="Clear").click()
    expect(page.locator(".user-row")).to_have_count(0)


def test_saved_chats_are_listed_renamed_exported_and_deleted(page: Page) -> None:
    limit(page, 4)
    say(page, "Name a colour.")
    finish(page)
    page.locator("#chats .toggle-button").click()
    row = page.locator(".saved-chats .row")
    expect(row.locator(".open")).to_have_text("Name a colour.")
    row.locator("summary").click()
    row.get_by_role("button", name="Rename").click()
    page.locator(".saved-chats .rename").fill("Colours")
    page.keyboard.press("Enter")
    expect(row.locator(".open")).to_have_text("Colours")
    for kind, mark in (("Markdown", "# Colours"), ("JSON", '"messages"')):
        row.locator("summary").click()
        with page.expect_download() as download:
            row.get_by_role("button", name=f"Export as {kind}").click()
        assert mark in Path(download.value.path()).read_text(encoding="utf-8")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".user-row")).to_have_count(0)
    row.locator(".open").click()
    expect(page.locator(".user-row")).to_have_text("Name a colour.")
    say(page, "And another?")
    finish(page)
    expect(row.locator(".open")).to_have_text("Colours")
    row.locator("summary").click()
    row.get_by_role("button", name="Delete").click()
    row.get_by_role("button", name="Keep it").click()
    row.locator("summary").click()
    row.get_by_role("button", name="Delete").click()
    row.get_by_role("button", name="Delete it").click()
    expect(page.locator(".saved-chats .row")).to_have_count(0)
    expect(page.locator(".user-row")).to_have_count(0)


def test_the_saved_chats_and_the_theme_need_no_mouse(page: Page) -> None:
    keyboard = page.keyboard
    say(page, LONG)
    wait_for_text(page)
    tab_to(page, "#chats .toggle-button", "Shift+Tab")
    keyboard.press("Enter")
    tab_to(page, ".saved-chats summary")
    keyboard.press("Enter")
    expect(page.locator(".saved-chats .actions")).to_be_visible()
    keyboard.press("Escape")
    expect(page.locator(".saved-chats .actions")).to_be_hidden()
    expect(page.locator(".saved-chats summary")).to_be_focused()
    expect(page.locator("#box .stop-button")).to_be_visible()
    for key in ("Enter", "Tab", "Enter"):
        keyboard.press(key)
    keyboard.type("My story")
    page.locator("#box .stop-button").dispatch_event("click")
    finish(page)
    page.wait_for_function("Object.values(localStorage).some((text) => text.includes('stopped'))")
    keyboard.type(" of the sea")
    keyboard.press("Enter")
    expect(page.locator(".saved-chats .open")).to_have_text("My story of the sea")
    expect(page.locator(".saved-chats summary")).to_be_focused()
    for key in ("Enter", "Tab", "Tab", "Tab", "Tab", "Enter"):
        keyboard.press(key)
    expect(page.get_by_role("button", name="Keep it")).to_be_focused()
    keyboard.press("Enter")
    expect(page.locator(".saved-chats .row")).to_have_count(1)
    expect(page.locator(".saved-chats summary")).to_be_focused()
    for key in ("Enter", "Tab", "Tab", "Tab", "Tab", "Enter", "Tab", "Enter"):
        keyboard.press(key)
    expect(page.locator(".saved-chats .row")).to_have_count(0)
    expect(page.locator("#new-chat")).to_be_focused()
    dark = page.evaluate("document.body.classList.contains('dark')")
    tab_to(page, "[data-action=theme]")
    keyboard.press("Enter")
    assert page.evaluate("document.body.classList.contains('dark')") is not dark


def test_a_menu_opened_again_at_once_offers_everything_again(toy_page: Page) -> None:
    page = toy_page
    say(page, "Hello")
    finish(page)
    page.locator("#chats .toggle-button").click()
    row = page.locator(".saved-chats .row")
    row.locator("summary").click()
    row.get_by_role("button", name="Delete").click()
    row.evaluate("""(row) => {
        const keep = [...row.querySelectorAll("button")].find((button) => button.textContent === "Keep it");
        keep.click();
        row.querySelector("summary").click();
    }""")
    expect(row.locator(".actions button")).to_have_text(["Rename", "Export as Markdown", "Export as JSON", "Delete"])


def test_chats_that_make_room_and_one_that_finds_none_are_told(toy_page: Page) -> None:
    page = toy_page
    page.evaluate("""() => {
        for (let updated = 0; updated < 100; updated++) {
            const record = { id: `${updated}`, title: "old", updated, messages: [] };
            localStorage.setItem(`token-tree-chat:${updated}`, JSON.stringify(record));
        }
    }""")
    limit(page, 2)
    say(page, "Name a colour.")
    finish(page)
    page.locator("#chats .toggle-button").click()
    expect(page.locator(".saved-chats .none")).to_have_text(re.compile("^The oldest chat was deleted to make room"))
    expect(page.locator(".saved-chats .row")).to_have_count(100)
    page.evaluate("""() => {
        const { setItem } = Storage.prototype;
        Storage.prototype.setItem = function (...entry) {
            if (this === localStorage) throw new DOMException("full", "QuotaExceededError");
            setItem.apply(this, entry);
        };
    }""")
    say(page, "Name a fruit.")
    finish(page)
    expect(page.locator(".saved-chats .none").last).to_have_text("This chat is not saved: the browser's storage is full.")


def test_saved_chats_outlive_the_server(browser: Browser, toy_page: Page) -> None:
    limit(toy_page, 4)
    say(toy_page, "Name a colour.")
    finish(toy_page)
    toy_page.wait_for_function("Object.values(localStorage).some((text) => text.includes('4 tok'))")
    state = toy_page.context.storage_state()
    with served(build(Service(tiny_engine()))) as address:
        state["origins"][0]["origin"] = address.rstrip("/")
        with browser.new_context(storage_state=state) as context:
            page = open_page(context, address)
            page.locator("#chats .toggle-button").click()
            page.locator(".saved-chats .open").click()
            expect(page.locator(".user-row")).to_have_text("Name a colour.")
            expect(page.locator(".bot-row")).to_contain_text("4 tok")
            say(page, "And another?")
            finish(page)
            expect(page.locator(".bot-row")).to_have_count(2)


def test_the_web_manifest_names_an_icon_that_is_there(url: str) -> None:
    def fetched(address: str) -> str:
        with urlopen(urljoin(url, address)) as answer:
            return str(answer.read().decode())

    (address,) = re.findall(r'<link rel="manifest" href="([^"]+)"', fetched(""))
    manifest = json.loads(fetched(address))
    assert manifest["name"] == "Token Tree Chat"
    assert "<svg" in fetched(manifest["icons"][0]["src"])


def test_a_system_prompt_is_read_and_a_full_context_and_a_failure_are_told(
    toy_page: Page, toy: tuple[SpeculativeEngine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page, (engine, _) = toy_page, toy
    read: list[str] = []
    request = engine.request

    def watched(prompt: Any, *others: Any, **arguments: Any) -> Any:
        read.append(engine.tokenizer.decode(prompt.token_ids))
        return request(prompt, *others, **arguments)

    monkeypatch.setattr(engine, "request", watched)
    limit(page, 30)
    page.locator("#settings button").first.click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("System prompt").press("Tab")
    for text in ("one " * 9, "two " * 9, "three " * 9):
        say(page, text)
        finish(page)
    assert [text.startswith("<|system|>Be brief.<|end|>") for text in read] == [True] * 3
    prompt = page.evaluate("document.querySelector('.specdec-host').panel.history.toTrace().prompt")
    assert prompt[0] == {"role": "system", "content": "Be brief."}
    reply = page.locator(".bot-row").last
    expect(reply).to_contain_text(re.compile("context full: the oldest .* left out"))
    meter = page.get_by_role("meter")
    expect(meter).to_have_attribute("aria-valuemax", str(engine.target.context_limit))
    expect(meter).to_have_attribute("aria-valuenow", re.compile(r"^(1\d|[7-9])\d$"))
    with monkeypatch.context() as patch:
        patch.setattr(engine.target, "run", broken)
        say(page, "four")
        finish(page)
    expect(reply).to_contain_text("The engine failed (RuntimeError: boom)")
    expect(page.locator("#specdec-panel .notice.error")).to_contain_text("boom")
    say(page, "five")
    finish(page)
    expect(reply).to_contain_text("tok/s")


def test_a_long_reply_of_which_the_panel_lacks_steps_comes_again_whole(
    toy_page: Page, toy: tuple[SpeculativeEngine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page, (engine, _) = toy_page, toy
    run = engine.target.run

    def slow(*arguments: Any) -> Any:
        time.sleep(0.15)  # each step has a payload of its own
        return run(*arguments)

    monkeypatch.setattr(engine.target, "run", slow)
    monkeypatch.setattr("ui.panel.MAX_WHOLE", 0)
    limit(page, 20)
    page.evaluate("""() => {
        const { panel } = document.querySelector(".specdec-host");
        const { receive } = Object.getPrototypeOf(panel);
        panel.receive = (text) => {
            const steps = JSON.parse(text).messages?.flatMap((message) => message.steps ?? []) ?? [];
            const [first] = steps.map((record) => record.index);
            if (first > 0 && first < 3) return; // is lost
            receive.call(panel, text);
            if (panel.history.missing) window.gap = panel.history.gap;
        };
    }""")
    say(page, "Hello")
    finish(page)
    page.wait_for_function("window.gap && !document.querySelector('.specdec-host').panel.history.missing")
    indices = page.evaluate("document.querySelector('.specdec-host').panel.history.toTrace().steps.map(({ index }) => index)")
    assert indices == list(range(len(indices)))
    expect(page.locator("#specdec-panel .notice")).to_have_text("")


def open_reply(page: Page, text: str, question: str = "Hello") -> None:
    """Show a saved chat whose reply is ``text``."""
    messages = [{"role": "user", "text": question}, {"role": "assistant", "text": text, "footer": "4 tok"}]
    page.evaluate(
        """record => {
            localStorage.setItem(`token-tree-chat:${record.id}`, JSON.stringify(record));
            sessionStorage.setItem("token-tree-chat-current", record.id);
        }""",
        {"id": secrets.token_hex(16), "title": "saved", "updated": 1, "messages": messages},
    )
    page.reload()
    expect(page.locator(".bot-row")).to_contain_text("4 tok")
    expect(page.locator("#specdec-panel .specdec")).to_be_visible()


def broken(*_: Any) -> Any:
    raise RuntimeError("boom")


@pytest.fixture
def held(toy: tuple[SpeculativeEngine, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The toy's replies stand still after four steps, and the pass that read the prompt, until this event is set."""
    engine, _ = toy
    run, passes, go = engine.target.run, itertools.count(1), threading.Event()

    def wait(*arguments: Any) -> Any:
        if next(passes) > 5:
            assert go.wait(60)
        return run(*arguments)

    monkeypatch.setattr(engine.target, "run", wait)
    yield go
    go.set()


def four_steps(page: Page) -> None:
    """Wait until the panel shows the fourth step of the reply."""
    page.wait_for_function("""() => {
        const { feed, history } = document.querySelector(".specdec-host").panel;
        return history === feed.live && history.length >= 4;
    }""")


FIRST_SCREEN = [
    "#specdec-panel svg.tree",
    "#specdec-panel .equation",
    "#specdec-panel .scrubber",
    "#specdec-panel .figures",
    "#specdec-panel .chart:has-text('Running speedup')",
    "#specdec-panel .strip-card header",
]


@pytest.mark.parametrize(("width", "height"), [(1920, 1080), (1440, 900), (1280, 800)])
def test_tree_sentence_scrubber_figures_and_speedup_are_in_sight_without_scrolling_live_and_finished(
    toy_page: Page, held: threading.Event, width: int, height: int
) -> None:
    page = toy_page
    page.set_viewport_size({"width": width, "height": height})
    page.wait_for_function("window.Plotly")
    say(page, "Hello")
    four_steps(page)
    page.wait_for_function("document.querySelector('.summary .plot:not(.blank) .scatterlayer')")
    for part in FIRST_SCREEN:
        expect(page.locator(part)).to_be_in_viewport(ratio=1)
    held.set()
    finish(page)
    for part in FIRST_SCREEN:
        expect(page.locator(part)).to_be_in_viewport(ratio=1)
    page.get_by_role("button", name="New chat").dispatch_event("click")
    expect(page.locator("#specdec-panel .state")).to_have_text("recorded example")
    for part in FIRST_SCREEN[:-1]:
        expect(page.locator(part)).to_be_in_viewport(ratio=1)


def test_the_strip_is_as_high_as_its_text(toy_page: Page) -> None:
    limit(toy_page, 5)
    toy_page.set_viewport_size({"width": 1440, "height": 900})
    say(toy_page, "Hello")
    finish(toy_page)
    heights = "strip => [strip.clientHeight, strip.querySelector('.line').offsetHeight]"
    height, line = toy_page.locator(".strip").evaluate(heights)
    assert height < 2 * line


def test_a_phone_has_a_line_with_tree_and_speedup_in_sight_while_a_reply_streams(toy_page: Page, held: threading.Event) -> None:
    page = toy_page
    page.set_viewport_size({"width": 390, "height": 844})
    line = page.locator("#slim button")
    expect(line).to_be_hidden()
    say(page, "Hello")
    four_steps(page)
    expect(line).to_be_in_viewport(ratio=1)
    expect(line).to_have_text(re.compile(r"\d+ tokens?\d+\.\d\d×plain speed"))
    assert line.locator("circle.root").count() == 1
    assert line.locator("circle").count() > 1
    held.set()
    finish(page)
    expect(line).to_be_hidden()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_reply_is_announced_once_it_is_done_and_the_chat_is_busy_until_then(toy_page: Page, held: threading.Event) -> None:
    page = toy_page
    log, said = page.locator("#chatbot [role=log]"), page.locator("#said")
    say(page, "Hello")
    four_steps(page)
    expect(log).to_have_attribute("aria-busy", "true")
    expect(log).to_have_attribute("aria-live", "off")
    expect(said).to_have_attribute("aria-live", "polite")
    expect(said).to_be_empty()
    held.set()
    expect(said).to_have_text(re.compile(r"\d+ tok ·"))
    expect(log).to_have_attribute("aria-busy", "false")
    page.get_by_role("button", name="New chat").dispatch_event("click")
    expect(page.locator(".user-row")).to_have_count(0)
    expect(log).to_have_attribute("aria-busy", "false")


TRANSLATE = """() => {
    // as a browser does: every text that is not excluded becomes a font element, as soon as it is there
    const excluded = (node) => node.parentElement?.closest("[translate=no], font, script, style, textarea");
    const translate = () => {
        const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
        const texts = [];
        while (walk.nextNode()) if (walk.currentNode.data.trim() && !excluded(walk.currentNode)) texts.push(walk.currentNode);
        for (const text of texts) {
            const font = document.createElement("font");
            font.textContent = `[${text.data}]`;
            text.replaceWith(font);
        }
    };
    new MutationObserver(translate).observe(document.body, { childList: true, subtree: true, characterData: true });
    translate();
}"""


def test_a_translated_page_streams_and_panel_strip_and_code_are_left_alone(toy_page: Page, held: threading.Event) -> None:
    page, errors = toy_page, []
    page.on("pageerror", lambda error: errors.append(str(error)))
    say(page, "Hello")
    four_steps(page)
    page.evaluate(TRANSLATE)
    held.set()
    finish(page)
    reply = page.locator(".bot-row [data-testid=bot]").first
    expect(reply.locator("font").first).to_be_attached()
    assert page.locator("#specdec-panel font, .strip font, .saved-chats font").count() == 0
    say(page, "Again")
    finish(page)
    expect(page.locator(".bot-row")).to_have_count(2)
    expect(page.locator(".bot-row").last).to_contain_text("tok/s")
    page.evaluate("window.before = document.querySelector('.specdec-host').panel.history")
    page.get_by_role("button", name="Retry").last.click()
    page.wait_for_function("document.querySelector('.specdec-host').panel.history !== window.before")  # it is written anew
    finish(page)
    expect(page.locator(".bot-row").last).to_contain_text("tok/s")
    open_reply(page, "some `code`\n\n```python\nmore = 1\n```")
    page.evaluate(TRANSLATE)
    expect(page.locator(".bot-row font").first).to_be_attached()
    assert page.locator(".bot-row code font").count() == 0
    assert errors == []


HEBREW, ENGLISH = "שלום, זה Chat.", "And this is English."


def test_text_from_right_to_left_runs_that_way_in_messages_input_and_side_bar(toy_page: Page) -> None:
    page = toy_page
    open_reply(page, f"1. {HEBREW}\n2. {HEBREW}\n\n{ENGLISH}", question=HEBREW)
    direction = "element => getComputedStyle(element).direction"
    begins = """element => {
        const range = document.createRange();
        range.selectNodeContents(element);
        const [text, box] = [range.getClientRects()[0], element.getBoundingClientRect()];
        return Math.abs(text.left - box.left) < Math.abs(text.right - box.right) ? "left" : "right";
    }"""
    reply = page.locator(".bot-row [data-testid=bot]").first
    assert reply.locator("li").first.evaluate(direction) == "rtl"
    assert reply.locator("p").last.evaluate(begins) == "left", "a paragraph in English stands where English does"
    assert page.locator(".user-row [data-testid=user]").evaluate(direction) == "rtl"
    page.locator("#box textarea").fill(HEBREW)
    assert page.locator("#box textarea").evaluate(direction) == "rtl"
    page.locator("#box textarea").fill(ENGLISH)
    assert page.locator("#box textarea").evaluate(direction) == "ltr"


TYPED = "__init__ and *stars* `code` [a](b) $$x$$ &amp; <b>\n# not a heading\n    indented  twice\n\n- not a list\n1. nor this"


def test_what_a_user_types_is_shown_as_typed_and_edited_as_typed(toy_page: Page) -> None:
    page = toy_page
    limit(page, 2)
    message = page.locator(".user-row [data-testid=user]")
    say(page, TYPED)
    finish(page)
    assert message.inner_text() == TYPED
    assert message.locator("strong, em, code, h1, li, a, pre, .katex").count() == 0
    page.get_by_role("button", name="Edit").click()
    expect(page.locator("#chatbot textarea")).to_have_value(TYPED)
    page.get_by_role("button", name="Submit").click()
    expect(page.locator("#chatbot textarea")).to_have_count(0)
    finish(page)
    shown = "typed => document.querySelector('.user-row [data-testid=user]').innerText === typed"
    page.wait_for_function(shown, arg=TYPED)  # until the page has it back, Gradio draws the edited text as Markdown


def test_the_retry_button_says_where_its_text_must_come_out_the_same(toy_page: Page) -> None:
    page = toy_page
    limit(page, 2)
    say(page, "Hello")
    finish(page)
    retry = page.locator("#chatbot button[title^=Retry]")
    expect(retry).to_have_attribute("title", "Retry (gives the same text: the temperature is 0)")
    page.locator("#settings button").first.click()
    page.locator("#temperature input").fill("1")
    expect(retry).to_have_attribute("title", "Retry")
    page.locator("#seed input").fill("7")
    page.locator("#seed input").press("Tab")
    page.locator("#settings button").first.click()
    expect(retry).to_have_attribute("aria-label", "Retry (gives the same text: the seed is set)")
    retry.click()
    expect(page.locator(".bot-row")).to_contain_text("seed 7")


def test_keys_of_an_input_method_do_nothing_else(toy_page: Page, held: threading.Event) -> None:
    page = toy_page
    press = """([selector, key]) => {
        const place = selector ? document.querySelector(selector) : document.body;
        return place.dispatchEvent(new KeyboardEvent("keydown", { key, isComposing: true, bubbles: true, cancelable: true }));
    }"""
    say(page, "Hello")
    four_steps(page)
    position = page.evaluate("document.querySelector('.specdec-host').panel.playback.position")
    for key in ("Escape", "/", "ArrowLeft"):
        assert page.evaluate(press, ["", key]), "its default action is left to the input method"
    assert page.evaluate("document.querySelector('.specdec-host').panel.playback.position") == position
    page.locator("#chats .toggle-button").click()
    page.locator(".saved-chats summary").click()
    page.locator(".saved-chats .row").get_by_role("button", name="Rename").click()
    field = page.locator(".saved-chats .rename")
    field.fill("かんじ")
    for key in ("Enter", "Escape"):
        assert page.evaluate(press, [".saved-chats .rename", key])
    expect(field).to_have_value("かんじ")
    expect(page.locator("#box .stop-button")).to_be_visible()
    field.press("Enter")
    expect(page.locator(".saved-chats .open")).to_have_text("かんじ")


def test_keys_alone_are_enough(page: Page) -> None:
    page.locator("h1").click()
    page.keyboard.press("/")
    expect(page.locator("#box textarea")).to_be_focused()
    page.keyboard.type("Two")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines")
    expect(page.locator("#box textarea")).to_have_value("Two\nlines")
    page.keyboard.press("Enter")
    expect(page.locator("#box .stop-button")).to_be_visible()
    expect(page.locator("#box textarea")).to_have_value("")
    wait_for_text(page)
    stop(page)
    expect(page.locator("#box textarea")).to_be_focused()


def test_the_audit_stands_below_the_reply(page: Page) -> None:
    limit(page, 12)
    say(page, "Name a colour.")
    finish(page)
    page.get_by_role("button", name="Audit the reply").click()
    expect(page.locator(".bot-row").last).to_contain_text(
        re.compile(
            r"audit( ✓)?: the model alone would choose the same token at .+\.\s*\d+ of \d+ tokens are the target's own choice"
        )
    )


def test_a_comparison_is_replayed_and_its_badge_tells_who_agrees(page: Page) -> None:
    page.get_by_role("tab", name="Compare").click()
    page.get_by_role("button", name="Make a list").click()
    page.get_by_label("Max tokens").last.fill("24")
    page.get_by_label("plain").first.focus()
    page.get_by_role("button", name="Run the comparison").click()
    expect(page.locator(".race-badge")).to_be_visible(timeout=60_000)
    expect(page.locator(".race .lane")).to_have_count(3)
    expect(page.locator(".race .lane.home")).to_have_count(3, timeout=30_000)
    expect(page.locator(".race-headline")).to_contain_text(re.compile(r"times as fast as plain|fastest"))
    expect(page.locator(".race-controls")).to_contain_text("replay")
    badge = "agreement => new specdec.Race(document.createElement('div')).badge(agreement).textContent"
    tree = {"lanes": ["tree"], "position": 1, "margin": 0.0625, "why": "rounding decides near ties in bfloat16"}
    both = {"lanes": ["linear", "tree"], "position": 12, "margin": 3, "why": "this should not happen in float32"}
    assert page.evaluate(badge, {"same": False, "lanes": ["plain", "linear"], "apart": [tree]}) == (
        "≠ Plain and linear give the same text. Tree differs from plain and linear from token 2 on. "
        "There the target's first two choices were 0.0625 logits apart (rounding decides near ties in bfloat16)."
    )
    assert page.evaluate(badge, {"same": False, "lanes": ["plain"], "apart": [both]}) == (
        "≠ Linear and tree give the same text. They differ from plain from token 13 on. There the target's first two choices "
        "were 3.0000 logits apart (this should not happen in float32)."
    )


def test_a_comparison_takes_two_lanes_not_one_and_can_be_stopped_and_replayed_slowly(page: Page) -> None:
    page.get_by_role("tab", name="Compare").click()
    prompt, lanes = page.locator("#compare-prompt textarea"), page.locator("#compare-fields")
    page.locator("h1").click()
    page.keyboard.press("/")
    expect(prompt).to_be_focused()
    prompt.fill("Name a colour.")
    page.get_by_label("Max tokens").last.fill("16")
    lanes.get_by_label("linear").uncheck()
    run = page.get_by_role("button", name="Run the comparison")
    run.click()
    expect(page.locator(".race-badge")).to_be_visible(timeout=60_000)
    assert page.locator(".race .lane h3").all_inner_texts() == ["Plain", "Tree"]
    page.get_by_label("replay speed").select_option("1/2 of true speed")  # which replays it
    pace = page.evaluate("""async () => {
        const wait = (time) => new Promise((resolve) => setTimeout(resolve, time));
        const clock = () => parseFloat(document.querySelector(".race-clock").textContent);
        await wait(100);
        const [start, began] = [performance.now(), clock()];
        await wait(300);
        return (1000 * (clock() - began)) / (performance.now() - start);
    }""")
    assert 0 < pace < 0.8
    expect(page.locator(".race .lane.home")).to_have_count(2)
    lanes.get_by_label("plain").uncheck()
    run.click()
    expect(page.locator(".race-status.error")).to_have_text("A comparison needs a prompt and at least two lanes.")
    lanes.get_by_label("plain").check()
    prompt.fill(LONG)
    page.get_by_label("Max tokens").last.fill("512")
    run.click()
    expect(page.locator(".race-status")).to_have_text("Lane 1 of 2: plain")
    page.locator("#compare-stop").click()
    expect(page.locator(".race-status")).to_have_text("Stopped.")
    expect(run).to_be_enabled()


def test_390_pixels_are_enough(context: BrowserContext, url: str) -> None:
    page = context.new_page()
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(url)
    limit(page, 12)
    say(page, "Name a colour.")
    wait_for_text(page)
    finish(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    panel = page.locator("#specdec-panel").bounding_box()
    chat = page.locator("#chat-column").bounding_box()
    assert panel is not None
    assert chat is not None
    assert panel["y"] >= chat["y"] + chat["height"], "the panel stands below the chat"
    page.get_by_role("tab", name="Compare").click()
    expect(page.locator("#compare-run")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    fields = page.locator("input, textarea, select")
    sizes = fields.evaluate_all("fields => fields.map((field) => parseFloat(getComputedStyle(field).fontSize))")
    assert min(sizes) >= 16, "below that iOS zooms in on focus"


def test_light_and_dark_can_be_switched_and_stay(page: Page) -> None:
    dark = page.evaluate("document.body.classList.contains('dark')")
    page.locator("[data-action=theme]").click()
    assert page.evaluate("document.body.classList.contains('dark')") is not dark
    page.reload()
    expect(page.locator("#box .submit-button")).to_be_visible()
    assert page.evaluate("document.body.classList.contains('dark')") is not dark


def test_a_whole_visit_needs_no_mouse(page: Page) -> None:
    keyboard, title = page.keyboard, page.locator(".specdec h2").first
    expect(page.locator("#box textarea")).to_be_focused()
    tab_to(page, "#settings button")
    keyboard.press("Enter")
    tab_to(page, "#decoding input")
    keyboard.press("ArrowRight")
    expect(page.get_by_label("linear").first).to_be_checked()
    keyboard.press("ArrowLeft")
    tab_to(page, "#max-tokens input")
    keyboard.press("ControlOrMeta+a")
    keyboard.type("40")
    tab_to(page, "#settings button", "Shift+Tab")
    keyboard.press("Enter")
    keyboard.press("/")
    keyboard.type(LONG)
    keyboard.press("Enter")
    wait_for_text(page)
    finish(page)
    assert figures(page).startswith("40 tok")
    tab_to(page, "#audit")
    keyboard.press("Enter")
    expect(page.locator(".bot-row").last).to_contain_text("the target's own choice")
    tab_to(page, ".specdec [data-node='0']")
    expect(page.locator(".node-details")).to_contain_text("last committed token")
    keyboard.press("ArrowRight")
    expect(page.locator(".node-details")).to_contain_text("token id")
    tab_to(page, ".specdec .beats button")
    keyboard.press("Enter")
    expect(page.locator(".specdec svg.tree").first).to_have_attribute("data-beat", re.compile("grow|verify|prune"))
    tab_to(page, ".specdec .scrubber")
    keyboard.press("Home")
    expect(title).to_have_text("Step 1")
    keyboard.press("End")
    expect(title).not_to_have_text("Step 1")
    keyboard.press("Home")
    keyboard.press("Space")
    expect(page.get_by_label("Pause")).to_be_visible()
    keyboard.press("Space")
    expect(page.get_by_label("Play", exact=True)).to_be_visible()
    tab_to(page, ".specdec .menu summary", "Shift+Tab")
    keyboard.press("Enter")
    keyboard.press("Tab")
    with page.expect_download():
        keyboard.press("Enter")
    tab_to(page, "#tabs > .tab-wrapper [role=tab]:last-of-type", "Shift+Tab")
    keyboard.press("Enter")
    expect(page.locator("#compare-prompt textarea")).to_be_visible()
    tab_to(page, "#compare-prompt textarea")
    keyboard.press("ControlOrMeta+a")
    keyboard.type("Name a colour.")
    tab_to(page, "#compare-run")
    keyboard.press("Enter")
    expect(page.locator(".race-badge")).to_be_visible(timeout=60_000)
    tab_to(page, ".race-play")
    keyboard.press("Enter")
    expect(page.locator(".race .lane.home")).to_have_count(3, timeout=30_000)


def tab_to(page: Page, selector: str, key: str = "Tab") -> None:
    """Press Tab until the focus is on what ``selector`` says."""
    for _ in range(60):
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
        page.keyboard.press(key)
    raise AssertionError(f"{selector} cannot be reached by {key}")


@pytest.mark.parametrize(("theme", "width"), [("light", 1440), ("dark", 1440), ("light", 390)])
def test_axe_finds_no_serious_violation(context: BrowserContext, url: str, theme: Literal["light", "dark"], width: int) -> None:
    page = context.new_page()
    page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 844})
    page.goto(url)
    page.wait_for_function("window.Plotly && document.querySelector('.specdec-host')?.panel?.history.length > 0")
    found = [("the start page", axe(page))]
    limit(page, 24)
    say(page, "Name a colour.")
    finish(page)
    page.locator("#settings button").first.click()
    page.wait_for_timeout(500)
    found.append(("a reply, with settings open", axe(page)))
    page.locator(".menu summary").last.click()
    found.append(("the panel's menu", axe(page)))
    page.keyboard.press("Escape")
    page.locator("#chats .toggle-button").click()
    page.wait_for_timeout(500)
    found.append(("the saved chats", axe(page)))
    page.locator("#chats .toggle-button").click()
    page.get_by_role("tab", name="Compare").click()
    page.get_by_label("Max tokens").last.fill("16")
    page.get_by_role("button", name="Run the comparison").click()
    expect(page.locator(".race .lane.home")).to_have_count(3, timeout=60_000)
    page.add_style_tag(content=".race .said { height: 24px !important; }")
    assert page.locator(".race .said").first.evaluate("said => said.scrollHeight > said.clientHeight"), "it is to scroll"
    page.wait_for_timeout(500)  # the buttons fade in again
    found.append(("a comparison", axe(page)))
    assert [(where, violation) for where, violations in found for violation in violations] == []


def test_axe_finds_no_serious_violation_in_an_audit_on_a_dark_phone(context: BrowserContext, url: str) -> None:
    page = context.new_page()
    page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(url)
    limit(page, 4)
    say(page, "Name a colour.")
    finish(page)
    page.get_by_role("button", name="Audit the reply").click()
    expect(page.locator(".bot-row").last).to_contain_text("the target's own choice")
    assert axe(page) == []


def axe(page: Page) -> list[str]:
    """What axe-core calls serious or critical on the page as it is."""
    violations = Axe().run(page).response["violations"]
    return [
        f"{violation['id']}: {node['target']} {node['failureSummary']}"
        for violation in violations
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]


NOT_CODE = """\\`<img src="https://elsewhere.invalid/escaped">`

``` a`b
<img src="https://elsewhere.invalid/info-string">

# a `
<img src="https://elsewhere.invalid/two-blocks"> `

<form action="https://elsewhere.invalid/form" style="background: url(https://elsewhere.invalid/style)"><input></form>

![image](https://elsewhere.invalid/image)

\\(\\includegraphics{https://elsewhere.invalid/math}\\)

```mermaid
graph TD; A[<img src="https://elsewhere.invalid/diagram">]-->B
```

- ```
  code

<img src="https://elsewhere.invalid/after-a-list">

text
    ```
<img src="https://elsewhere.invalid/indented">"""
"""What a reader may take for code, or for harmless, and Gradio's Markdown does not."""


def test_what_only_looks_like_code_is_inert_too(toy_page: Page) -> None:
    page = toy_page
    open_reply(page, NOT_CODE)
    message = page.locator(".bot-row")
    expect(message).to_contain_text("elsewhere.invalid/diagram")
    page.wait_for_timeout(500)  # whatever were active would begin to load
    assert message.locator("img, form, input, .mermaid, [style*=url]").count() == 0


def test_a_link_leads_to_the_web_and_nowhere_else(toy_page: Page) -> None:
    page = toy_page
    hostile = [
        "javascript:window.hacked=1",
        "javascrip&#9;t:window.hacked=1",
        "javascrip&Tab;t:window.hacked=1",
        "data:text/html,x",
    ]
    open_reply(
        page, " ".join(f"[link]({address})" for address in [*hostile, "file:///etc/passwd", "https://elsewhere.invalid/"])
    )
    links = page.locator(".bot-row a")
    expect(links).to_have_count(6)
    for number in range(5):
        links.nth(number).evaluate("link => { link.target = '_self'; link.click(); }")
    page.wait_for_timeout(300)
    assert page.evaluate("window.hacked") is None
    expect(page.locator("#box .submit-button")).to_be_visible()
    assert len(page.context.pages) == 1
    expect(links.last).to_have_attribute("href", "https://elsewhere.invalid/")


def test_even_a_live_tag_would_load_nothing_from_elsewhere(browser: Browser, url: str) -> None:
    with browser.new_context() as context:
        page = open_page(context, url)
        refused = page.evaluate("""async () => {
            const refused = new Set();
            addEventListener("securitypolicyviolation", (event) => refused.add(event.effectiveDirective));
            const there = location.origin.replace("127.0.0.1", "127.0.0.2");
            const host = document.body.appendChild(document.createElement("div"));
            host.innerHTML = `<img src="${there}/a"><video src="${there}/b"></video><iframe src="${there}/c"></iframe>
                <object data="${there}/d"></object><link rel="stylesheet" href="${there}/e"><form action="${there}/f"></form>
                <style>@font-face { font-family: there; src: url(${there}/g) }</style><p style="font-family: there">text</p>`;
            host.querySelector("form").submit();
            await new Promise((resolve) => setTimeout(resolve, 1000));
            return [...refused].sort();
        }""")
        assert refused == ["font-src", "form-action", "frame-src", "img-src", "media-src", "object-src", "style-src-elem"]


CODE = '<div class="a">\n  <b>wow![0]</b>\n</div>'


def test_what_is_copied_is_the_text_itself(toy_page: Page) -> None:
    page = toy_page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    text = f"Is <b> a **tag**?\n\n```html\n{CODE}\n```"
    open_reply(page, text, question=text)
    message = page.locator(".bot-row [data-testid=bot]").first
    message.locator(".copy_code_button").click()
    assert copied(page) == CODE
    message.locator("pre").evaluate("code => getSelection().selectAllChildren(code)")
    page.keyboard.press("ControlOrMeta+c")
    assert copied(page).strip() == CODE
    message.locator("p").first.evaluate("paragraph => getSelection().selectAllChildren(paragraph)")
    page.keyboard.press("ControlOrMeta+c")
    assert copied(page).strip() == "Is <b> a tag?"
    assert re.search(r"Is &lt;b&gt; a <strong[^>]*>tag</strong>", copied(page, "text/html"))
    page.locator(".bot-row").evaluate("reply => getSelection().selectAllChildren(reply)")
    page.keyboard.press("ControlOrMeta+c")
    assert "\u2063" not in copied(page)
    assert "4 tok" in copied(page)
    for button in (page.get_by_role("button", name="Copy message").first, page.get_by_role("button", name="Copy message").last):
        button.click()
        assert copied(page) == text
    page.get_by_role("button", name="Edit").click()
    page.locator("#chatbot textarea").press("ControlOrMeta+a")
    page.keyboard.press("ControlOrMeta+c")
    assert copied(page) == text


def copied(page: Page, kind: str = "text/plain") -> str:
    read = "async (kind) => (await (await navigator.clipboard.read())[0].getType(kind)).text()"
    return str(page.evaluate(read, kind))


def test_all_of_a_visit_fits_390_pixels(context: BrowserContext, url: str) -> None:
    page = context.new_page()
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(url)
    limit(page, 12)
    say(page, LIST)
    finish(page)
    assert figures(page).startswith("12 tok")
    page.get_by_role("button", name="Audit the reply").click()
    expect(page.locator(".bot-row").last).to_contain_text("the target's own choice")
    title = page.locator("#specdec-panel h2").first
    scrubber = page.locator("#specdec-panel .scrubber")
    scrubber.click(position={"x": 2, "y": 20})
    expect(title).to_have_text("Step 1")
    menu = page.locator("#specdec-panel .menu")
    for name in ("Tree as SVG", "Tree as PNG", "Tree as GraphML", "Reply as trace (JSON)", "Reply as a web page"):
        menu.locator("summary").click()
        entry = menu.get_by_role("button", name=name)
        expect(entry).to_be_in_viewport(ratio=1)
        with page.expect_download():
            entry.click()
    page.locator("#chats .toggle-button").click()
    row = page.locator(".saved-chats .row .open")
    expect(row).to_be_in_viewport(ratio=1)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".user-row")).to_have_count(0)
    row.click()
    expect(page.locator(".user-row")).to_have_text(LIST)
    page.locator("#chats .toggle-button").click()
    expect(row).not_to_be_in_viewport()
    page.get_by_role("tab", name="Compare").click()
    page.locator("#compare-prompt textarea").fill("Name a colour.")
    page.get_by_label("Max tokens").last.fill("16")
    page.get_by_role("button", name="Run the comparison").click()
    expect(page.locator(".race .lane.home")).to_have_count(3, timeout=60_000)
    expect(page.locator(".race-headline")).to_contain_text(re.compile(r"times as fast as plain|fastest"))
    lanes = page.locator(".race .lane").evaluate_all("lanes => lanes.map((lane) => lane.offsetHeight)")
    assert sum(lanes) <= 3 * 320, "three lanes are little more than a screen"
    page.locator(".race-play").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_code_in_every_language_is_shown(toy_page: Page) -> None:
    languages = ["cpp", "php", "python", "latex", "bash", "json", "sql", "java", "go", "rust", "yaml", "html", "css", "js", "c"]
    open_reply(toy_page, "\n\n".join(f"```{language}\ncode in {language}\n```" for language in languages))
    expect(toy_page.locator(".bot-row pre")).to_have_text([re.compile(f"code in {language}") for language in languages])


def test_a_new_chat_during_a_reply_leaves_nothing_live_and_loses_nothing(page: Page) -> None:
    say(page, LONG)
    seen = wait_for_text(page, 20).strip()
    page.get_by_role("button", name="New chat").dispatch_event("click")
    expect(page.locator(".user-row")).to_have_count(0)
    expect(page.locator("#specdec-panel .state")).to_have_text("recorded example")
    expect(page.locator(".live-button")).to_be_hidden()
    finish(page)
    assert stored_reply(page).startswith(seen)
    page.locator("#chats .toggle-button").click()
    page.locator(".saved-chats .open").click()
    wait_for_text(page, 20)
    expect(page.locator("#box .submit-button")).to_be_visible()


def test_a_closed_tab_leaves_its_partial_reply_in_the_browser(page: Page, context: BrowserContext, url: str) -> None:
    say(page, LONG)
    seen = wait_for_text(page, 20).strip()
    assert stored_reply(page) == "", "it is not stored at every step"
    page.goto("about:blank")
    assert stored_reply(open_page(context, url)).startswith(seen)


def test_an_exported_chat_does_not_tell_its_id(page: Page) -> None:
    limit(page, 2)
    say(page, "Name a colour.")
    finish(page)
    page.locator("#chats .toggle-button").click()
    page.locator(".saved-chats summary").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export as JSON").click()
    assert "id" not in json.loads(Path(download.value.path()).read_text(encoding="utf-8"))


def stored_reply(page: Page) -> str:
    """The last reply of the only chat that the browser has stored."""
    stored = "Object.keys(localStorage).filter((key) => key.startsWith('token-tree-chat:')).map((key) => localStorage[key])"
    (record,) = page.evaluate(stored)
    return str(json.loads(record)["messages"][-1]["text"])


def test_two_visitors_chat_at_once_and_each_sees_their_own_tree(browser: Browser) -> None:
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer())
    assert engine.pass_cost, "measured before a test holds the passes"
    engine.model.generation_config.suppress_tokens = [0, 1, 2, 3]  # so that no reply ends before the other begins
    run, shared, both_seen = engine.target.run, itertools.count(1), threading.Event()

    def held(spans: Any) -> Any:
        """A lone reply is slow, so that another can join it; a pass that two share waits until both pages were looked at."""
        if len(spans) == 1:
            both_seen.wait(0.05)
        elif next(shared) > 4:
            assert both_seen.wait(60)
        return run(spans)

    engine.target.run = held  # type: ignore[method-assign]
    texts = ["the cat sat on the mat", "one, two, one, two"]
    with (
        served(build(Service(engine), parallel=2), **launch_arguments()) as address,
        browser.new_context() as one,
        browser.new_context() as other,
    ):
        pages = [open_page(context, address) for context in (one, other)]
        for page, text in zip(pages, texts, strict=True):
            say(page, text)
        drawn = []
        for page in pages:
            panel = page.locator("#specdec-panel")
            expect(panel).to_contain_text("2 replies share this pass.", timeout=30_000)
            expect(panel.locator("svg.tree").first).to_be_visible()
            drawn.append(panel.inner_text())
        assert drawn[0] != drawn[1]
        both_seen.set()
        for page, text in zip(pages, texts, strict=True):
            finish(page)
            alone = SpeculativeEngine(engine.model, tokenizer()).generate(
                [{"role": "user", "content": text}], do_sample=False, max_new_tokens=512
            )
            said = page.locator(".bot-row").last.locator("[data-testid=bot]").first.inner_text()
            letters = re.compile(r"[a-zA-Z]+")
            assert letters.findall(said)[:8] == letters.findall(alone)[:8]
