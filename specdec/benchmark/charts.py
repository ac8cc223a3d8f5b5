"""The report as one self-contained page: opens from disk, needs no network."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go

from specdec.benchmark.report import table

COLOURS = {
    "plain": "#8a8f98",
    "linear": "#4c72b0",
    "tree": "#0a7d5a",
    "transformers": "#b07d2b",
    "transformers-prompt-lookup": "#8c4a9c",
}

_STYLE = (
    "body{font:15px system-ui,sans-serif;max-width:1000px;margin:2rem auto;padding:0 1rem}pre{overflow-x:auto;font-size:12px}"
)


def to_html(folded: dict[str, Any]) -> str:
    """All charts and the table of `specdec.benchmark.report.fold`'s figures."""
    lanes = folded["lanes"]
    engine_lanes = {name: figures for name, figures in lanes.items() if "shares" in figures}
    charts = [_speedups(lanes, base) for base in ("transformers", "plain") if base in lanes]
    charts += [_tokens_per_pass(lanes), _calibration(engine_lanes), _shares(engine_lanes)]
    if "by_budget" in folded:
        charts.append(_by_budget(folded["by_budget"]))
    divs = [
        chart.update_layout(template="plotly_white", height=380, margin={"t": 60, "r": 20}).to_html(
            full_html=False, include_plotlyjs=index == 0, config={"displaylogo": False, "showSendToCloud": False}
        )
        for index, chart in enumerate(charts)
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>specdec benchmark</title><style>{_STYLE}</style>'
        f"<h1>Speculative decoding, measured</h1>{''.join(divs)}<h2>Table</h2><pre>{html.escape(table(folded))}</pre></html>"
    )


def _speedups(lanes: dict[str, Any], base: str) -> go.Figure:
    figure = go.Figure(layout={"title": f"Speedup over {base} by category (geometric mean, 95 % interval)", "barmode": "group"})
    for name, figures in lanes.items():
        if name == base:
            continue
        summaries = {"all": figures, **figures["by_category"]}
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


def _shares(lanes: dict[str, Any]) -> go.Figure:
    figure = go.Figure(layout={"title": "Where a step's time goes", "barmode": "stack"})
    for part in ("verify", "draft", "accept", "commit"):
        figure.add_bar(name=part, x=list(lanes), y=[100 * figures["shares"][part] for figures in lanes.values()])
    return figure.update_yaxes(title="% of decode time")


def _by_budget(by_budget: dict[str, float]) -> go.Figure:
    figure = go.Figure(layout={"title": "Tokens per pass by node budget (replayed from the recorded text)"})
    figure.add_scatter(
        x=[int(b) for b in by_budget], y=list(by_budget.values()), mode="lines+markers", line_color=COLOURS["tree"]
    )
    return figure.update_xaxes(title="nodes besides the root").update_yaxes(title="tokens per pass")
