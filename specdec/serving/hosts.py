"""Allowed hosts: a browser that another website drives gets nothing.

A website can send requests to any address that its visitor's browser reaches, this machine's included, and under a name of its
own that resolves there (DNS rebinding). So the ``Host`` of a request must be one under which the page is served, and an
``Origin`` must be the page itself.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address

from specdec.serving.asgi import REQUESTS, App, Receive, Scope, Send, headers, refuse

LOCAL = ("127.0.0.1", "localhost", "::1")
"""The hosts that only this machine reaches."""
EVERY_ADDRESS = ("0.0.0.0", "::", "")
"""The hosts that stand for every address of this machine."""
_ORIGIN = re.compile(r"https?://([^/?#@\s]+)", re.IGNORECASE)
_PORT = re.compile(r":\d*$")


@dataclass(frozen=True, slots=True)
class Hosts:
    """The names under which the page may be asked for: "name:port", or "name" for any port, in lower case.

    With ``any_address`` every IP address is one, too: no website can make a browser believe that an address is its own name.
    """

    names: frozenset[str]
    any_address: bool = False

    @classmethod
    def served(cls, host: str, port: int, more: Iterable[str] = ()) -> Hosts:
        """The names of a page that is served on ``host`` and ``port``, and ``more`` of the same form."""
        if host in LOCAL:
            names = [_with_port(name, port) for name in LOCAL]
        else:
            machine = socket.gethostname()
            names = [machine, f"{machine}.local", "localhost" if host in EVERY_ADDRESS else _with_port(host, port)]
        return cls(frozenset(name.lower() for name in (*names, *more)), host in EVERY_ADDRESS)

    def named(self, authority: str) -> bool:
        """Whether ``authority`` ("name:port") is one of the names."""
        authority = authority.lower()
        return authority in self.names or _PORT.sub("", authority) in self.names

    def allows(self, authority: str) -> bool:
        """Whether a request may be addressed to ``authority``."""
        return self.named(authority) or (self.any_address and _is_address(_PORT.sub("", authority)))


class AllowedHosts:
    """Lets through what is addressed to one of ``hosts`` and comes from a page of theirs, or from no web page at all."""

    def __init__(self, app: App, hosts: Hosts) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on."""
        reason = self._refusal(scope) if scope["type"] in REQUESTS else ""
        if reason:
            await refuse(scope, send, 403, reason)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> str:
        """Why the request is refused; empty if it is not."""
        hosts, origins = headers(scope, "host"), headers(scope, "origin")
        if len(hosts) != 1 or not self._hosts.allows(hosts[0]):
            return f"This page is not served as {_shown(hosts)}: start it with --allow-host to serve it under that name, too."
        for origin in origins:
            page = _ORIGIN.fullmatch(origin)
            if page is None or (page[1].lower() != hosts[0].lower() and not self._hosts.named(page[1])):
                return f"Requests from {_shown([origin])} are refused: this page answers itself only."
        elsewhere = "cross-site" in headers(scope, "sec-fetch-site")
        if elsewhere and not origins and "document" not in headers(scope, "sec-fetch-dest"):  # a link may lead here
            return "Requests from other websites are refused: this page answers itself only."
        return ""


def _with_port(host: str, port: int) -> str:
    """As browsers write it: an IPv6 address in brackets, and no port where it is the usual one."""
    name = f"[{host}]" if ":" in host else host
    return name if port in (80, 443) else f"{name}:{port}"


def _is_address(name: str) -> bool:
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _shown(names: list[str]) -> str:
    return ", ".join(names)[:100] or "no host"
