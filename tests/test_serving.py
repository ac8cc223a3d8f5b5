"""What stands in front of every route, whoever mounts it: tried on an application of three lines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from specdec.serving.asgi import App, Message, Receive, Scope, Send
from specdec.serving.bodies import Bodies
from specdec.serving.clients import Clients
from specdec.serving.hosts import AllowedHosts, Hosts

LOCALLY = Hosts.served("127.0.0.1", 7860)


async def greeting(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": f"{scope['type']}.reached", "client": scope.get("client")})


def sent(app: App, kind: str = "http", path: str = "/", **headers: str) -> Message:
    """The first thing that ``app`` sends to a request with these headers."""
    scope = {
        "type": kind,
        "path": path,
        "client": ("10.0.0.9", 5),
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
    }
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing is read before it is checked")

    asyncio.run(app(scope, receive, send))
    return messages[0]


def reached(answer: Message) -> bool:
    return bool(answer["type"].endswith(".reached"))


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_requests_and_websockets_from_elsewhere_do_not_get_through(kind: str) -> None:
    app = AllowedHosts(greeting, LOCALLY)
    assert reached(sent(app, kind, host="127.0.0.1:7860"))
    assert reached(sent(app, kind, host="LOCALHOST:7860", origin="http://localhost:7860"))
    assert reached(sent(app, kind, host="[::1]:7860"))
    for headers in ({"host": "evil.example"}, {"host": "127.0.0.1:7860", "origin": "https://evil.example"}, {}):
        refused = sent(app, kind, **headers)
        assert refused.get("status", 403) == 403
        assert refused["type"] in ("http.response.start", "websocket.close")


def test_the_start_of_the_server_is_nobodys_request() -> None:
    assert reached(sent(AllowedHosts(Bodies(Clients(greeting, 1, lambda: None), 1), LOCALLY), "lifespan"))


@pytest.mark.parametrize(
    ("host", "port", "name", "allowed"),
    [
        ("127.0.0.1", 7860, "127.0.0.1:7861", False),
        ("127.0.0.1", 80, "127.0.0.1", True),
        ("127.0.0.1", 7860, "192.168.1.5:7860", False),
        ("::1", 7860, "[::1]:7860", True),
        ("192.168.1.5", 7860, "192.168.1.5:7860", True),
        ("192.168.1.5", 7860, "192.168.1.6:7860", False),
        ("fd00::5", 7860, "[fd00::5]:7860", True),
        ("0.0.0.0", 7860, "192.168.1.5:9000", True),  # an address is no name that a website could take; ports may be mapped
        ("0.0.0.0", 7860, "[fd00::5]:7860", True),
        ("0.0.0.0", 7860, "localhost:8000", True),
        ("0.0.0.0", 7860, "rebound.example:7860", False),
        ("::", 7860, "192.168.1.5:7860", True),
        ("0.0.0.0", 7860, "192.168.1.5.evil.example:7860", False),
        ("0.0.0.0", 7860, "evil@192.168.1.5:7860", False),
        ("0.0.0.0", 7860, "", False),
    ],
)
def test_a_page_answers_under_the_names_it_is_served_under(host: str, port: int, name: str, allowed: bool) -> None:
    assert Hosts.served(host, port).allows(name) is allowed


def test_another_address_is_another_origin_where_every_address_is_served() -> None:
    app = AllowedHosts(greeting, Hosts.served("0.0.0.0", 7860))
    assert reached(sent(app, host="192.168.1.5:7860", origin="http://192.168.1.5:7860"))
    assert not reached(sent(app, host="192.168.1.5:7860", origin="http://6.6.6.6:7860"))


def test_this_machines_name_is_one_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Den")
    hosts = Hosts.served("0.0.0.0", 7860)
    assert all(map(hosts.allows, ("den:7860", "den.local:7860")))
    assert not Hosts.served("127.0.0.1", 7860).allows("den:7860")


def test_bodies_are_refused_by_their_length_before_they_are_read() -> None:
    app = Bodies(greeting, most=10, closed=("/closed",), stored=("/kept",), full=lambda: "full")
    assert reached(sent(app, content_length="10"))
    told: dict[str, Any] = {
        "too long": sent(app, content_length="11"),
        "no number": sent(app, content_length="-1"),
        "endless": sent(app, content_length="1" * 5000),
        "not told": sent(app, transfer_encoding="chunked"),
        "closed": sent(app, path="/closed/route"),
        "full": sent(app, path="/kept", content_length="1"),
    }
    assert [answer["status"] for answer in told.values()] == [413, 413, 413, 411, 404, 507]


def test_the_client_is_whom_the_trusted_proxy_saw() -> None:
    hints: list[None] = []
    assert sent(Clients(greeting, 1, lambda: hints.append(None)), x_forwarded_for="6.6.6.6, 203.0.113.7")["client"] == (
        "203.0.113.7",
        5,
    )
    assert sent(Clients(greeting, 1, lambda: hints.append(None)))["client"] == ("10.0.0.9", 5)
    assert not hints
    app = Clients(greeting, 0, lambda: hints.append(None))
    assert [sent(app, x_forwarded_for="6.6.6.6")["client"] for _ in range(2)] == [("10.0.0.9", 5)] * 2
    assert len(hints) == 1, "once"
