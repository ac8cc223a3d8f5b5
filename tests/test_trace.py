"""Traces: what goes out comes back in, and nothing else does; graphs and figures of a step."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import random_steps, random_trace, token_text
from toys import tiny_engine

from specdec.draw import to_networkx, to_node_link_json, tree_figure, write_graphml
from specdec.step import FinishReason
from specdec.text import SpecialText
from specdec.tree import Source
from ui import trace as traces
from ui.panel import EXAMPLE, replay, to_html
from ui.record import main as record_trace
from ui.trace import Recorder, TraceError, load_trace, save_trace


@pytest.fixture
def trace() -> dict[str, Any]:
    return random_trace(count=6, nodes=8)


def test_a_trace_survives_the_file(trace: dict[str, Any], tmp_path: Path) -> None:
    save_trace(trace, tmp_path / "reply.json")
    loaded = load_trace(tmp_path / "reply.json")
    assert loaded == load_trace(json.dumps(trace))
    assert {**loaded, "steps": None} == {**trace, "steps": None}
    for was, now in zip(trace["steps"], loaded["steps"], strict=True):
        assert {**was, "figures": None} == {**now, "figures": None}
        assert now["figures"] == pytest.approx(was["figures"], rel=1e-3)


def test_a_byte_order_mark_is_no_harm(trace: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "reply.json").write_text(json.dumps(trace), encoding="utf-8-sig")
    assert load_trace(tmp_path / "reply.json") == load_trace(json.dumps(trace))


def test_a_trace_that_knows_less_of_the_targets_own_token_opens(trace: dict[str, Any]) -> None:
    for record in trace["steps"]:
        del record["target"]["next_prob"], record["target"]["next_rank"], record["special"]
    (first, *_) = load_trace(json.dumps(trace))["steps"]
    assert (first["target"]["next_prob"], first["target"]["next_rank"], first["special"]) == (None, None, {})


def test_a_record_tells_which_of_its_tokens_are_no_text() -> None:
    def named(token_ids: Sequence[int]) -> list[str]:
        texts = [SpecialText(text) for text in token_text(token_ids)]
        for text in texts:
            text.meaning = "end of reply"
        return [text if token == 7 else str(text) for token, text in zip(token_ids, texts, strict=True)]

    recorder = Recorder({}, {}, [], named)
    for step in random_steps(9, nodes=12):
        recorder.add(step)
        ids = {*step.tree.token_ids.tolist(), *step.token_ids, step.verdict.next_token}
        assert recorder.records[-1]["special"] == ({"7": "end of reply"} if 7 in ids else {})
    assert any(record["special"] for record in recorder.records)
    assert load_trace(json.dumps(recorder.trace()))["steps"][0]["special"] == recorder.records[0]["special"]


def test_figures_in_a_file_are_not_trusted(trace: dict[str, Any]) -> None:
    trace["steps"][-1]["figures"]["speedup"] = 1000.0
    assert load_trace(json.dumps(trace))["steps"][-1]["figures"]["speedup"] < 10


def test_unknown_fields_are_dropped(trace: dict[str, Any]) -> None:
    trace["extra"] = trace["steps"][0]["extra"] = "<script>"
    assert "<script>" not in json.dumps(load_trace(json.dumps(trace)))


def test_the_recorded_example_is_a_trace_with_details() -> None:
    example = load_trace(EXAMPLE)
    assert EXAMPLE.stat().st_size < 300_000
    assert all(record["target"] for record in example["steps"])
    assert any(len(record["token_ids"]) >= 3 for record in example["steps"])
    assert "/" not in example["model"]["name"].removeprefix("Qwen/")


def test_the_format_names_every_field_and_word_of_a_record(trace: dict[str, Any]) -> None:
    told = set(re.findall(r'"(\w+)"', traces.__doc__ or ""))
    record = trace["steps"][0]
    parts = [trace, record, *(part for part in record.values() if isinstance(part, dict))]
    fields = {name for part in parts for name in part}
    assert fields | set(get_args(FinishReason)) | {source.name.lower() for source in Source} <= told


def test_a_recorded_trace_tells_model_number_format_and_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ui.record.SpeculativeEngine", lambda model: tiny_engine())
    arguments = ["--prompt", "Hello", "--max-new-tokens", "4", "--budget", "4", "--out", str(tmp_path / "reply.json")]
    monkeypatch.setattr("sys.argv", ["record", *arguments])
    record_trace()
    facts = {"name": tiny_engine().name, "dtype": "float32", "device": "cpu"}
    assert load_trace(tmp_path / "reply.json")["model"] == facts


def test_a_trace_keeps_how_many_replies_shared_a_pass_and_an_older_one_shared_none(trace: dict[str, Any]) -> None:
    trace["steps"][0]["sequences"] = 3
    del trace["steps"][1]["sequences"]
    assert [record["sequences"] for record in load_trace(json.dumps(trace))["steps"][:2]] == [3, 1]


BROKEN = [
    ("index", 3, "index"),
    ("tree", None, "tree"),
    ("tree.parents", [-1, 0, 1, 2, 9, 1, 1, 1, 1], "parent"),
    ("tree.parents", [-1], "parents"),
    ("tree.token_ids", [], "nodes"),
    ("tree.token_ids", [10**30] * 9, "too large"),
    ("tree.token_ids", [True] * 9, "token_ids"),
    ("tree.scores", ["high"] * 9, "scores"),
    ("tree.scores", [1e300] * 9, "scores"),
    ("tree.sources", ["<img>"] * 9, "sources"),
    ("verdict.path", [0, 99], "path"),
    ("verdict.path", [], "path"),
    ("verdict.kind", "lucky", "kind"),
    ("token_ids", [1, 2, 3], "token_ids"),
    ("timings.verify", -1.0, "verify"),
    ("timings.verify", 1e308, "verify"),
    ("timings", {}, "timings|prefill"),
    ("plain_seconds", "0.1", "plain_seconds"),
    ("plain_seconds", 1e300, "plain_seconds"),
    ("finish_reason", "bored", "finish_reason"),
    ("target", {"probs": [2.0] * 9, "ranks": [0] * 9}, "probs"),
    ("target.next_prob", 1.5, "next_prob"),
    ("target.next_rank", 0.5, "next_rank"),
    ("target.next_rank", -1, "next_rank"),
    ("target.next_rank", None, "go together"),
    ("note", 7, "note"),
    ("sequences", 0, "sequences"),
    ("sequences", 1.5, "sequences"),
    ("special", {"2": 7}, "special"),
    ("special", {"<img>": "a"}, "special"),
    ("special", ["a"], "special"),
    ("texts", ["a"], "texts"),
    ("token_texts", [1], "token_texts"),
    ("next_text", None, "next_text"),
]


@pytest.mark.parametrize(("where", "value", "message"), BROKEN)
def test_a_broken_record_is_named(trace: dict[str, Any], where: str, value: Any, message: str) -> None:
    *parents, name = where.split(".")
    place = trace["steps"][0]
    for parent in parents:
        place = place[parent]
    place[name] = value
    with pytest.raises(TraceError, match=rf"^step 0: .*({message})") as caught:
        load_trace(json.dumps(trace))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", ["1e999", "NaN", "-Infinity"])
def test_numbers_that_a_browser_cannot_read_are_refused(trace: dict[str, Any], number: str) -> None:
    text = json.dumps({**trace, "settings": {"temperature": 0.25}}).replace("0.25", number)
    with pytest.raises(TraceError, match="settings"):
        load_trace(text)


def test_figures_stay_finite_whatever_the_seconds(trace: dict[str, Any]) -> None:
    for record in trace["steps"]:
        record["timings"] = dict.fromkeys(record["timings"], 5e-324)
        record["plain_seconds"] = 1e6
    json.dumps(load_trace(json.dumps(trace)), allow_nan=False)


def test_no_payload_holds_what_a_browser_cannot_read(trace: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="JSON"):
        replay({**trace, "settings": {"temperature": float("nan")}})


FOREIGN = [
    "",
    "hello",
    "[]",
    "null",
    "{}",
    '{"format": "har"}',
    '{"format": "specdec-trace", "version": 99}',
    "[" * 100_000,
]


@pytest.mark.parametrize("text", FOREIGN)
def test_foreign_text_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(TraceError) as caught:
        load_trace(text)
    assert "trace" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_huge_missing_and_binary_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_BYTES", 1000)
    (tmp_path / "huge.json").write_text("x" * 1001)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "foreign.json").write_text("{}")
    refused = {"huge": "larger", "missing": "cannot be read", "binary": "UTF-8", "broken": "no valid JSON", "foreign": "format"}
    for name, message in refused.items():
        with pytest.raises(TraceError, match=rf"{name}.json.*{message}"):
            load_trace(tmp_path / f"{name}.json")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_whatever_is_wrong_with_a_file_it_opens_or_is_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    changed = bytearray(json.dumps(random_trace(count=2, nodes=3)).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):
        del changed[data.draw(st.integers(0, len(changed) - 1)) :]
    path = tmp_path_factory.getbasetemp() / "changed.json"
    path.write_bytes(bytes(changed))
    with suppress(TraceError):
        load_trace(path)


def test_a_file_of_many_empty_objects_is_not_even_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces.json, "loads", lambda text: pytest.fail("it was read"))
    for part in ("{}", "[]"):
        with pytest.raises(TraceError, match="too many"):
            load_trace('{"format":"specdec-trace","version":1,"steps":[' + ",".join([part] * 500_000) + "]}")


def test_the_page_of_a_trace_needs_no_network(trace: dict[str, Any]) -> None:
    trace["steps"][0]["texts"][0] = "</script><img src=x onerror=alert(1)><!--style-->"
    page = to_html(trace)
    assert "</script><img" not in page
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page.split("<body>")[0])
    assert "default-src 'none'" in page


def test_to_networkx_carries_what_is_known() -> None:
    step = next(random_steps(1, nodes=12))
    graph = to_networkx(step, token_text)
    assert nx.is_arborescence(graph)
    assert len(graph) == len(step.tree)
    accepted = [node for node, verdict in graph.nodes(data="verdict") if verdict == "accepted"]
    assert accepted == list(step.verdict.path[1:])
    assert set(graph.nodes[1]) == {"token_id", "depth", "verdict", "token", "score", "source", "prob", "rank"}


def test_what_lies_beyond_the_end_of_a_reply_was_not_said() -> None:
    step = next(step for step in random_steps(20) if len(step.verdict.path) > 2)
    cut = replace(step, token_ids=step.token_ids[:1], finish_reason="eos")
    graph = to_networkx(cut)
    assert [graph.nodes[node]["verdict"] for node in step.verdict.path[:3]] == ["root", "accepted", "unsaid"]
    assert "1 accepted, one pass gave 1" in tree_figure(cut).layout.title.text


def test_graphml_and_json_come_back_even_with_control_characters(tmp_path: Path) -> None:
    step = next(random_steps(1, nodes=12))
    write_graphml(step, tmp_path / "tree.graphml", lambda ids: ["\x00</node>\ud83d" for _ in ids])
    assert len(nx.read_graphml(tmp_path / "tree.graphml")) == len(step.tree)
    assert len(nx.node_link_graph(json.loads(to_node_link_json(step, token_text)), edges="edges")) == len(step.tree)


def test_tree_figure_escapes_tokens_and_keeps_the_path_on_top() -> None:
    step = next(step for step in random_steps(20) if len(step.verdict.path) > 2)
    figure = tree_figure(step, lambda ids: ["<b>&" + "x" * 10_000 for _ in ids])
    labels = [annotation.text for annotation in figure.layout.annotations]
    assert len(labels) == len(step.tree) + 1
    assert all("<b>" not in label and len(label) < 60 for label in labels)
    on_top = [annotation for annotation in figure.layout.annotations if annotation.y == 0]
    assert len(on_top) >= len(step.verdict.path) + 1
