"""The app as strangers meet it: its gate, its page and its limits over HTTP, around a toy model."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from toys import ARCHITECTURES, tiny_model, tokenizer

import app
from specdec.engine import SpeculativeEngine
from specdec.serving.service import Service
from ui.middleware import Listeners


class Held:
    """An engine whose passes wait until it is let go, and which remembers whom it answered."""

    def __init__(self) -> None:
        self.engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer())
        assert self.engine.pass_cost  # measured now, while passes do not wait
        self.service = Service(self.engine)
        self.free = threading.Event()
        self.free.set()
        self.begun: list[str] = []
        self._run, self._request = self.engine.target.run, self.engine.request
        self.engine.target.run = self._waiting  # type: ignore[method-assign]
        self.engine.request = self._noting  # type: ignore[method-assign]

    def _waiting(self, *arguments: Any, **named: Any) -> Any:
        assert self.free.wait(60)
        return self._run(*arguments, **named)

    def _noting(self, prompt: Any, *arguments: Any, **named: Any) -> Any:
        request = self._request(prompt, *arguments, **named)
        said = self.engine.tokenizer.decode(request.prompt.token_ids)
        self.begun.append(said.split("<|user|>")[-1].split("<|end|>")[0])
        return request


@contextmanager
def serving(service: Service, *arguments: str) -> Iterator[str]:
    """The address of the app, started with these arguments around ``service``; one reply at a time, unless they say more."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = app.parser().parse_args(["--port", str(port), "--no-browser", "--parallel", "1", *arguments])
    listeners = Listeners()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FORWARDED_ALLOW_IPS", "no_proxy", "NO_PROXY"):
            patch.setenv(name, "")
        page = app._page(service, options, listeners)
        launched = app._serving(service, options, listeners)
        page.launch(auth=app._auth(options.auth), prevent_thread_lock=True, **launched)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            page.close(verbose=False)


def asked(address: str, message: str, *, visitor: str = "", session: str | None = None, tokens: int = 8) -> str:
    """Post a message to the API; the id of the event."""
    body: dict[str, Any] = {"data": [message, "", tokens, 0, 1, 0, "tree", "auto"]}
    if session is not None:
        body["session_hash"] = session
    headers = {"X-Forwarded-For": visitor} if visitor else {}
    answer = httpx.post(f"{address}/gradio_api/call/chat", json=body, headers=headers, timeout=60)
    answer.raise_for_status()
    return str(answer.json()["event_id"])


def heard(address: str, event: str) -> tuple[str, str]:
    """The last word about an event ("complete" or "error") and what came with it."""
    with httpx.stream("GET", f"{address}/gradio_api/call/chat/{event}", timeout=120) as stream:
        lines = [line for line in stream.iter_lines() if line]
    kind, data = lines[-2].removeprefix("event: "), json.loads(lines[-1].removeprefix("data: "))
    return kind, json.dumps(data)
