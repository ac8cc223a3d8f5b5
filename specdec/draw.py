"""Token trees for notebooks and graph tools: networkx graphs, GraphML, node-link JSON, Plotly figures.

Needs networkx and plotly; nothing else of the engine imports this module.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import networkx as nx
import plotly.graph_objects as go

from specdec.step import Step
from specdec.tree import Source

TokenText = Callable[[Sequence[int]], list[str]]

ACCEPTED, REJECTED, TARGET, ROOT = "#0b7a5c", "#68727c", "#b87608", "#1a1e24"
_LONGEST = 16
_SHOWN = {" ": "·", "\n": "⏎", "\t": "⇥"}


def to_networkx(step: Step, token_text: TokenText | None = None) -> nx.DiGraph:
    """The token tree as a directed graph, parents to children.

    Node attributes: ``token_id``, ``depth``, ``verdict`` ("root", "accepted", "rejected", or "unsaid": the reply ended before
    it), and where known ``token`` (its text), ``score`` (estimated probability to be accepted), ``source``, ``prob`` and
    ``rank`` (the target's). Graph attributes: ``index``, ``next_token``, ``kind``.
    """
    tree, path = step.tree, step.verdict.path
    verdicts = {node: "accepted" if at <= len(step.token_ids) else "unsaid" for at, node in enumerate(path)} | {0: "root"}
    graph = nx.DiGraph(index=step.index, next_token=step.verdict.next_token, kind=step.verdict.kind)
    texts = None if token_text is None else token_text(tree.token_ids.tolist())
    for node, (token_id, parent, depth) in enumerate(
        zip(tree.token_ids.tolist(), tree.parents.tolist(), tree.depths().tolist(), strict=True)
    ):
        verdict = verdicts.get(node, "rejected")
        attributes: dict[str, int | float | str] = {"token_id": token_id, "depth": depth, "verdict": verdict}
        if texts is not None:
            attributes["token"] = texts[node]
        if tree.scores is not None:
            attributes["score"] = float(tree.scores[node])
        if tree.sources is not None:
            attributes["source"] = Source(int(tree.sources[node])).name.lower()
        if step.target is not None:
            attributes |= {"prob": float(step.target.probs[node]), "rank": int(step.target.ranks[node])}
        graph.add_node(node, **attributes)
        if parent >= 0:
            graph.add_edge(parent, node)
    return graph


def write_graphml(step: Step, path: str | Path, token_text: TokenText | None = None) -> None:
    """Write the token tree as GraphML; characters that XML cannot hold are shown as `‹code›`."""
    graph = to_networkx(step, token_text)
    for _, attributes in graph.nodes(data=True):
        if "token" in attributes:
            attributes["token"] = _visible(attributes["token"])
    nx.write_graphml(graph, path)


def to_node_link_json(step: Step, token_text: TokenText | None = None) -> str:
    """The token tree as node-link JSON, as networkx and d3 read it."""
    return json.dumps(nx.node_link_data(to_networkx(step, token_text), edges="edges"))


def tree_figure(step: Step, token_text: TokenText | None = None) -> go.Figure:
    """The token tree as a Plotly figure: x is the depth, the accepted path runs straight along the top."""
    graph = to_networkx(step, token_text)
    rows = _rows(step)
    figure = go.Figure()
    for verdict, colour, dash, width in (("rejected", REJECTED, "dot", 1.2), ("accepted", ACCEPTED, "solid", 4)):
        xs: list[int | None] = []
        ys: list[int | None] = []
        for parent, node in graph.edges:
            if (graph.nodes[node]["verdict"] == "accepted") == (verdict == "accepted"):
                xs += [graph.nodes[parent]["depth"], graph.nodes[node]["depth"], None]
                ys += [-rows[parent], -rows[node], None]
        line = {"color": colour, "dash": dash, "width": width}
        figure.add_scatter(x=xs, y=ys, mode="lines", line=line, hoverinfo="skip", name=verdict)
    end = step.verdict.path[-1]
    depth = graph.nodes[end]["depth"]
    drafted, accepted = len(step.tree) - 1, min(len(step.verdict.path) - 1, len(step.token_ids))
    own = TARGET if len(step.token_ids) > accepted else REJECTED  # a reply may end before the target's own token
    figure.add_scatter(x=[depth, depth + 1], y=[0, 0], mode="lines", line={"color": own, "width": 4}, hoverinfo="skip")
    for node, attributes in graph.nodes(data=True):
        colour = {"root": ROOT, "accepted": ACCEPTED}.get(attributes["verdict"], REJECTED)
        label = _label(attributes.get("token", str(attributes["token_id"])))
        hover = "<br>".join(f"{name}: {_label(str(value), 60)}" for name, value in attributes.items())
        figure.add_annotation(**_box(attributes["depth"], -rows[node], label, colour), hovertext=hover)
    next_text = str(step.verdict.next_token) if token_text is None else token_text([step.verdict.next_token])[0]
    mark = {"bonus": "✦", "recovered": "↳"}[step.verdict.kind]
    figure.add_annotation(**_box(depth + 1, 0, f"{mark} {_label(next_text)}", own), hovertext=step.verdict.kind)
    title = f"Step {step.index + 1}: {drafted} drafted, {accepted} accepted, one pass gave {len(step.token_ids)}"
    figure.update_layout(
        title=title,
        template="plotly_white",
        showlegend=False,
        height=150 + 34 * (max(rows.values()) + 1),
        xaxis={"title": "depth", "dtick": 1, "showgrid": False, "zeroline": False},
        yaxis={"visible": False},
    )
    return figure


def _rows(step: Step) -> dict[int, int]:
    """A row per node: the accepted path first, a first child beside its parent, every other child on a row of its own."""
    parents, path = step.tree.parents.tolist(), set(step.verdict.path)
    children: list[list[int]] = [[] for _ in parents]
    for node in sorted(range(1, len(parents)), key=lambda node: (node not in path, node)):
        children[parents[node]].append(node)
    rows, below = {0: 0}, 1
    waiting = [0]
    while waiting:
        node = waiting.pop()
        if node not in rows:
            rows[node], below = below, below + 1
        straight = [] if node == step.verdict.path[-1] else children[node][:1]
        rows |= dict.fromkeys(straight, rows[node])
        waiting += [child for child in reversed(children[node]) if child not in straight] + straight
    return rows


def _visible(text: str) -> str:
    """Text with spaces, control and invisible characters made visible."""
    odd = {"Cc", "Cf", "Cs", "Zl", "Zp", "Cn", "Co"}
    return "".join(_SHOWN.get(c) or (f"‹{ord(c):x}›" if unicodedata.category(c) in odd else c) for c in text)


def _label(text: str, longest: int = _LONGEST) -> str:
    """Text for Plotly, which reads labels as HTML: visible, cut, escaped."""
    shown = _visible(text[: longest + 1])
    return escape(shown if len(shown) <= longest else shown[: longest - 1] + "…", quote=False)


def _box(x: float, y: float, text: str, colour: str) -> dict[str, object]:
    font = {"family": "monospace", "color": colour}
    box = {"bgcolor": "white", "bordercolor": colour, "borderpad": 3}
    return {"x": x, "y": y, "text": text, "showarrow": False, "font": font, **box}
