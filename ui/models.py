"""The Model section of the settings: another target for the chats, loaded while the page shows how far it is.

The engine is exchanged in its own thread, between two replies. Until the new one is complete the old one stays, so whatever
goes wrong is one line and nothing else. Chats stay; each is read by the new model when it goes on.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from html import escape
from typing import Any

import gradio as gr

from specdec.embedded import EMBEDDED_NAME, Progress
from specdec.engine import SpeculativeEngine
from specdec.errors import LoadError
from specdec.folders import cache_folder
from specdec.serving.line import Line
from specdec.serving.service import ClosedError
from specdec.study import ROUNDS
from specdec.target import UnsupportedModelError
from ui.errors import explain
from ui.memory import MemoryStore
from ui.replies import Replies, in_line
from ui.state import Tabs
from ui.stop import ENDING, Stops
from ui.stream import Producer, in_own_thread
from ui.visitors import is_owner

log = logging.getLogger(__name__)

SUGGESTIONS = (
    EMBEDDED_NAME,
    "HuggingFaceTB/SmolLM2-360M-Instruct",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
)
RECENT = 6
"""How many of the models loaded last are offered again."""
_FIELD = "“Model”"
News = tuple[str, float | None]
"""What is being done, and the fraction done where it is known."""


class Stopped(Exception):
    """The user does not want to wait for the model any more."""


def chat_engine(model: str | None, **loading: Any) -> SpeculativeEngine:
    """An engine that can chat. Raises LoadError or UnsupportedModelError."""
    engine = SpeculativeEngine(model, **loading)
    if engine.tokenizer.chat_template is None:
        raise LoadError(
            f"{engine.name} has no chat template, so it cannot chat: choose a model made for chat with --model "
            "(its name often ends in Instruct or Chat)."
        )
    return engine


class Models:
    """Exchanges the engine of ``replies``. ``loading``: device, dtype and the like, as in `specdec.loading.load`."""

    def __init__(self, replies: Replies, tabs: Tabs, store: MemoryStore | None, loading: Mapping[str, Any]) -> None:
        self._replies = replies
        self._tabs = tabs
        self._store = store
        self._loading = loading

    def names(self) -> list[str]:
        """What to offer: the models loaded last, then the suggestions."""
        recent = self._recent()
        return [*recent, *(name for name in SUGGESTIONS if name not in recent)]

    def change(self, name: str, progress: Progress) -> None:
        """Load ``name`` and let the chats go on with it (in the device's thread); what ``progress`` raises ends the loading.

        Raises LoadError or UnsupportedModelError; the present model then stays.
        """
        engine = chat_engine(name, progress=progress, **self._loading)
        log.info("a plain pass takes %.1f ms", 1e3 * engine.pass_cost.plain)  # measured now, so that ``progress`` is told
        if self._store is not None:
            self._store.save()
        self._tabs.cool()
        self._replies.service.use(engine)
        gc.unfreeze()  # the app froze what it started with
        gc.collect()
        gc.freeze()
        if self._store is not None:
            self._store.open()
        self._remember(name)

    def _recent(self) -> list[str]:
        try:
            return (cache_folder() / "recent-models").read_text(encoding="utf-8").splitlines()[:RECENT]
        except (OSError, UnicodeDecodeError):
            return []

    def _remember(self, name: str) -> None:
        names = [name, *(other for other in self._recent() if other != name)][:RECENT]
        with suppress(OSError):  # the model is in use all the same
            cache_folder().mkdir(parents=True, exist_ok=True)
            (cache_folder() / "recent-models").write_text("\n".join(names), encoding="utf-8")


class ModelSection:
    """Builds the section's components inside the surrounding block and wires them; ``header`` shows the model in use.

    Only ``owner`` may change the model.
    """

    def __init__(
        self, models: Models, replies: Replies, header: gr.HTML, show: Callable[[], str], owner: str | None = None
    ) -> None:
        self._owner = owner
        self._models = models
        self._replies = replies
        self._show = show
        self._stops = Stops()
        name = gr.Dropdown(
            models.names(),
            value=None,
            allow_custom_value=True,
            label="Model",
            info="a hub id (owner/name), a local folder, or a .gguf file; chats go on with the new model",
            elem_id="model-name",
        )
        with gr.Row(elem_id="model-buttons"):
            load = gr.Button("Load", size="sm", variant="primary", elem_id="model-load")
            stop = gr.Button("Stop", size="sm", visible=False, elem_id="model-stop")
        line = gr.HTML("", elem_id="model-line")
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        load.click(in_own_thread(self.load), name, [line, header, name, load, stop], concurrency_limit=None, **quiet)
        stop.click(self.stop, queue=False, **quiet)

    def load(self, name: str | None, request: gr.Request) -> Generator[tuple[Any, Any, Any, Any, Any], None, None]:
        """Exchange the model; yields for (line, header, name, load, stop). A tab that goes away ends it."""
        if not is_owner(self._owner):
            raise gr.Error("The model is chosen by the owner of this page.", print_exception=False)
        name = (name or "").strip()
        if not name:
            yield _line("Name a model first."), gr.skip(), gr.skip(), gr.skip(), gr.skip()
            return
        said = f"Still {self._replies.engine.name}."
        with self._stops.begin(request.session_hash or "") as stop:
            yield _line("Looking for the model …"), gr.skip(), gr.skip(), gr.update(interactive=False), gr.update(visible=True)
            try:
                for news in self._changing(name, stop):
                    line = _line(*news[-1]) if news else gr.skip()
                    yield line, gr.skip(), gr.skip(), gr.skip(), gr.skip()
                said = f"{self._replies.engine.name} is ready."
            except Exception as error:
                said = f"Stopped. {said}" if stop.is_set() else f"{_reason(error)} {said}"
        yield (
            _line(said),
            self._show(),
            gr.update(choices=self._models.names()),
            gr.update(interactive=True),
            gr.update(visible=False),
        )

    def stop(self, request: gr.Request) -> None:
        """End what this tab loads."""
        self._stops.stop(request.session_hash or "")

    def _changing(self, name: str, stop: threading.Event) -> Iterator[list[News]]:
        """Exchange the model when the engine is free; what there is to tell meanwhile."""

        def produce(put: Callable[[News], None]) -> None:
            def tell(text: str, fraction: float | None) -> None:
                put((text[:1].upper() + text[1:], fraction))

            def progress(text: str, fraction: float | None) -> None:
                if stop.is_set() or ENDING.is_set():
                    raise Stopped
                tell(text, fraction)

            self._replies.take(
                lambda: self._models.change(name, progress), stop.is_set, lambda ahead: tell(in_line(ahead), None)
            )

        return Producer(produce).batches()


def _reason(error: Exception) -> str:
    """Why a model cannot be loaded, in one line."""
    if isinstance(error, LoadError | UnsupportedModelError | OSError):
        return str(error).replace("--model", _FIELD)
    return explain(error)


def _line(text: str, fraction: float | None = -1.0) -> str:
    """One line; with a bar where something is under way (None: nobody knows how far)."""
    if fraction is None:
        return f"<p>{escape(text)} …</p><progress></progress>"
    if fraction < 0:
        return f"<p>{escape(text)}</p>"
    return f'<p>{escape(text)}: {fraction:.0%}</p><progress value="{fraction:.3f}"></progress>'


QUIET = 5.0
"""Seconds without a reply after which the engine counts as idle."""
SLOWEST = 0.2
"""Seconds of a plain pass beyond which a study would take hours; such a model is left alone."""


def study_when_idle(replies: Replies) -> None:
    """Study whatever model ``replies`` has, in the background; a reply interrupts it, the next pause goes on."""
    threading.Thread(target=_study, args=(replies,), daemon=True, name="study").start()


def _study(replies: Replies) -> None:
    while True:
        _wait_for_quiet(replies.line)
        try:
            replies.service.call(lambda: _go_on(replies))
        except ClosedError:  # the program is ending
            return
        except Exception:
            log.exception("the study of the model's vocabulary failed; the chat works without it")
            return


def _wait_for_quiet(line: Line) -> None:
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < QUIET:
        time.sleep(0.5)
        if not line.idle:
            quiet_since = time.monotonic()


def _go_on(replies: Replies) -> None:
    engine, vocabulary = replies.engine, replies.engine.vocabulary
    complete = vocabulary.adjacent >= engine.target.vocab_size and vocabulary.rounds >= ROUNDS
    if engine.pass_cost.plain <= SLOWEST and not complete:
        engine.study(lambda what, share: replies.line.idle and not ENDING.is_set())
