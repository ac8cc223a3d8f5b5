"""Report: samples folded into figures, as a table, as JSON and as a self-contained page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec.benchmark.lanes import Answer, stats


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a lane's text first differs from plain decoding's, and the target's top-2 log-probability margin there."""

    position: int
    margin: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt (a turn of a question): each lane's answers, one per run, and how its first one differs from plain's."""

    question_id: str
    category: str
    turn: int
    answers: dict[str, list[Answer]]
    differences: dict[str, Difference | None]

    def rate(self, lane: str, tokens: int) -> float:
        """Decode tokens per second over the first ``tokens`` tokens: the median run."""
        return statistics.median(answer.rate(tokens) for answer in self.answers[lane])

    def speedup(self, lane: str, base: str) -> float | None:
        """The ratio of the two lanes' rates over the same number of tokens; None where one gave too few to time."""
        shortest = min(sum(count for count, _ in a.passes) for name in (lane, base) for a in self.answers[name])
        return self.rate(lane, shortest) / self.rate(base, shortest) if shortest else None


def fold(samples: Sequence[Sample], lanes: Sequence[str]) -> dict[str, Any]:
    """``{"lanes": {name: figures}}``: every published figure, per lane and, inside, per category."""
    categories = sorted({sample.category for sample in samples})
    folded = {}
    for lane in lanes:
        folded[lane] = _figures(samples, lane)
        folded[lane]["by_category"] = {
            category: _figures([sample for sample in samples if sample.category == category], lane) for category in categories
        }
    return {"lanes": folded}


def _figures(samples: Sequence[Sample], lane: str) -> dict[str, Any]:
    answers = [answer for sample in samples for answer in sample.answers[lane]]
    passes = [timed for answer in answers for timed in answer.passes]
    tokens, seconds = sum(count for count, _ in passes), sum(duration for _, duration in passes)
    figures: dict[str, Any] = {
        "questions": len(samples),
        "tokens": tokens,
        "passes": len(passes),
        "tokens_per_pass": tokens / len(passes) if passes else 0.0,
        "decode_tokens_per_second": tokens / seconds if seconds else 0.0,
        "prefill_seconds": statistics.fmean(answer.prefill_seconds for answer in answers),
    }
    for base in ("plain", "transformers"):
        if base in samples[0].answers:
            ratios = [ratio for sample in samples if (ratio := sample.speedup(lane, base)) is not None]
            figures[f"speedup_vs_{base}"] = _ratio_summary(ratios)
    if lane in samples[0].differences:
        differences = [d for sample in samples if (d := sample.differences[lane]) is not None]
        figures["identical"] = len(samples) - len(differences)
        figures["differences"] = [{"position": d.position, "margin": d.margin} for d in differences]
    if answers[0].steps:
        folded = stats(answers)
        figures["acceptance_rate"] = folded.acceptance_rate
        figures["expected_tokens_per_pass"] = folded.expected_tokens_per_pass
        figures["nodes_per_pass"] = folded.drafted / folded.passes
        figures["acceptance_by_depth"] = _acceptance_by_depth(answers)
        figures["shares"] = _shares(answers)
    return figures


def _ratio_summary(ratios: Sequence[float]) -> dict[str, Any]:
    """Geometric mean, standard deviation, and a 95 % bootstrap interval of the mean (2,000 resamples, fixed seed)."""
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


def _shares(answers: Iterable[Answer]) -> dict[str, float]:
    timings = [step.timings for answer in answers for step in answer.steps]
    total = sum(timing.decode for timing in timings)
    parts = ("draft", "verify", "accept", "commit")
    return {part: sum(getattr(timing, part) for timing in timings) / total for part in parts}


_COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("tokens", lambda f: f"{f['tokens']}"),
    ("passes", lambda f: f"{f['passes']}"),
    ("tok/pass", lambda f: f"{f['tokens_per_pass']:.2f}"),
    ("expected", lambda f: f"{f['expected_tokens_per_pass']:.2f}" if "expected_tokens_per_pass" in f else "-"),
    ("nodes", lambda f: f"{f['nodes_per_pass']:.1f}" if "nodes_per_pass" in f else "-"),
    ("tok/s", lambda f: f"{f['decode_tokens_per_second']:.1f}"),
    ("x plain", lambda f: _interval(f.get("speedup_vs_plain"))),
    ("x transformers", lambda f: _interval(f.get("speedup_vs_transformers"))),
    ("identical", lambda f: f"{f['identical']}/{f['questions']}" if "identical" in f else "-"),
)


def _interval(summary: dict[str, Any] | None) -> str:
    if summary is None:
        return "-"
    low, high = summary["ci95"]
    return f"{summary['geomean']:.2f} [{low:.2f}, {high:.2f}]"


def table(folded: dict[str, Any]) -> str:
    """The figures as a Markdown table: every lane, then every lane by category."""
    header = ["lane", "category", *(name for name, _ in _COLUMNS)]
    rows = [[lane, "all", *(cell(f) for _, cell in _COLUMNS)] for lane, f in folded["lanes"].items()]
    for lane, figures in folded["lanes"].items():
        rows += [[lane, category, *(cell(f) for _, cell in _COLUMNS)] for category, f in figures["by_category"].items()]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    text = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines]
    notes = [
        f"{lane}: draft {shares['draft']:.1%}, verify {shares['verify']:.1%}, accept {shares['accept']:.1%}, "
        f"commit {shares['commit']:.1%} of decode time; accepted at depth 1, 2, ...: "
        + " ".join(f"{share:.0%}" for share in figures["acceptance_by_depth"][:10])
        for lane, figures in folded["lanes"].items()
        if (shares := figures.get("shares"))
    ]
    return "\n".join([*text, "", *notes])
