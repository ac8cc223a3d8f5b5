"""The memory across chats, as the page keeps it: what it is worth, and that it stays, stays off, and goes, as the user says."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from browser import launch_browser, served
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import Page, expect, sync_playwright
from test_chat import QUESTION, SECOND, send, texts, wait_for
from toys import ARCHITECTURES, tiny_model, tokenizer

import app
from specdec.engine import SpeculativeEngine
from specdec.serving.service import Service
from specdec.speculators.memory import Memory, Remembered
from specdec.speculators.vocabulary import Vocabulary
from ui import memory as memory_module
from ui.handlers import ChatHandlers
from ui.memory import MemoryStore, _taken_in, count, rate
from ui.page import build
from ui.settings import Settings

VALUES = ("tree", "16", 0, 1, 0, 60, "")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))


def engine(seed: int = 0) -> SpeculativeEngine:
    return SpeculativeEngine(tiny_model(ARCHITECTURES["llama"], seed), tokenizer())


def page_with_memory(seed: int = 0) -> tuple[ChatHandlers, MemoryStore]:
    handlers = ChatHandlers(Service(engine(seed)), memory=True)
    assert handlers.memory_store is not None
    handlers.memory_store.open()
    return handlers, handlers.memory_store


def passes(handlers: ChatHandlers, name: str, text: str = QUESTION) -> int:
    """Target passes that the reply to ``text`` took in the tab ``name``."""
    counted: list[int] = []
    handlers.replies.listen(lambda chat, settings, stats: counted.append(stats.passes))
    send(handlers, text, name, VALUES)
    return counted[0]


def test_a_second_chat_on_the_same_topic_takes_fewer_passes_with_memory_and_says_the_same() -> None:
    without, (remembering, _) = ChatHandlers(Service(engine())), page_with_memory()
    taken = {name: [passes(handlers, tab) for tab in "ab"] for name, handlers in (("off", without), ("on", remembering))}
    assert taken["off"][0] == taken["off"][1] == taken["on"][0], "a memory of nothing changes nothing"
    assert taken["on"][1] < 0.7 * taken["off"][1]
    assert texts(without.tabs.chat("b")) == texts(remembering.tabs.chat("b"))


def test_what_was_learnt_is_there_after_a_restart_and_for_this_model_only() -> None:
    handlers, store = page_with_memory()
    first = passes(handlers, "a")
    store.close()
    assert store.path is not None
    assert store.path.exists()
    restarted, _ = page_with_memory()
    assert passes(restarted, "b") < first
    _, other_store = page_with_memory(seed=1)
    assert other_store.path != store.path
    assert other_store.memory is not None
    assert len(other_store.memory) == 0


def test_nothing_new_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers, store = page_with_memory()
    passes(handlers, "a")
    store.save()
    assert store.path is not None
    store.path.unlink()
    store.save()
    assert not store.path.exists()


def test_it_is_saved_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr(memory_module.atexit, "register", at_exit.append)
    monkeypatch.setattr(memory_module, "GLANCE", 1000)
    handlers = ChatHandlers(Service(engine()), memory=True)
    store = handlers.memory_store
    assert store is not None
    store.start()
    wait_for(lambda: store.memory is not None)
    passes(handlers, "a")
    assert store.path is not None
    assert not store.path.exists()
    for work in at_exit:
        work()
    assert store.path.exists()


def test_off_means_off_for_chats_that_go_on_too_and_at_the_next_start() -> None:
    handlers, store = page_with_memory()
    passes(handlers, "a")
    memory = store.memory
    assert memory is not None
    store.switch(False)
    known, clock = len(memory), memory.clock
    passes(handlers, "a", SECOND)
    passes(handlers, "b")
    assert (len(memory), memory.clock) == (known, clock)
    _, kept_off = page_with_memory()
    assert (kept_off.on, kept_off.memory) == (False, None)
    kept_off.switch(True)
    assert kept_off.memory is not None
    assert len(kept_off.memory) == known, "what was remembered before comes back"


def test_wipe_empties_the_memory_and_deletes_its_file() -> None:
    handlers, store = page_with_memory()
    first = passes(handlers, "a")
    store.save()
    store.wipe()
    assert store.memory is not None
    assert store.path is not None
    assert (len(store.memory), store.memory.replies, store.path.exists()) == (0, [], False)
    store.save()
    assert not store.path.exists()
    assert passes(handlers, "b") == first


def test_a_damaged_file_is_a_warning_and_an_empty_memory(caplog: pytest.LogCaptureFixture) -> None:
    _, store = page_with_memory()
    assert store.path is not None
    store.path.write_bytes(b"not a memory")
    store.open()
    assert store.memory is not None
    assert (len(store.memory), store.on) == (0, True)
    assert str(store.path) in caplog.text
    assert store.path.with_name(f"{store.path.name}.damaged").read_bytes() == b"not a memory"
    assert not store.path.exists()


def test_two_apps_do_not_undo_each_others_changes() -> None:
    handlers, store = page_with_memory()
    passes(handlers, "a")
    store.save()
    other_handlers, other = page_with_memory()
    assert (other.on, other.memory) == (False, None)
    assert "another app" in other.why_off
    passes(other_handlers, "b", SECOND)
    other.save()
    with pytest.raises(OSError, match="another app"):
        other.wipe()
    assert store.path is not None
    assert store.path.exists()
    store.wipe()
    other.save()
    assert not store.path.exists(), "what was wiped stays wiped"
    store.close()
    other.switch(True)
    assert (other.on, other.memory is not None) == (True, True)


def test_whatever_fails_while_it_is_saved_the_next_time_it_is_saved_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory_module.atexit, "register", lambda work: None)
    monkeypatch.setattr(memory_module, "GLANCE", 0.01)
    handlers = ChatHandlers(Service(engine()), memory=True)
    store = handlers.memory_store
    assert store is not None
    save, failed = store.save, threading.Event()

    def failing() -> None:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("for once")
        save()

    monkeypatch.setattr(store, "save", failing)
    store.start()
    wait_for(failed.is_set)
    passes(handlers, "a")
    wait_for(lambda: store.path is not None and store.path.exists())
    assert "for once" in caplog.text


def test_its_file_is_the_users_alone_and_what_killed_saves_left_goes(tmp_path: Path) -> None:
    handlers, store = page_with_memory()
    passes(handlers, "a")
    assert store.path is not None
    left = store.path.with_name(f"{store.path.name}.{2**22 + 1}.partial")
    left.write_bytes(b"half of one")
    store.save()
    assert store.path.stat().st_mode & 0o777 == 0o600
    assert not left.exists()


def test_a_memory_of_replies_without_a_pass_is_shown_all_the_same() -> None:
    assert (rate([]), rate([Remembered(1, 3, 0)])) == (0, 3)
    handlers, store = page_with_memory()
    passes(handlers, "a")
    assert store.memory is not None
    assert store.path is not None
    store.memory.replies += [Remembered(1, 5, 0), Remembered(1, -5, 2)]
    store.memory.save(store.path)
    again = Memory()
    again.load(store.path)
    assert len(again.replies) == 1


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_is_wrong_with_a_cache_file_the_app_starts_without_it(
    data: st.DataObject, damaged: tuple[Path, bytes]
) -> None:
    path, whole = damaged
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(changed) * 8 - 1))
        changed[position // 8] ^= 1 << position % 8
    if data.draw(st.booleans()):
        del changed[data.draw(st.integers(0, len(changed) - 1)) :]
    path.write_bytes(bytes(changed))
    for load in (Memory().load, lambda file: Vocabulary.load(file, keys=64)):
        with suppress(ValueError):
            load(path)


@pytest.fixture(scope="module", params=["memory", "study"])
def damaged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A file that the app keeps, and what is in it."""
    path = tmp_path_factory.mktemp("cache") / "kept.npz"
    if request.param == "memory":
        memory = Memory(megabytes=1)
        memory.read(list(range(6)) * 2)
        memory.note(Remembered(1, 2, 1))
        memory.save(path)
    else:
        Vocabulary(keys=64).save(path)
    return path, path.read_bytes()


def test_a_comparison_neither_uses_nor_feeds_the_memory() -> None:
    handlers, store = page_with_memory()
    passes(handlers, "a")
    assert store.memory is not None
    clock = store.memory.clock
    list(handlers.comparisons.run("a", QUESTION, ["linear", "tree"], Settings.read(*VALUES)))
    assert store.memory.clock == clock


def test_text_that_is_handed_over_is_read_and_anything_else_refused(tmp_path: Path) -> None:
    _, store = page_with_memory()
    (tmp_path / "notes.txt").write_text(QUESTION, encoding="utf-8")
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\x00")
    assert store.read(tmp_path / "notes.txt") == len(QUESTION)
    with pytest.raises(ValueError, match=r"."):
        store.read(tmp_path / "photo.jpg")
    assert store.memory is not None
    assert len(store.memory) > len(QUESTION)
    store.switch(False)
    with pytest.raises(ValueError, match="off"):
        store.read(tmp_path / "notes.txt")


def test_the_line_compares_this_chat_with_the_others() -> None:
    handlers, store = page_with_memory()
    passes(handlers, "a")
    assert store.line(handlers.tabs.chat("a")) == ""
    passes(handlers, "b")
    line = store.line(handlers.tabs.chat("b"))
    here, others = map(float, re.findall(r"\d\.\d", line))
    assert here > others
    assert line in handlers._meter(handlers.tabs.chat("b"))


@pytest.mark.parametrize(
    ("arguments", "remembers"),
    [
        ([], True),
        (["--no-memory"], False),
        (["--host", "0.0.0.0"], False),
        (["--host", "0.0.0.0", "--memory"], True),
    ],
)
def test_where_several_people_share_the_page_nothing_is_remembered_unasked(arguments: list[str], remembers: bool) -> None:
    assert app._remembers(app.parser().parse_args(arguments)) is remembers


def test_a_space_never_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "ON_SPACE", True)
    assert app._remembers(app.parser().parse_args(["--memory"])) is False


def test_counts_read_well() -> None:
    assert [count(1, "reply"), count(1200, "reply"), count(2, "file")] == ["1 reply", "1,200 replies", "2 files"]
    assert _taken_in(10, 1, ["a.png", "b", "c", "d"], True).endswith("a.png, b, c and 1 more.")


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    monkeypatch.setattr(memory_module, "GLANCE", 0.1)
    with served(build(Service(engine()), memory=True)) as url, sync_playwright() as playwright:
        browser = launch_browser(playwright)
        page = browser.new_page()
        page.set_default_timeout(15_000)
        page.goto(url)
        yield page
        browser.close()


def test_the_section_switches_reads_shows_and_wipes(page: Page, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("the cat sat on the mat " * 20, encoding="utf-8")
    page.locator("#settings button").first.click()
    page.get_by_role("tab", name="Memory").click()
    summary, line = page.locator("#memory-summary"), page.locator("#memory-line")
    expect(summary).to_contain_text("contexts known")
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add files …").click()
    chooser.value.set_files(tmp_path / "notes.txt")
    expect(line).to_contain_text(re.compile(r"Took in \d+ tokens from 1 file\."))
    expect(summary).to_contain_text(re.compile(r"[1-9]\d* contexts known"))
    page.wait_for_timeout(500)
    files = list((tmp_path / "memory").glob("*.npz"))
    assert len(files) == 1, "saved while idle"
    page.locator("#memory-switch input").uncheck()
    expect(summary).to_contain_text("Off")
    page.reload()
    page.locator("#settings button").first.click()
    page.get_by_role("tab", name="Memory").click()
    expect(page.locator("#memory-switch input")).not_to_be_checked()
    page.locator("#memory-switch input").check()
    expect(summary).to_contain_text(re.compile(r"[1-9]\d* contexts known"))
    page.get_by_role("button", name="Wipe …").click()
    page.get_by_role("button", name="Keep it").click()
    expect(page.get_by_role("button", name="Wipe it")).to_be_hidden()
    page.get_by_role("button", name="Wipe …").click()
    page.get_by_role("button", name="Wipe it").click()
    expect(line).to_contain_text("Wiped")
    expect(summary).to_contain_text(re.compile(r"\b0 contexts known"))
    assert not files[0].exists()
