"""What one chat makes another wait: a second chat behind a running reply, and a running reply while a long prompt is read."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from specdec.benchmark.asking import Asked, speculators
from specdec.benchmark.parallel import Chats, Prompts, Reply, both, percentiles, spread, summary
from specdec.engine import SpeculativeEngine
from specdec.errors import LoadError

RUNNING, LONG = 512, 4000
"""Tokens of the running reply, and of the long prompt; fewer where the model's context is short."""
BEFORE = 8
"""Passes of the running reply before the second chat comes."""
UNDISTURBED = 32
"""Passes of the running reply before the long prompt comes, and again after it was read."""


@dataclass(frozen=True, slots=True)
class Second:
    """A second chat's wait: its reply's first token behind a running reply, and what it takes alone."""

    prompt_tokens: int
    beside: Reply
    alone: Reply


@dataclass(frozen=True, slots=True)
class Disturbed:
    """A running reply's gaps in seconds: while a long prompt is read, and before and after that."""

    prompt_tokens: int
    gaps: list[float]
    undisturbed: list[float]

    @property
    def ratio(self) -> float:
        """The 95th percentile of the gaps by that of the undisturbed ones."""
        return float(np.percentile(self.gaps, 95) / np.percentile(self.undisturbed, 95))


class Latency:
    """The two measurements, once per run. Prompts are taken from ``prompts`` in turn."""

    def __init__(self, engine: SpeculativeEngine, prompts: Prompts, asked: Asked) -> None:
        self._engine, self._prompts, self._asked = engine, prompts, asked
        self._limit = engine.target.context_limit
        self.seconds: list[Second] = []
        self.disturbed: list[Disturbed] = []

    def warm_up(self) -> None:
        """Both measurements, outside the clock."""
        self._engine.target.prepare(min(RUNNING + LONG, self._limit))
        self._measure()

    def run(self) -> None:
        """Both measurements."""
        second, disturbed = self._measure()
        self.seconds.append(second)
        self.disturbed.append(disturbed)

    def _measure(self) -> tuple[Second, Disturbed]:
        index = len(self.seconds)
        first, second = (self._prompts[(index + i) % len(self._prompts)] for i in range(2))
        return self._second(first, second), self._disturbed(first)

    def _chats(self) -> Chats:
        return Chats(self._engine, speculators(self._engine, self._asked.memory), budget=self._asked.budget)

    def _second(self, first: Sequence[int], second: Sequence[int]) -> Second:
        alone = _first_token(self._chats(), second)
        chats = self._chats()
        running = chats.ask(first, min(RUNNING, self._limit - len(first)))
        _until(chats, lambda: len(running.moments) >= BEFORE)
        beside = _first_token(chats, second)
        return Second(len(second), beside, alone)

    def _disturbed(self, first: Sequence[int]) -> Disturbed:
        length = min(LONG, self._limit // 2)
        long = np.resize(np.array(list(chain.from_iterable(self._prompts))), length).tolist()
        chats = self._chats()
        running = chats.ask(first, self._limit - len(first))  # as long as it takes
        _until(chats, lambda: len(running.moments) >= UNDISTURBED)
        reader = chats.ask(long, 1)
        begun = len(running.moments) - 1
        _until(chats, lambda: bool(reader.moments))
        ended = len(running.moments) - 1
        _until(chats, lambda: len(running.moments) > ended + UNDISTURBED or not chats.busy)
        chats.stop()
        gaps = running.gaps
        return Disturbed(length, gaps[begun:ended], gaps[:begun] + gaps[ended:])

    def figures(self) -> dict[str, Any]:
        """``{"second_chat": figures, "long_prompt": figures}``, of the runs so far."""
        besides = [second.beside.rounds[0] - second.beside.reading for second in self.seconds]
        return {
            "second_chat": {
                "running_tokens": RUNNING,
                "prompt_tokens": summary([second.prompt_tokens for second in self.seconds]),
                "passes": summary([second.beside.rounds[0] for second in self.seconds]),
                "reading_passes": summary([second.beside.reading for second in self.seconds]),
                "other_passes": summary(besides),
                "seconds": summary([second.beside.first_token_seconds for second in self.seconds]),
                "seconds_alone": summary([second.alone.first_token_seconds for second in self.seconds]),
            },
            "long_prompt": {
                "prompt_tokens": self.disturbed[0].prompt_tokens,
                "passes": statistics.median(len(each.gaps) for each in self.disturbed),
                "gap_seconds": percentiles([gap for each in self.disturbed for gap in each.gaps]),
                "undisturbed_gap_seconds": percentiles([gap for each in self.disturbed for gap in each.undisturbed]),
                "p95_ratio": summary([each.ratio for each in self.disturbed]),
            },
        }


def _until(chats: Chats, done: Callable[[], bool]) -> None:
    """Rounds until ``done()``. Raises LoadError where every reply has ended by then."""
    while not done():
        if not chats.busy:
            raise LoadError(
                "--latency: the running reply filled the model's context too early: choose a model with a longer one"
            )
        chats.round()


def _first_token(chats: Chats, prompt: Sequence[int]) -> Reply:
    """A reply of one token to ``prompt``; what else was being written is let go."""
    reply = chats.ask(prompt, 1)
    _until(chats, lambda: bool(reply.moments))
    chats.stop()
    return reply


def latency_text(figures: dict[str, Any]) -> str:
    """`Latency.figures` in two lines; medians of the runs [lowest, highest]."""
    second, long = figures["second_chat"], figures["long_prompt"]
    gap, undisturbed = long["gap_seconds"], long["undisturbed_gap_seconds"]
    return (
        f"first token of a second chat (prompt of {second['prompt_tokens']['median']:.0f} tokens) behind a reply of "
        f"{second['running_tokens']} tokens: {spread(second['passes'], 0)} passes, "
        f"of which {spread(second['reading_passes'], 0)} read its prompt; "
        f"{spread(second['seconds'], 3)} s, alone {spread(second['seconds_alone'], 3)} s\n"
        f"gap between tokens of a running reply while a prompt of {long['prompt_tokens']} tokens is read "
        f"({long['passes']:.0f} passes), median / 95th percentile: {both(gap, 1e3, 1)} ms, undisturbed "
        f"{both(undisturbed, 1e3, 1)} ms; the 95th is {spread(long['p95_ratio'], 2)} times as long"
    )
