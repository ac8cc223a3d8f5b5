"""The few words of ASGI that the layers in front of an application share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

REQUESTS = ("http", "websocket")
"""The kinds of scope that a client opens."""


def headers(scope: Scope, name: str) -> list[str]:
    """The values of every header called ``name`` (lower case), in the order in which they came."""
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key == name.encode()]


async def refuse(scope: Scope, send: Send, status: int, reason: str) -> None:
    """Answer a request with ``status`` and one line; a WebSocket is closed before it opens."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": reason[:120]})
        return
    body = f"{reason}\n".encode()
    lines = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})
