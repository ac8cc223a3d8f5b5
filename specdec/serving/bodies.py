"""Bodies: how much a request may bring along, and which routes take nothing at all. Checked before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdec.serving.asgi import App, Receive, Scope, Send, headers, refuse

_DIGITS = 18  # of the longest length that is read as a number


class Bodies:
    """Refuses a body of more than ``most`` bytes, or of a length that is not told, and every route below ``closed``.

    ``full`` tells why nothing can be taken at present below ``stored``, the routes that keep what they are sent; or "".
    """

    def __init__(
        self, app: App, most: int, closed: Sequence[str] = (), stored: Sequence[str] = (), full: Callable[[], str] = str
    ) -> None:
        self._app = app
        self._most = most
        self._closed, self._stored, self._full = tuple(closed), tuple(stored), full

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on."""
        status, reason = self._refusal(scope) if scope["type"] == "http" else (0, "")
        if reason:
            await refuse(scope, send, status, reason)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str]:
        if scope["path"].startswith(self._closed):
            return 404, "This page has no such route."
        if headers(scope, "transfer-encoding"):
            return 411, "Tell the length of the request (Content-Length)."
        length = "".join(headers(scope, "content-length")) or "0"
        if not length.isdecimal() or len(length) > _DIGITS or int(length) > self._most:
            return 413, f"A request to this page may bring at most {self._most:,} bytes."
        if scope["path"].startswith(self._stored) and (reason := self._full()):
            return 507, reason
        return 0, ""
