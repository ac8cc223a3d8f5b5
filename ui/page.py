"""The page: what is on it, where, and which handler answers which event."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import gradio as gr
from gradio.events import api

from specdec.serving.service import Service
from ui.compare import CompareTab
from ui.examples import EXAMPLES
from ui.handlers import ChatHandlers
from ui.memory import MemorySection
from ui.middleware import Listeners
from ui.models import Models, ModelSection, study_when_idle
from ui.panel import complaint, live_panel
from ui.panel import open_trace as opened
from ui.settings import MAX_TOKENS, Settings
from ui.sidebar import saved_chats
from ui.stream import ReplyStreams, in_own_thread
from ui.theme import FAVICON, TITLE
from ui.visitors import PRIVATE, Limits, Pending, TooManyError, is_owner

_LATEX: list[dict[str, str | bool]] = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\[", "right": "\\]", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
]
_QUICK: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "queue": False}
_EMPTY = (
    "## Ask something, and watch the answer being drafted\n\n"
    "A fast guesser drafts a **tree** of possible next words. The model checks the whole tree in **one pass** and keeps the "
    "words that it would have chosen itself. You get the model's own answer, sooner."
)


@dataclass(frozen=True, slots=True)
class _ChatParts:
    """The components that the chat's events read and write."""

    chatbot: gr.Chatbot
    examples: list[tuple[gr.Button, gr.State]]
    box: gr.Textbox
    meter: gr.HTML
    audit: gr.Button
    settings: list[Any]
    sections: list[gr.Tab]


def build(
    service: Service,
    study: bool = False,
    memory: bool = False,
    loading: Mapping[str, Any] | None = None,
    limits: Limits = PRIVATE,
    owner: str | None = None,
    shared: bool = False,
    listeners: Listeners | None = None,
    parallel: int | None = None,
) -> gr.Blocks:
    """The whole page around one service, which writes ``parallel`` replies at once (None: as many as pay).

    With ``study`` it learns about its model while nobody waits for a reply.
    With ``memory`` it remembers across chats; with ``loading`` (arguments of `specdec.loading.load`) another model can be
    chosen. Both have a section in the settings for the owner: who is logged in as ``owner``, or whoever has the page, unless it
    is ``shared``. ``limits``: of each visitor. What nobody of ``listeners`` hears ends.
    """
    handlers = ChatHandlers(service, limits, memory)
    if parallel is not None:
        handlers.replies.line.widen(parallel)
    else:
        service.later(lambda: handlers.replies.line.widen(handlers.replies.decoder.parallel()))
    if handlers.memory_store is not None:
        handlers.memory_store.start()
    if study:
        study_when_idle(handlers.replies)
    owned = owner is not None or not shared
    listening = listeners.listening if listeners is not None else lambda: True
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_width=True, delete_cache=(600, 3600)) as demo:
        with gr.Sidebar(open=False, width=290, elem_id="chats"):
            new = gr.Button("New chat", elem_id="new-chat", size="sm")
            saved = saved_chats()
        header = gr.HTML(_header(handlers.model_facts), elem_id="top")
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Chat"), gr.Row(elem_id="columns"):
                with gr.Column(elem_id="chat-column", min_width=0):
                    parts = _chat_column(handlers, header, loading if owned else None, owner, owned)
                with gr.Column(elem_id="panel-column", min_width=0):
                    panel = live_panel(opener=_trace_opener(handlers.replies.pending), slim="#slim .specdec")
            with gr.Tab("Compare"):
                CompareTab(handlers.comparisons, listening)
        streams = ReplyStreams()
        settled = _wire(handlers, streams, parts, panel, saved, new, listening)
        demo.unload(handlers.leave)
        demo.unload(streams.leave)
        if parts.sections and owner is not None:
            demo.load(lambda: [gr.update(visible=is_owner(owner))] * len(parts.sections), outputs=parts.sections, **_QUICK)
        if loading is not None:  # another tab may have changed the model
            own = parts.settings[-1]
            for happened in (demo.load, *(event.then for event in settled)):
                happened(lambda: (_header(handlers.model_facts), gr.update(**_own(handlers))), outputs=[header, own], **_QUICK)
        api(in_own_thread(handlers.api, listening), api_name="chat", concurrency_limit=None)
    _queue(demo)
    return demo  # type: ignore[no-any-return]


def _trace_opener(pending: Pending) -> Callable[[str], str]:
    """Opens traces one at a time, each as work of the visitor who asks."""
    lock = threading.Lock()

    def open_trace(text: str) -> str:
        try:
            with pending.place(), lock:
                return opened(text)
        except TooManyError as error:
            return complaint(str(error))

    return open_trace


def _queue(demo: gr.Blocks) -> None:
    """Set up Gradio's queue. Replies wait in `specdec.serving.line`, so this queue must not be short, even on ZeroGPU.

    It looks for work 20 times a second, as it does on Windows, instead of 1000 times. Each look takes the interpreter lock
    from the engine's thread.
    """
    demo._queue.max_size = 1000
    demo._queue.sleep_when_free = 0.05
    demo._queue.progress_update_sleep_when_free = 0.1


def _header(model: dict[str, str]) -> str:
    logo = FAVICON.read_text(encoding="utf-8")
    facts = " · ".join(model.values())
    return (
        f'<header class="head">{logo}<h1>{TITLE}</h1><span class="model" title="model, number format, device">'
        f"{escape(facts)}</span>"
        '<button type="button" data-action="theme" aria-label="switch between light and dark" title="light or dark">◐</button>'
        "</header>"
    )


def _chat_column(
    handlers: ChatHandlers, header: gr.HTML, loading: Mapping[str, Any] | None, owner: str | None, owned: bool
) -> _ChatParts:
    chatbot = gr.Chatbot(
        elem_id="chatbot",
        show_label=False,
        container=False,
        height="100%",
        editable="user",
        buttons=["copy", "copy_all"],
        feedback_options=None,
        latex_delimiters=_LATEX,
        allow_tags=True,
        layout="bubble",
        placeholder=_EMPTY,
    )
    with gr.Row(elem_id="examples"):
        examples = [(gr.Button(f"{example.title}\n{example.expectation}"), gr.State(example.prompt)) for example in EXAMPLES]
    gr.HTML('<div class="specdec-frame"><div class="specdec" hidden></div></div>', elem_id="slim", apply_default_css=False)
    box = gr.Textbox(
        elem_id="box",
        show_label=False,
        label="Message",
        container=False,
        placeholder="Message (Enter sends, Esc stops)",
        lines=1,
        max_lines=8,
        submit_btn=True,
        stop_btn=False,
        autofocus=True,
        html_attributes=gr.InputHTMLAttributes(autocorrect="on", spellcheck=True),
    )
    with gr.Row(elem_id="below-box"):
        meter = gr.HTML(elem_id="meter")
        audit = gr.Button("Audit the reply", size="sm", elem_id="audit")
    with gr.Accordion("Settings", open=False, elem_id="settings"), gr.Tabs(elem_id="settings-tabs"):
        with gr.Tab("Reply"):
            settings = _setting_fields(handlers)
        sections = []
        if handlers.memory_store is not None and owned:
            with gr.Tab("Memory", visible=owner is None) as tab:
                MemorySection(handlers.memory_store, handlers.replies, tab, owner)
            sections.append(tab)
        if loading is not None:
            with gr.Tab("Model", visible=owner is None) as tab:
                models = Models(handlers.replies, handlers.tabs, handlers.memory_store, loading)
                ModelSection(models, handlers.replies, header, lambda: _header(handlers.model_facts), owner)
            sections.append(tab)
    return _ChatParts(chatbot, examples, box, meter, audit, settings, sections)


def _own(handlers: ChatHandlers) -> dict[str, Any]:
    """The switch for the model's own settings, which is there if it has any."""
    return {"info": handlers.own_settings, "visible": bool(handlers.own_settings)}


def _setting_fields(handlers: ChatHandlers) -> list[Any]:
    """The fields in the order of `Settings.read`."""
    default = Settings()
    with gr.Row():
        decoding = gr.Radio(
            ["tree", "linear", "plain"],
            value=default.decoding,
            label="Decoding",
            info="All three give the model's own tokens, at different speeds.",
            elem_id="decoding",
        )
        budget = gr.Dropdown(
            ["auto", "4", "8", "12", "16", "24", "32", "48", "64"],
            value=str(default.budget),
            label="Node budget",
            info="Tokens drafted per pass. auto: as many as save time.",
            elem_id="budget",
        )
    with gr.Row():
        temperature = gr.Number(
            default.temperature,
            step=0.1,
            label="Temperature",
            info="0: the likeliest token",
            min_width=110,
            elem_id="temperature",
        )
        top_p = gr.Number(default.top_p, step=0.05, label="Top-p", info="if temperature > 0", min_width=110)
        seed = gr.Number(None, precision=0, label="Seed", info="empty: a new one each time", min_width=110, elem_id="seed")
        max_tokens = gr.Number(
            default.max_tokens,
            precision=0,
            label="Max tokens",
            info=f"1 to {MAX_TOKENS:,}",
            min_width=110,
            elem_id="max-tokens",
        )
    system_prompt = gr.Textbox(
        label="System prompt", lines=2, max_lines=6, placeholder="What the model should know, and how it should answer"
    )
    own = gr.Checkbox(default.own, label="Use the model's own settings as well", elem_id="own-settings", **_own(handlers))
    return [decoding, budget, temperature, top_p, seed, max_tokens, system_prompt, own]


def _wire(
    handlers: ChatHandlers,
    streams: ReplyStreams,
    parts: _ChatParts,
    panel: gr.HTML,
    saved: gr.HTML,
    new: gr.Button,
    listening: Callable[[], bool],
) -> list[Any]:
    """Wire the chat; returns the events at which a reply has ended."""
    chatbot, box, fields = parts.chatbot, parts.box, parts.settings
    frame = [chatbot, box, panel, parts.meter, saved]
    # The handlers queue for the engine themselves (`specdec.serving.line`), so that a waiting page can say so.
    slow: dict[str, Any] = {**_QUICK, "queue": True, "concurrency_limit": None}
    beginnings = [
        box.submit(streams.begin(handlers.send), [box, *fields], frame, **_QUICK),
        *(button.click(streams.begin(handlers.send), [prompt, *fields], frame, **_QUICK) for button, prompt in parts.examples),
        chatbot.retry(streams.begin(handlers.retry), fields, frame, **_QUICK),
        chatbot.edit(streams.begin(handlers.edit), fields, frame, **_QUICK),
    ]
    settled = []
    for begun in beginnings:
        streamed = begun.success(
            in_own_thread(streams.stream, listening), None, [chatbot, panel], trigger_mode="multiple", **slow
        )
        settled.append(streamed.then(handlers.settle, None, frame, trigger_mode="multiple", **_QUICK))
    chatbot.undo(handlers.undo, outputs=frame, **_QUICK)
    box.stop(handlers.stop, **_QUICK)
    panel.select(handlers.whole, outputs=panel, **_QUICK)
    parts.audit.click(in_own_thread(handlers.audit, listening), outputs=frame, **slow)
    gr.on([chatbot.clear, new.click], handlers.clear, outputs=frame, **_QUICK)
    saved.select(handlers.open, outputs=frame, **_QUICK)
    saved.delete(handlers.delete, outputs=frame, **_QUICK)
    return settled
