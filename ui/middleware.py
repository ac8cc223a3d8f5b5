"""Middleware: what a request passes before it reaches Gradio's routes, and who listens to the event streams behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from gradio.context import LocalContext
from gradio.utils import get_upload_folder

from specdec.serving.asgi import App, Receive, Scope, Send
from specdec.serving.bodies import Bodies
from specdec.serving.clients import Clients
from specdec.serving.hosts import AllowedHosts, Hosts
from ui.visitors import Limits

API = "/gradio_api"
_UPLOADS = (f"{API}/upload",)
_UNUSED = ("proxy=", "stream/", "deep_link", "process_recording", "vibe-", "undo-vibe", "dev/")
_CLOSED = tuple(f"{API}/{name}" for name in _UNUSED)
"""Routes of Gradio's that this page has no use for: they fetch, keep or change something."""
MAX_UPLOADS = 1 << 30
"""Bytes of uploads that are kept at once."""


class Listeners:
    """Counts the event streams that are open, by the session or the event of which they tell."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    def layer(self, app: App) -> App:
        """``app``, with its event streams counted."""

        async def counting(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or (name := _stream(scope)) is None:
                return await app(scope, receive, send)
            self._open[name] += 1
            try:
                await app(scope, receive, send)
            finally:
                self._open[name] -= 1
                if not self._open[name]:
                    del self._open[name]

        return counting

    def listening(self) -> bool:
        """Whether anybody listens to the present event."""
        session = getattr(LocalContext.request.get(None), "session_hash", None)
        return session in self._open or LocalContext.event_id.get(None) in self._open


def _stream(scope: Scope) -> str | None:
    """The session or event of which an event stream tells; None for any other request."""
    path: str = scope["path"]
    if path == f"{API}/queue/data":
        return "".join(parse_qs(scope["query_string"].decode("latin-1")).get("session_hash", []))
    return path.rsplit("/", 1)[1] if scope["method"] == "GET" and path.startswith(f"{API}/call/") else None


def middleware(
    listeners: Listeners,
    limits: Limits,
    *,
    hosts: Hosts | None,
    trusted_proxies: int,
    uploads: bool,
    hint: Callable[[], None],
) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """A lifespan that puts the middleware before everything in the app that ``launch`` builds, whatever is mounted there later.

    ``hosts`` None: the platform decides who may ask. ``uploads``: whether the page has fields for files. ``hint`` is called
    once if requests come through a proxy that is not trusted.
    """

    def layered(app: App) -> App:
        app = listeners.layer(app)
        closed = _CLOSED if uploads else (*_CLOSED, *_UPLOADS)
        app = Bodies(app, limits.body_bytes, closed, _UPLOADS, _uploads_full)
        app = app if hosts is None else AllowedHosts(app, hosts)
        return Clients(app, trusted_proxies, hint)

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        app.middleware_stack = layered(app.middleware_stack)  # built by now; what is added before stands behind Gradio's CORS
        yield

    return lifespan


def below_uploads(path: str) -> Path | None:
    """The real path of an uploaded file; None for whatever else a client names."""
    try:
        real = Path(path).resolve()
        return real if real.is_relative_to(Path(get_upload_folder()).resolve()) and real.is_file() else None
    except (OSError, ValueError):  # too long for a path, or with characters that no path has
        return None


def _uploads_full() -> str:
    kept = sum(file.stat().st_size for file in Path(get_upload_folder()).rglob("*") if file.is_file())
    return "This page keeps too many uploads at present: try again later." if kept > MAX_UPLOADS else ""
