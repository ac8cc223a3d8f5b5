"""What a stranger can and cannot do to a page, over HTTP against the running app."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from strangers import Held, asked, heard, serving

from ui import middleware, stream
from ui.state import MAX_TABS
from ui.visitors import PUBLIC, Pending

PUBLICLY = ("--public", "--trusted-proxies", "1")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "uploads"))
    (tmp_path / "uploads").mkdir()


@pytest.fixture(scope="module")
def held() -> Held:
    return Held()


@pytest.fixture
def engine(held: Held) -> Iterator[Held]:
    held.begun.clear()
    yield held
    held.free.set()


def until(holds: Callable[[], bool]) -> None:
    """Wait until ``holds()``; how long that takes is no matter."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def event(address: str, handler: str) -> int:
    """The number of a private event, by the name of its handler."""
    return next(one["id"] for one in httpx.get(f"{address}/config").json()["dependencies"] if one["api_name"] == handler)


def fire(address: str, handler: str, session: str, data: list[Any] | None = None, **more: Any) -> httpx.Response:
    """Trigger a private event that does not queue."""
    headers = more.pop("headers", {})
    body = {"data": data or [], "session_hash": session, "fn_index": event(address, handler), **more}
    return httpx.post(f"{address}/gradio_api/run/predict", json=body, headers=headers, timeout=60)


FOREIGN = [
    {"Host": "x.localhost:{port}"},
    {"Host": "localhost.:{port}"},
    {"Host": "rebound.example:{port}"},
    {"Host": "127.0.0.1"},
    {"Host": "[::1]:{port}", "Origin": "http://evil.example"},
    {"Origin": "http://evil.example"},
    {"Origin": "http://localhost:1"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "empty"},
]
ROUTES = [
    ("GET", "/"),
    ("GET", "/config"),
    ("GET", "/theme.css"),
    ("GET", "/gradio_api/file=ui/assets/sidebar.js"),
    ("GET", "/gradio_api/queue/data?session_hash=s"),
    ("GET", "/gradio_api/heartbeat/s"),
    ("GET", "/nowhere"),
    ("POST", "/gradio_api/run/predict"),
    ("POST", "/gradio_api/queue/join"),
    ("POST", "/gradio_api/call/chat"),
    ("POST", "/gradio_api/upload"),
    ("POST", "/gradio_api/component_server"),
    ("OPTIONS", "/gradio_api/run/predict"),
]


def test_no_website_reaches_any_route_of_a_page_on_this_machine(engine: Held) -> None:
    with serving(engine.service) as address:
        port = address.rsplit(":", 1)[1]
        for headers in FOREIGN:
            headers = {name: value.format(port=port) for name, value in headers.items()}
            for method, route in ROUTES:
                more = {"Access-Control-Request-Method": "POST"} if method == "OPTIONS" else {}
                answer = httpx.request(method, address + route, headers={**headers, **more}, timeout=60)
                assert answer.status_code == 403, (method, route, headers)
                assert "access-control-allow-origin" not in answer.headers
        own = {"Host": f"localhost:{port}", "Origin": f"http://127.0.0.1:{port}"}
        assert httpx.get(address, headers=own).status_code == 200
        assert httpx.get(address, headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"}).status_code == 200


def test_another_name_is_served_where_it_is_allowed(engine: Held) -> None:
    with serving(engine.service, "--allow-host", "chat.example", "--allow-host", "other.example:81") as address:
        for host, status in (
            ("chat.example", 200),
            ("chat.example:444", 200),
            ("other.example:81", 200),
            ("other.example", 403),
        ):
            assert httpx.get(address, headers={"Host": host, "Origin": f"https://{host}"}).status_code == status
        assert "--allow-host" in httpx.get(address, headers={"Host": "other.example"}).text


def test_a_client_cannot_name_a_file_to_be_read_or_deleted(engine: Held, tmp_path: Path) -> None:
    victim = middleware.Path(__file__).parent.parent / "ui/assets/sidebar.js"
    outside = tmp_path / "diary.txt"
    outside.write_text("dear diary")
    (tmp_path / "uploads/link.txt").symlink_to(outside)
    with serving(engine.service) as address:
        for path in (victim, outside, tmp_path / "uploads/link.txt", tmp_path / "uploads/../diary.txt", "x" * 5000):
            files = [{"path": str(path), "orig_name": "a.txt", "meta": {"_type": "gradio.FileData"}}]
            join = {"data": [files], "session_hash": "s", "fn_index": event(address, "read")}
            assert httpx.post(f"{address}/gradio_api/queue/join", json=join).status_code == 200
            with httpx.stream("GET", f"{address}/gradio_api/queue/data?session_hash=s", timeout=60) as stream:
                told = [line for line in stream.iter_lines() if "process_completed" in line]
            assert told
            assert "Took in 1" not in told[0]
            assert victim.exists()
            assert outside.read_text() == "dear diary"


def test_what_is_uploaded_is_read_and_deleted(engine: Held, tmp_path: Path) -> None:
    with serving(engine.service) as address:
        (path,) = httpx.post(f"{address}/gradio_api/upload", files={"files": ("a.txt", b"hello there")}).json()
        assert Path(path).is_relative_to(tmp_path / "uploads")
        files = [{"path": path, "orig_name": "a.txt", "meta": {"_type": "gradio.FileData"}}]
        join = {"data": [files], "session_hash": "s", "fn_index": event(address, "read")}
        httpx.post(f"{address}/gradio_api/queue/join", json=join).raise_for_status()
        with httpx.stream("GET", f"{address}/gradio_api/queue/data?session_hash=s", timeout=60) as stream:
            told = "".join(line for line in stream.iter_lines() if "process_completed" in line)
        assert "Took in 11 tokens from 1 file." in told
        assert not Path(path).exists()


def test_nothing_is_uploaded_where_the_page_has_no_field_for_it_or_no_room(
    engine: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def upload(address: str) -> int:
        return httpx.post(f"{address}/gradio_api/upload", files={"files": ("a.txt", io.BytesIO(b"x" * 100))}).status_code

    with serving(engine.service, "--public", "--memory") as address:
        assert upload(address) == 404
    with serving(engine.service, "--no-memory") as address:
        assert upload(address) == 404
        assert httpx.get(f"{address}/gradio_api/deep_link?session_hash=s").status_code == 404
    assert not any((tmp_path / "uploads").iterdir())
    monkeypatch.setattr(middleware, "MAX_UPLOADS", 50)
    with serving(engine.service) as address:
        assert (upload(address), upload(address)) == (200, 507)


def test_pending_replies_are_capped_per_visitor_and_others_are_served_in_turn(engine: Held) -> None:
    engine.free.clear()
    with serving(engine.service, *PUBLICLY) as address, ThreadPoolExecutor(60) as clients:
        first = clients.submit(heard, address, asked(address, "a-first", visitor="203.0.113.1"))
        until(lambda: engine.begun == ["a-first"])
        greedy = [clients.submit(heard, address, asked(address, f"a{number}", visitor="203.0.113.1")) for number in range(50)]
        until(lambda: sum(one.done() for one in greedy) == 50 - (PUBLIC.pending - 1))
        refused = [one for one in greedy if one.done()]
        assert all(one.result()[0] == "error" for one in refused)
        assert all(f"You already have {PUBLIC.pending} replies waiting" in one.result()[1] for one in refused)
        other = clients.submit(heard, address, asked(address, "b", visitor="203.0.113.2"))
        beyond = [asked(address, "b-too", visitor="203.0.113.2") for _ in range(PUBLIC.pending)]
        words = [clients.submit(heard, address, one) for one in beyond]
        until(lambda: any(one.done() for one in words))  # so the visitor's first has come in
        engine.free.set()
        assert first.result()[0] == other.result()[0] == "complete"
        assert engine.begun.index("b") == 1, "after the reply that was being written, and before all that were asked earlier"


def test_who_waits_takes_nothing_that_another_needs(engine: Held) -> None:
    engine.free.clear()
    with serving(engine.service, *PUBLICLY) as address, ThreadPoolExecutor(80) as clients, ExitStack() as leaving:
        leaving.callback(engine.free.set)
        waiting = [clients.submit(heard, address, asked(address, "hi", visitor=f"203.0.113.{number}")) for number in range(60)]
        mine = [clients.submit(heard, address, asked(address, "me", visitor="198.51.100.1")) for _ in range(PUBLIC.pending + 1)]
        until(lambda: any(one.done() for one in mine))  # a refusal: this call was looked at, although 60 others wait
        assert sum(one.done() for one in waiting) == 0
        assert fire(address, "settle", "page").status_code == 200, "nor is the page held up"
        engine.free.set()
        assert {one.result()[0] for one in waiting} == {"complete"}


def test_a_call_to_which_nobody_listens_never_takes_its_turn(engine: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "UNHEARD", 0.5)
    counts: list[Pending] = []
    monkeypatch.setattr("ui.replies.Pending", lambda most: counts.append(Pending(most)) or counts[-1])
    engine.free.clear()
    with serving(engine.service, *PUBLICLY) as address, ThreadPoolExecutor(4) as clients, ExitStack() as leaving:
        leaving.callback(engine.free.set)
        first = clients.submit(heard, address, asked(address, "first", visitor="203.0.113.1"))
        until(lambda: engine.begun == ["first"])
        for _ in range(PUBLIC.pending):
            asked(address, "unheard", visitor="203.0.113.2")
        until(lambda: counts[0].total == 1 + PUBLIC.pending)
        until(lambda: counts[0].total == 1)
        engine.free.set()
        assert first.result()[0] == "complete"
        assert heard(address, asked(address, "heard", visitor="203.0.113.2"))[0] == "complete"
        assert engine.begun == ["first", "heard"]


def test_two_messages_of_one_client_are_answered_one_after_the_other(engine: Held) -> None:
    with serving(engine.service) as address, ThreadPoolExecutor(2) as clients:
        alone = heard(address, asked(address, "one", session="alone", tokens=40))
        engine.free.clear()
        first = asked(address, "one", session="both", tokens=40)
        until(lambda: engine.begun[-1:] == ["one"] and len(engine.begun) == 2)
        second = asked(address, "two", session="both", tokens=8)
        told = clients.submit(_completed, address, "both", 2)
        engine.free.set()
        outcomes = told.result()
        assert [success for success, _ in outcomes.values()] == [True, True]
        assert json.dumps([outcomes[first][1]]) == alone[1], "whole, and not cut off by the second"
        assert second in outcomes
        assert engine.begun == ["one", "one", "two"]


def _completed(address: str, session: str, count: int) -> dict[str, tuple[bool, Any]]:
    """How ``count`` events of a session ended: success and what was said."""
    outcomes: dict[str, tuple[bool, Any]] = {}
    said: dict[str, str] = {}
    while len(outcomes) < count:
        with httpx.stream("GET", f"{address}/gradio_api/queue/data?session_hash={session}", timeout=120) as stream:
            for line in stream.iter_lines():
                if not line.startswith("data:"):
                    continue
                message = json.loads(line.removeprefix("data:"))
                if message["msg"] == "process_completed":
                    data = message["output"].get("data", [None])
                    outcomes[message["event_id"]] = message["success"], data[0] or said.get(message["event_id"])
    return outcomes


def test_lengths_are_checked_before_anything_is_stored(engine: Held) -> None:
    with serving(engine.service, *PUBLICLY) as address:
        huge = httpx.post(f"{address}/gradio_api/call/chat", content=b"x" * (PUBLIC.body_bytes + 1))
        assert huge.status_code == 413
        chunks = httpx.post(f"{address}/gradio_api/call/chat", content=iter([b"x"]))
        assert chunks.status_code == 411
        fields = ["tree", "auto", 0, 1, 0, 8, "", True]
        for number in range(20):
            answer = fire(address, "send", f"s{number}", ["x" * 1_000_000, *fields])
            assert "reads at most" in answer.json()["error"]
        begun = [fire(address, "send", f"b{number}", ["hi", *fields]).status_code for number in range(20)]
        assert begun == [200] * PUBLIC.pending + [500] * (20 - PUBLIC.pending), "begun and never streamed"


def test_new_sessions_of_a_stranger_do_not_end_the_reply_of_another(engine: Held) -> None:
    engine.free.clear()
    with serving(engine.service, *PUBLICLY) as address, ThreadPoolExecutor(1) as clients, ExitStack() as leaving:
        leaving.callback(engine.free.set)
        asked(address, "mine", visitor="203.0.113.1", session="mine", tokens=30)
        told = clients.submit(_completed, address, "mine", 1)
        until(lambda: engine.begun == ["mine"])
        settle = event(address, "settle")
        with httpx.Client(base_url=address, headers={"X-Forwarded-For": "203.0.113.66"}, timeout=60) as stranger:
            for number in range(MAX_TABS + 10):
                body = {"data": [], "session_hash": f"s{number}", "fn_index": settle}
                stranger.post("/gradio_api/run/predict", json=body).raise_for_status()
        engine.free.set()
        ((success, _),) = told.result().values()
        assert success
        chat = json.loads(fire(address, "settle", "mine", headers={"X-Forwarded-For": "203.0.113.1"}).json()["data"][-1])
        assert [message["state"] for message in chat["chat"]["messages"]] == ["done", "done"]


def test_a_local_page_behind_a_proxy_hints_that_it_may_be_public(engine: Held, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(engine.service) as address:
        for _ in range(2):
            httpx.get(address, headers={"X-Forwarded-For": "203.0.113.1"})
    assert capsys.readouterr().err.count("--public --trusted-proxies 1") == 1


def test_on_a_shared_page_only_the_owner_may_change_model_and_memory(
    engine: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names(address: str, **options: Any) -> set[str]:
        return {one["api_name"] for one in httpx.get(f"{address}/config", **options).json()["dependencies"]}

    owned = {"wipe", "switch", "read", "load"}
    with serving(engine.service, "--public", "--memory") as address:
        assert not owned & names(address), "without an owner there is nothing to change them with"
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "another"))  # the first page still uses its memory
    arguments = ("--public", "--memory", "--auth", "alice:a", "--auth", "bob:b")
    with serving(engine.service, *arguments) as address:
        told = {}
        for name, word in (("alice", "a"), ("bob", "b")):
            with httpx.Client(base_url=address, timeout=60) as client:
                client.post("/login", data={"username": name, "password": word}).raise_for_status()
                dependencies = client.get("/config").json()["dependencies"]
                for handler in ("wipe", "load"):
                    number = next(one["id"] for one in dependencies if one["api_name"] == handler)
                    data = ["/no/such/model"] if handler == "load" else []
                    join = {"data": data, "session_hash": name + handler, "fn_index": number}
                    client.post("/gradio_api/queue/join", json=join).raise_for_status()
                    with client.stream("GET", "/gradio_api/queue/data", params={"session_hash": name + handler}) as stream:
                        told[name, handler] = "".join(line for line in stream.iter_lines() if "process_completed" in line)
        assert "belongs to the owner" in told["bob", "wipe"]
        assert "chosen by the owner" in told["bob", "load"]
        assert "Wiped" in told["alice", "wipe"]
        assert "does not exist" in told["alice", "load"]


def test_the_api_beside_the_page_answers_this_machine_and_no_website(engine: Held) -> None:
    with serving(engine.service) as address:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "model": engine.engine.name}
        answer = httpx.post(f"{address}/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 4)
        website = {"Origin": "http://a.example"}
        assert httpx.post(f"{address}/v1/chat/completions", json=body, headers=website).status_code == 403
        assert "Token Tree Chat" in httpx.get(address).text
    with serving(engine.service, "--public") as address:
        assert httpx.post(f"{address}/v1/chat/completions", json=body).status_code in (404, 405)
    with serving(engine.service, "--public", "--api-key", "secret") as address:
        assert httpx.post(f"{address}/v1/chat/completions", json=body).status_code == 401
        key = {"Authorization": "Bearer secret"}
        assert httpx.post(f"{address}/v1/chat/completions", json=body, headers=key).status_code == 200
