"""Clients: which address stands behind a request that came through proxies."""

from __future__ import annotations

from collections.abc import Callable

from specdec.serving.asgi import REQUESTS, App, Receive, Scope, Send, headers


def client_address(peer: str, forwarded_for: str, trusted_proxies: int) -> str:
    """The address that the outermost of ``trusted_proxies`` saw; ``peer``, who is connected, if there is none.

    Each proxy appends to ``X-Forwarded-For`` whom it heard from. So of ``forwarded_for`` only as many entries from the end are
    facts as there are proxies of ours; those before are the client's own words. A request with fewer entries did not come
    through all of them.
    """
    entries = [entry.strip() for entry in forwarded_for.split(",")]
    if not trusted_proxies or len(entries) < trusted_proxies:
        return peer
    return entries[-trusted_proxies] or peer


class Clients:
    """Puts the client's address in place of the proxy's into every request.

    ``hint`` is called once if a request was forwarded although there are no ``trusted_proxies``.
    """

    def __init__(self, app: App, trusted_proxies: int, hint: Callable[[], None]) -> None:
        self._app = app
        self._trusted_proxies = trusted_proxies
        self._hint: Callable[[], None] | None = hint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] in REQUESTS:
            forwarded_for = ",".join(headers(scope, "x-forwarded-for"))
            if self._trusted_proxies and scope.get("client"):
                peer, port = scope["client"]
                scope["client"] = (client_address(peer, forwarded_for, self._trusted_proxies), port)
            elif forwarded_for and self._hint is not None:
                hint, self._hint = self._hint, None
                hint()
        await self._app(scope, receive, send)
