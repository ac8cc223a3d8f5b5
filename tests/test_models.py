"""Another model for the chats that are there: loaded between two replies, or refused in one line with nothing changed."""

from __future__ import annotations

import gc
import json
import re
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
from browser import launch_browser, served
from playwright.sync_api import expect, sync_playwright
from test_chat import QUESTION, SECOND, VALUES, broken, next_text, send, tab, texts, wait_for
from toys import ARCHITECTURES, tiny_model, tokenizer

from specdec.embedded import Progress
from specdec.engine import SpeculativeEngine
from specdec.folders import cache_folder
from specdec.serving.line import Line
from specdec.serving.service import Service
from ui.handlers import ChatHandlers
from ui.models import SUGGESTIONS, Models, ModelSection
from ui.page import build
from ui.settings import Settings


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A model in a folder."""
    folder = tmp_path / "other-model"
    tiny_model(ARCHITECTURES["qwen2"], seed=3).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


LOADING = {"device": "cpu", "dtype": "float32"}


def section() -> tuple[ChatHandlers, ModelSection]:
    handlers = ChatHandlers(Service(SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer())), memory=True)
    assert handlers.memory_store is not None
    handlers.memory_store.open()
    with gr.Blocks():
        models = Models(handlers.replies, handlers.tabs, handlers.memory_store, LOADING)
        return handlers, ModelSection(models, handlers.replies, gr.HTML(), lambda: handlers.model_facts["name"])


def last_line(frames: Iterator[Any]) -> str:
    *_, last = frames
    return str(last[0])


def reply(folder: Path, *turns: str) -> str:
    """What the model in ``folder`` says to the last of ``turns`` (questions and replies)."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    return SpeculativeEngine(str(folder), **LOADING).generate(messages, **Settings.read(*VALUES).arguments())


def test_a_chat_goes_on_with_the_new_model_and_the_old_one_is_freed(other: Path) -> None:
    handlers, models = section()
    send(handlers, QUESTION)
    old = weakref.ref(handlers.engine), weakref.ref(handlers.engine.memory)
    assert "other-model is ready" in last_line(models.load(str(other), tab()))
    gc.collect()
    assert [reference() for reference in old] == [None, None]
    send(handlers, SECOND)
    first, second = texts(handlers.tabs.chat("tab"))[1::2]
    assert second == reply(other, QUESTION, first, SECOND)
    assert handlers.model_facts["name"] == "other-model"


def test_memory_follows_the_model(other: Path) -> None:
    handlers, models = section()
    store = handlers.memory_store
    assert store is not None
    send(handlers, QUESTION)
    assert store.memory is not None
    path, known = store.path, len(store.memory)
    list(models.load(str(other), tab()))
    assert store.path != path
    assert len(store.memory) == 0
    assert path is not None
    assert path.exists(), "what the old model's chats taught is saved"
    store.memory.load(path)
    assert len(store.memory) == known


@pytest.mark.parametrize("name", ["/no/such/folder", "not a name!", "{tmp}"])
def test_what_cannot_be_loaded_is_one_line_and_the_present_model_stays(name: str, tmp_path: Path) -> None:
    handlers, models = section()
    engine = handlers.engine
    line = last_line(models.load(name.replace("{tmp}", str(tmp_path)), tab()))
    assert "\n" not in line
    assert "--model" not in line
    assert f"Still {engine.name}." in line
    assert handlers.engine is engine
    send(handlers, QUESTION)
    assert handlers.tabs.chat("tab").messages[1].state == "done"


def test_a_model_that_cannot_chat_is_refused(other: Path) -> None:
    (other / "chat_template.jinja").unlink()
    handlers, models = section()
    assert "chat template" in last_line(models.load(str(other), tab()))
    assert handlers.model_facts["name"] != "other-model"


def test_loading_can_be_stopped(other: Path) -> None:
    handlers, models = section()
    frames = models.load(str(other), tab())
    next(frames)
    models.stop(tab())
    assert "Stopped." in last_line(frames)
    assert handlers.model_facts["name"] != "other-model"


@contextmanager
def busy(handlers: ChatHandlers) -> Iterator[Line]:
    """While open, somebody else has the engine; the line before it."""
    line = handlers.replies.line
    with line.turn("somebody", lambda: False, lambda ahead: None):
        yield line


def test_each_tab_stops_its_own_loading_and_sees_its_place(other: Path) -> None:
    handlers, models = section()
    with busy(handlers):
        first, second = models.load(str(other), tab("a")), models.load(str(other), tab("b"))
        lines = [next(frames)[0] for frames in (first, second) for _ in range(3)]
        assert "Waiting: 1 reply is ahead of this one" in str(lines[:3])
        assert "Waiting: 2 replies are ahead of this one" in str(lines[3:])
        models.stop(tab("a"))
        assert "Stopped." in last_line(first)
    assert "other-model is ready" in last_line(second)


def test_a_tab_that_goes_away_ends_its_loading(other: Path) -> None:
    handlers, models = section()
    with busy(handlers) as line:
        frames = models.load(str(other), tab())
        for _ in range(4):  # it is told of nothing, too: else nobody would notice that the tab is gone
            next(frames)
        frames.close()  # type: ignore[attr-defined]
        wait_for(lambda: not line.waiting)


def test_whatever_a_model_fails_with_is_one_line_and_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers, models = section()
    monkeypatch.setattr("ui.models.chat_engine", lambda *_, **__: broken())
    *_, (line, _, _, load, stop) = models.load("any", tab())
    assert "RuntimeError: boom" in line
    assert f"Still {handlers.engine.name}." in line
    assert (load["interactive"], stop["visible"]) == (True, False)


def test_a_trace_names_the_model_that_wrote_the_reply(other: Path) -> None:
    handlers, models = section()
    with busy(handlers) as line:
        changing = threading.Thread(target=lambda: list(models.load(str(other), tab("a"))))
        changing.start()
        wait_for(lambda: line.waiting == 1)
        frames = handlers.send(QUESTION, tab(), *VALUES)
        panels = [next(frames)[2] for _ in range(3)]
        assert line.waiting == 2
    panels += [frame[2] for frame in frames]
    changing.join()
    messages = [message for panel in panels if isinstance(panel, str) for message in json.loads(panel)["messages"]]
    assert [message["model"]["name"] for message in messages if message["kind"] == "start"][-1] == "other-model"


def test_a_reply_that_is_being_written_ends_under_its_own_model(other: Path) -> None:
    handlers, models = section()
    whole = SpeculativeEngine(handlers.engine.model, tokenizer()).generate(
        [{"role": "user", "content": QUESTION}], **Settings.read(*VALUES).arguments()
    )
    frames = handlers.send(QUESTION, tab(), *VALUES)
    next_text(handlers, frames)
    changing = threading.Thread(target=lambda: list(models.load(str(other), tab())))
    changing.start()
    list(frames)
    changing.join()
    assert texts(handlers.tabs.chat("tab"))[1] == whole
    assert handlers.model_facts["name"] == "other-model"


def test_what_the_new_engine_prepares_later_is_not_ended_with_its_loading(other: Path) -> None:
    handlers, models = section()
    assert "other-model is ready" in last_line(models.load(str(other), tab()))
    handlers.engine.target.measure_cost(context=8, repeats=1)  # tells its progress


def test_what_was_loaded_last_is_offered_first(other: Path) -> None:
    _, models = section()
    list(models.load(str(other), tab()))
    assert models._models.names() == [str(other), *SUGGESTIONS]


def test_a_model_that_cannot_be_remembered_is_in_use_all_the_same(other: Path) -> None:
    handlers, models = section()
    (cache_folder() / "recent-models").mkdir(parents=True)
    assert "other-model is ready" in last_line(models.load(str(other), tab()))
    assert handlers.model_facts["name"] == "other-model"


def test_the_section_loads_and_says_what_went_wrong(other: Path) -> None:
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer())
    with served(build(Service(engine), loading=LOADING)) as url, sync_playwright() as playwright:
        browser = launch_browser(playwright)
        page = browser.new_page()
        page.set_default_timeout(15_000)
        page.goto(url)
        elsewhere = browser.new_page()
        elsewhere.goto(url)
        expect(elsewhere.locator("#box .submit-button")).to_be_visible()
        page.locator("#settings button").first.click()
        page.get_by_role("tab", name="Model").click()
        name, load = page.locator("#model-name input"), page.get_by_role("button", name="Load", exact=True)
        name.fill("/no/such/folder")
        load.click()
        expect(page.locator("#model-line")).to_contain_text(re.compile("does not exist.*Still"))
        name.fill(str(other))
        load.click()
        expect(page.locator("#model-line")).to_contain_text("other-model is ready")
        expect(page.locator("#top")).to_contain_text("other-model")
        expect(load).to_be_enabled()
        elsewhere.locator("#box textarea").fill("a question")
        elsewhere.keyboard.press("Enter")
        expect(elsewhere.locator("#top")).to_contain_text("other-model")
        browser.close()


def test_a_long_loading_shows_how_far_it_is_and_stops_when_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, progress: Progress, **loading: Any) -> SpeculativeEngine:
        for share in range(1000):
            progress(f"downloading {name}", share / 1000)
            time.sleep(0.03)
        pytest.fail("it was to be stopped")

    monkeypatch.setattr("ui.models.chat_engine", download)
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer())
    with served(build(Service(engine), loading=LOADING)) as url, sync_playwright() as playwright:
        browser = launch_browser(playwright)
        page = browser.new_page()
        page.goto(url)
        page.locator("#settings button").first.click()
        page.get_by_role("tab", name="Model").click()
        page.locator("#model-name input").fill("owner/large")
        page.get_by_role("button", name="Load", exact=True).click()
        expect(page.locator("#model-line")).to_contain_text(re.compile(r"Downloading owner/large: [1-9]\d?%"))
        assert 0 < float(page.locator("#model-line progress").get_attribute("value") or 0) < 1
        page.locator("#model-stop").click()
        expect(page.locator("#model-line")).to_contain_text(f"Stopped. Still {engine.name}.")
        expect(page.locator("#model-line progress")).to_have_count(0)
        expect(page.get_by_role("button", name="Load", exact=True)).to_be_enabled()
        browser.close()
