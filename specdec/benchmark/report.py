"""Report: samples folded into figures, as a table, as JSON and as a self-contained page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from specdec.benchmark.cost import cost_text
from specdec.benchmark.lanes import Answer, stats

T = TypeVar("T", str, float)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a lane's text first differs from plain decoding's, and the target's top-2 log-probability margin there."""

    position: int
    margin: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt (a turn of a question): each lane's answers, one per run, and how its first one differs from plain's.

    ``copied``: the share of the first lane's reply that stands in the prompt (`specdec.benchmark.asking.copied_share`).
    """

    question_id: str
    category: str
    turn: int
    answers: dict[str, list[Answer]]
    differences: dict[str, Difference | None]
    copied: float = 0.0

    def rate(self, lane: str, tokens: int) -> float:
        """Decode tokens per second over the first ``tokens`` tokens: the median run."""
        return statistics.median(answer.rate(tokens) for answer in self.answers[lane])

    def speedup(self, lane: str, base: str) -> float | None:
        """The ratio of the two lanes' rates over the same number of tokens; None where one gave too few to time."""
        shortest = min(sum(count for count, _ in a.passes) for name in (lane, base) for a in self.answers[name])
        return self.rate(lane, shortest) / self.rate(base, shortest) if shortest else None


_COPIED = {0.0: "copied < 20 %", 0.2: "copied 20-50 %", 0.5: "copied 50-80 %", 0.8: "copied >= 80 %"}
"""Names of the groups of replies by the share that stands in their prompts, by the least of it."""


def fold(samples: Sequence[Sample], lanes: Sequence[str]) -> dict[str, Any]:
    """``{"lanes": {name: figures}}``: every published figure, per lane and, inside, per category and per share copied."""
    by_category = _grouped(samples, lambda sample: sample.category)
    by_copied = _grouped(samples, lambda sample: max(least for least in _COPIED if sample.copied >= least))
    folded = {}
    for lane in lanes:
        folded[lane] = _figures(samples, lane)
        folded[lane]["by_category"] = {name: _figures(group, lane) for name, group in by_category.items()}
        folded[lane]["by_copied"] = {_COPIED[least]: _figures(group, lane) for least, group in by_copied.items()}
    return {"lanes": folded}


def _grouped(samples: Sequence[Sample], group: Callable[[Sample], T]) -> dict[T, list[Sample]]:
    """The samples by their ``group``, in its order."""
    return {name: list(found) for name, found in groupby(sorted(samples, key=group), group)}


def _figures(samples: Sequence[Sample], lane: str) -> dict[str, Any]:
    """The figures of one lane; a question counts as identical if every one of its turns is.

    What has nothing to be compared with (no such lane; another source of randomness) is None.
    """
    answers = [answer for sample in samples for answer in sample.answers[lane]]
    passes = [timed for answer in answers for timed in answer.passes]
    tokens, seconds = sum(count for count, _ in passes), sum(duration for _, duration in passes)
    figures: dict[str, Any] = {
        "questions": len({sample.question_id for sample in samples}),
        "turns": len(samples),
        "tokens": tokens,
        "passes": len(passes),
        "tokens_per_pass": tokens / len(passes) if passes else 0.0,
        "decode_tokens_per_second": tokens / seconds if seconds else 0.0,
        "prefill_seconds": statistics.fmean(answer.prefill_seconds for answer in answers),
    }
    for base in ("plain", "transformers"):
        speedups = (sample.speedup(lane, base) for sample in samples if base in sample.answers)
        figures[f"speedup_vs_{base}"] = _ratio_summary([ratio for ratio in speedups if ratio is not None])
    figures["identical"] = None
    if all(lane in sample.differences for sample in samples):
        differing = [(sample.question_id, d) for sample in samples if (d := sample.differences[lane]) is not None]
        figures["identical"] = figures["questions"] - len({question for question, _ in differing})
        figures["differences"] = [{"question": q, "position": d.position, "margin": d.margin} for q, d in differing]
    if answers[0].steps:
        folded = stats(answers)
        figures["acceptance_rate"] = folded.acceptance_rate
        figures["expected_tokens_per_pass"] = folded.expected_tokens_per_pass
        figures["forecast_error"] = forecast_error([(reply.expected, reply.tokens) for reply in (stats([a]) for a in answers)])
        figures["nodes_per_pass"] = folded.drafted / folded.passes
        figures["acceptance_by_depth"] = _acceptance_by_depth(answers)
        figures["calibration"] = _calibration(answers)
        figures["shares"] = _shares(answers)
    return figures


def forecast_error(replies: Sequence[tuple[float, int]]) -> dict[str, float]:
    """How far the forecast is off, as a share of what was given; ``replies``: (expected, emitted) tokens of each.

    ``by_step``: of all tokens together. ``by_reply``: the mean of the replies' own errors, each as the panel shows it, and its
    ``standard_error``: replies differ a lot, and of a few dozen nothing more exact can be said.
    """
    expected, given = sum(reply[0] for reply in replies), sum(reply[1] for reply in replies)
    errors = [reply[0] / reply[1] - 1 for reply in replies if reply[1]]
    return {
        "by_step": expected / given - 1 if given else 0.0,
        "by_reply": statistics.fmean(errors) if errors else 0.0,
        "standard_error": statistics.stdev(errors) / len(errors) ** 0.5 if len(errors) > 1 else 0.0,
    }


def by_reply(error: dict[str, float]) -> str:
    """What `forecast_error` says of replies, with its standard error."""
    return f"{error['by_reply']:+.1%} ± {error['standard_error']:.1%}"


def _ratio_summary(ratios: Sequence[float]) -> dict[str, Any] | None:
    """Geometric mean, standard deviation, and a 95 % bootstrap interval of the mean (2,000 resamples, fixed seed)."""
    if not ratios:
        return None
    logs = np.log(ratios)
    resampled = np.random.default_rng(0).choice(logs, (2000, len(logs))).mean(1)
    low, high = np.exp(np.percentile(resampled, [2.5, 97.5]))
    return {"geomean": float(np.exp(logs.mean())), "std": float(np.std(ratios)), "ci95": [float(low), float(high)]}


def _acceptance_by_depth(answers: Iterable[Answer]) -> list[float]:
    """For depth d = 1, 2, ...: of the passes whose tree reached depth d, the share that accepted a node there."""
    reached: dict[int, int] = {}
    accepted: dict[int, int] = {}
    for answer in answers:
        for step in answer.steps:
            for depth in range(1, int(step.tree.depths().max()) + 1):
                reached[depth] = reached.get(depth, 0) + 1
                accepted[depth] = accepted.get(depth, 0) + (len(step.verdict.path) > depth)
    return [accepted[depth] / reached[depth] for depth in sorted(reached)]


def _calibration(answers: Iterable[Answer]) -> list[dict[str, float]]:
    """Drafted nodes in ten buckets of their score: how likely they were thought to be accepted, and the share that was."""
    scores, accepted = [np.zeros(0, np.float32)], [np.zeros(0, np.bool_)]
    for answer in answers:
        for step in answer.steps:
            if step.tree.scores is not None:
                scores.append(step.tree.scores[1:])
                accepted.append(np.isin(np.arange(1, len(step.tree)), step.verdict.path))
    score, hit = np.concatenate(scores), np.concatenate(accepted)
    bucket = np.minimum((score * 10).astype(np.int64), 9)
    return [
        {
            "from": b / 10,
            "to": (b + 1) / 10,
            "nodes": int((bucket == b).sum()),
            "expected": float(score[bucket == b].mean()),
            "accepted": float(hit[bucket == b].mean()),
        }
        for b in np.unique(bucket).tolist()
    ]


def _shares(answers: Iterable[Answer]) -> dict[str, float]:
    timings = [step.timings for answer in answers for step in answer.steps]
    total = sum(timing.decode for timing in timings)
    parts = ("draft", "verify", "accept", "commit")
    return {part: sum(getattr(timing, part) for timing in timings) / total for part in parts}


_COLUMNS: tuple[tuple[str, str, Callable[[dict[str, Any]], str]], ...] = (
    ("tokens", "tokens", lambda f: f"{f['tokens']}"),
    ("passes", "passes", lambda f: f"{f['passes']}"),
    ("tok/pass", "tokens_per_pass", lambda f: f"{f['tokens_per_pass']:.2f}"),
    ("expected", "expected_tokens_per_pass", lambda f: f"{f['expected_tokens_per_pass']:.2f}"),
    ("off, by step", "forecast_error", lambda f: f"{f['forecast_error']['by_step']:+.1%}"),
    ("by reply", "forecast_error", lambda f: by_reply(f["forecast_error"])),
    ("nodes", "nodes_per_pass", lambda f: f"{f['nodes_per_pass']:.1f}"),
    ("tok/s", "decode_tokens_per_second", lambda f: f"{f['decode_tokens_per_second']:.1f}"),
    ("x plain", "speedup_vs_plain", lambda f: _interval(f["speedup_vs_plain"])),
    ("x transformers", "speedup_vs_transformers", lambda f: _interval(f["speedup_vs_transformers"])),
    ("identical", "identical", lambda f: f"{f['identical']}/{f['questions']}"),
)
"""Title, the figure that must be there, and how it is written."""


def _interval(summary: dict[str, Any]) -> str:
    low, high = summary["ci95"]
    return f"{summary['geomean']:.2f} [{low:.2f}, {high:.2f}]"


def table(folded: dict[str, Any]) -> str:
    """The figures as a Markdown table: every lane, then by category and share copied; below it what does not fit into one."""
    lanes = folded["lanes"]
    columns = [column for column in _COLUMNS if any(f.get(column[1]) is not None for f in lanes.values())]

    def row(lane: str, category: str, figures: dict[str, Any]) -> list[str]:
        return [lane, category, *("-" if figures.get(key) is None else cell(figures) for _, key, cell in columns)]

    rows = [["lane", "category", *(title for title, _, _ in columns)], *(row(lane, "all", f) for lane, f in lanes.items())]
    for lane, figures in lanes.items():
        groups = figures.get("by_category", {}) | figures.get("by_copied", {})
        rows += [row(lane, group, f) for group, f in groups.items()]
    notes = [f"{lane}: {_note(figures)}" for lane, figures in lanes.items() if "shares" in figures]
    notes += [f"{lane} leaves plain's text {_leavings(found)}" for lane, f in lanes.items() if (found := f.get("differences"))]
    told = {lane: f.get("identical") is not None for lane, f in lanes.items()}
    if any(told.values()) and not all(told.values()):
        others = ", ".join(lane for lane in lanes if not told[lane])
        notes.append(f"{others}: other draws than plain's, so not comparable token by token")
    if "cost" in folded:
        notes.append(cost_text(folded["cost"]))
    return "\n".join([markdown(rows), "", *notes])


def _note(figures: dict[str, Any]) -> str:
    shares, depths, buckets = figures["shares"], figures["acceptance_by_depth"][:10], figures["calibration"]
    text = ", ".join(f"{part} {share:.1%}" for part, share in shares.items()) + " of decode time"
    if depths:
        text += "; accepted at depth 1, 2, ...: " + " ".join(f"{share:.0%}" for share in depths)
    if buckets:
        text += "; accepted (expected): " + ", ".join(f"{b['accepted']:.0%} ({b['expected']:.0%})" for b in buckets)
    return text


def _leavings(differences: Sequence[dict[str, Any]]) -> str:
    """Where, in the first few turns that differ."""
    shown = ", ".join(f"at token {d['position']} ({d['margin']:.3f})" for d in differences[:8])
    turns = "1 turn" if len(differences) == 1 else f"{len(differences)} turns"
    return f"in {turns} (the target's top-2 margin there, nats): {shown}{', ...' * (len(differences) > 8)}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)
