"""A server driven by visitors who come at random moments: bounded, on this machine, and everybody is accounted for."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from serve import idle, until
from toys import tiny_engine

from specdec.benchmark import __main__ as benchmark
from specdec.benchmark.arrivals import Visit, arrivals_text, drive, fold, measure
from specdec.serving.http import Api
from specdec.serving.line import Line
from specdec.serving.server import serving
from specdec.serving.service import Service


def test_every_visitor_is_served_and_measured() -> None:
    figures = measure(tiny_engine(), ["one, two", "x"], 50.0, {"max_tokens": 20, "temperature": 0.9, "seed": 1})
    assert figures["requests"] == 100
    assert figures["failed"] == 0, figures["errors"]
    assert figures["tokens_per_second"] > 0
    assert 0 < figures["first_token_seconds"]["median"] <= figures["first_token_seconds"]["p95"]
    assert "100 requests" in arrivals_text(figures)


def test_only_this_machine_is_driven_and_within_bounds() -> None:
    for url, bounds in (
        ("http://example.com", {}),
        ("http://127.0.0.1.example.com", {}),
        ("http://127.0.0.1:1", {"requests": 10**6}),
        ("http://127.0.0.1:1", {"seconds": 10**6}),
        ("http://127.0.0.1:1", {"seconds": 0}),
    ):
        with pytest.raises(ValueError, match=r"loopback|at most"):
            asyncio.run(drive(url, ["x"], 1.0, **bounds))


def test_who_is_refused_or_not_served_in_time_counts_as_failed() -> None:
    service, line = Service(tiny_engine()), Line(1)
    with serving(Api(service, line).app()) as url:
        refused = asyncio.run(drive(url, ["x"], 100.0, requests=3, asked={"temperature": 9}))
        assert refused["failed"] == 3
        assert "temperature" in refused["errors"][0]
        held = line.enter("somebody else")
        late = asyncio.run(drive(url, ["x"], 100.0, requests=3, seconds=0.2))
        assert (late["failed"], late["errors"]) == (late["requests"], ["gave up"])
        line.leave(held)
        until(lambda: line.idle and idle(service))
    service.close()
    service.join(10)


def test_the_figures_are_folded_from_what_each_visitor_met() -> None:
    visits = [
        Visit(0.0, [1.0, 2.0, 4.0], 30, 5.0),
        Visit(2.0, [3.0, 4.0], 20, 10.0),
        Visit(3.0, [], 0, 4.0, "refused"),
    ]
    figures = fold(visits)
    assert figures["tokens_per_second"] == 5
    assert figures["first_token_seconds"]["median"] == 2
    assert figures["gap_seconds"]["median"] == 1
    assert (figures["requests"], figures["failed"], figures["errors"]) == (3, 1, ["refused"])


def test_the_command_drives_a_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def engine(*_: Any, **__: Any) -> Any:
        return tiny_engine()

    monkeypatch.setattr(benchmark, "SpeculativeEngine", engine)
    monkeypatch.setattr(benchmark, "load_questions", lambda *_: [type("Question", (), {"turns": ("x",)})])
    monkeypatch.setattr(sys, "argv", ["benchmark", "--arrivals", "100", "--max-new-tokens", "5"])
    assert benchmark.main() == 0
    assert "100 a second" in capsys.readouterr().out
    for wrong in (["0"], ["x"], ["1", "--decodings", "tree"], ["1", "--random-weights", "llama-7b"]):
        monkeypatch.setattr(sys, "argv", ["benchmark", "--arrivals", *wrong])
        with pytest.raises(SystemExit):
            benchmark.main()
        assert "--arrivals" in capsys.readouterr().err
