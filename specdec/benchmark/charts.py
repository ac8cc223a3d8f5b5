"""The report as one self-contained page: opens from disk, needs no network."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go

from specdec.benchmark.latency import latency_text
from specdec.benchmark.parallel import parallel_table
from specdec.benchmark.report import table
from specdec.benchmark.traces import budget_table

COLOURS = {
    "plain": "#8a8f98",
    "linear": "#4c72b0",
    "tree": "#0a7d5a",
    "transformers": "#b07d2b",
    "transformers-prompt-lookup": "#8c4a9c",
    "transformers-static": "#c44e52",
    "turn by turn": "#7fb8a4",
    "transformers-continuous": "#8c4a9c",
}

_STYLE = (
    "body{font:15px system-ui,sans-serif;max-width:1000px;margin:2rem auto;padding:0 1rem}pre{overflow-x:auto;font-size:12px}"
)


def to_html(folded: dict[str, Any]) -> str:
    """All charts and tables of what `python -m specdec.benchmark` found: of a run, of a replay, or of a shape's cost."""
    charts: list[go.Figure] = []
    tables: list[str] = []
    if lanes := folded.get("lanes"):
        tables.append(table(folded))
        charts += [_speedups(lanes, base) for base in ("transformers", "plain") if base in lanes]
        if engine_lanes := {name: figures for name, figures in lanes.items() if "shares" in figures}:
            charts += [_tokens_per_pass(lanes), _calibration(engine_lanes), _buckets(engine_lanes), _shares(engine_lanes)]
    if "by_budget" in folded:
        charts.append(_by_budget(folded["by_budget"]))
        tables.append(budget_table(folded["by_budget"]))
    if "parallel" in folded:
        charts.append(_parallel(folded["parallel"]["lanes"]))
        tables.append(parallel_table(folded["parallel"]))
    if "latency" in folded:
        charts.append(_latency(folded["latency"]))
        tables.append(latency_text(folded["latency"]))
    if "cost" in folded:
        charts.append(_cost(folded["cost"]))
    setup = ", ".join(f"{name} {value}" for name, value in folded["setup"].items())
    divs = [
        chart.update_layout(template="plotly_white", height=380, margin={"t": 60, "r": 20}).to_html(
            full_html=False, include_plotlyjs=index == 0, config={"displaylogo": False, "showSendToCloud": False}
        )
        for index, chart in enumerate(charts)
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>specdec benchmark</title><style>{_STYLE}</style>'
        f"<h1>Speculative decoding, measured</h1><p>{html.escape(setup)}</p>{''.join(divs)}<h2>Tables</h2>"
        + "".join(f"<pre>{html.escape(text)}</pre>" for text in tables)
        + "</html>"
    )


def _speedups(lanes: dict[str, Any], base: str) -> go.Figure:
    figure = go.Figure(layout={"title": f"Speedup over {base} by category (geometric mean, 95 % interval)", "barmode": "group"})
    for name, figures in lanes.items():
        if name == base:
            continue
        summaries = {"all": figures, **figures.get("by_category", {})}
        summaries = {name: f for name, f in summaries.items() if f[f"speedup_vs_{base}"] is not None}
        values = [f[f"speedup_vs_{base}"] for f in summaries.values()]
        means = [value["geomean"] for value in values]
        figure.add_bar(
            name=name,
            x=list(summaries),
            y=means,
            marker_color=COLOURS[name],
            error_y={
                "array": [value["ci95"][1] - mean for value, mean in zip(values, means, strict=True)],
                "arrayminus": [mean - value["ci95"][0] for value, mean in zip(values, means, strict=True)],
            },
        )
    return figure.add_hline(y=1, line_dash="dash", annotation_text=f"{base} = 1.0")


def _tokens_per_pass(lanes: dict[str, Any]) -> go.Figure:
    figure = go.Figure(layout={"title": "Tokens per target pass by category", "barmode": "group"})
    for name, figures in lanes.items():
        summaries = {"all": figures, **figures["by_category"]}
        figure.add_bar(
            name=name, x=list(summaries), y=[f["tokens_per_pass"] for f in summaries.values()], marker_color=COLOURS[name]
        )
    return figure


def _calibration(lanes: dict[str, Any]) -> go.Figure:
    figure = go.Figure(layout={"title": "Calibration: expected against actual tokens per pass, a point per category"})
    top = 1.0
    for name, figures in lanes.items():
        categories = figures["by_category"]
        expected = [f["expected_tokens_per_pass"] for f in categories.values()]
        actual = [f["tokens_per_pass"] for f in categories.values()]
        top = max([top, *expected, *actual])
        figure.add_scatter(
            name=name, x=expected, y=actual, text=list(categories), mode="markers", marker={"color": COLOURS[name], "size": 10}
        )
    figure.add_scatter(x=[1, top], y=[1, top], mode="lines", line={"dash": "dash", "color": "#999"}, name="perfect")
    return figure.update_xaxes(title="expected").update_yaxes(title="actual")


def _buckets(lanes: dict[str, Any]) -> go.Figure:
    figure = go.Figure(layout={"title": "Calibration by score: how often nodes were thought to be accepted, and were"})
    for name, figures in lanes.items():
        buckets = figures["calibration"]
        figure.add_scatter(
            name=name,
            x=[bucket["expected"] for bucket in buckets],
            y=[bucket["accepted"] for bucket in buckets],
            text=[f"{bucket['nodes']} nodes" for bucket in buckets],
            mode="lines+markers",
            line_color=COLOURS[name],
        )
    figure.add_scatter(x=[0, 1], y=[0, 1], mode="lines", line={"dash": "dash", "color": "#999"}, name="perfect")
    return figure.update_xaxes(title="score").update_yaxes(title="accepted")


def _shares(lanes: dict[str, Any]) -> go.Figure:
    figure = go.Figure(layout={"title": "Where a step's time goes", "barmode": "stack"})
    for part in ("verify", "draft", "accept", "commit"):
        figure.add_bar(name=part, x=list(lanes), y=[100 * figures["shares"][part] for figures in lanes.values()])
    return figure.update_yaxes(title="% of decode time")


def _by_budget(by_budget: dict[str, dict[str, dict[str, Any]]]) -> go.Figure:
    figure = go.Figure(layout={"title": "Tokens per pass by node budget (recorded replies, replayed offline)"})
    for memory, budgets in by_budget.items():
        figure.add_scatter(
            name=f"{memory} memory",
            x=[int(budget) for budget in budgets],
            y=[figures["tokens_per_pass"] for figures in budgets.values()],
            mode="lines+markers",
            line={"color": COLOURS["tree"], "dash": "dot" if memory == "cold" else "solid"},
        )
    return figure.update_xaxes(title="nodes besides the root").update_yaxes(title="tokens per pass")


def _parallel(counts: dict[str, Any]) -> go.Figure:
    figure = go.Figure(layout={"title": "Tokens per second of all chats together (median of the runs, lowest to highest)"})
    for lane in next(iter(counts.values())):
        rates = [lanes[lane]["tokens_per_second"] for lanes in counts.values()]
        figure.add_scatter(
            name=lane,
            x=list(counts),
            y=[rate["median"] for rate in rates],
            error_y={
                "array": [rate["high"] - rate["median"] for rate in rates],
                "arrayminus": [rate["median"] - rate["low"] for rate in rates],
            },
            mode="lines+markers",
            line_color=COLOURS[lane],
        )
    return figure.update_xaxes(title="chats at once", type="category").update_yaxes(rangemode="tozero")


def _latency(figures: dict[str, Any]) -> go.Figure:
    figure = go.Figure(layout={"title": "Gap between tokens of a running reply, milliseconds", "barmode": "group"})
    gaps = figures["long_prompt"]
    for name, key, lane in (
        ("undisturbed", "undisturbed_gap_seconds", "plain"),
        (f"while {gaps['prompt_tokens']} tokens are read", "gap_seconds", "tree"),
    ):
        values = [1e3 * seconds for seconds in gaps[key].values()]
        figure.add_bar(name=name, x=["median", "95th percentile"], y=values, marker_color=COLOURS[lane])
    return figure


def _cost(cost: dict[str, Any]) -> go.Figure:
    figure = go.Figure(layout={"title": "Cost of a target pass by width, and the memory's limit for a plain one"})
    milliseconds = {int(width): 1e3 * seconds for width, seconds in cost["pass_seconds"].items()}
    figure.add_scatter(x=list(milliseconds), y=list(milliseconds.values()), mode="lines+markers", line_color=COLOURS["tree"])
    limit = 1e3 / cost["limit_tokens_per_second"]
    figure.add_hline(y=limit, line_dash="dash", annotation_text=f"reading everything once: {limit:.2f} ms")
    return figure.update_xaxes(title="nodes, root included").update_yaxes(title="milliseconds", rangemode="tozero")
