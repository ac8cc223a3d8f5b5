"""Stats: a fold over Steps, and the one place where every published figure is defined."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.step import Step


@dataclass(slots=True)
class Stats:
    """Running totals of one reply (or of many: add all their steps)."""

    passes: int = 0
    """Target passes after prefill."""
    tokens: int = 0
    """Emitted tokens."""
    drafted: int = 0
    """Tree nodes verified besides the root."""
    accepted: int = 0
    """Drafted tokens that were emitted."""
    expected: float = 0.0
    """Tokens the speculator expected of these passes (`Step.expected_tokens`), to be compared with ``tokens``."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    """Draft + verify + accept + commit, over all passes."""
    plain_seconds: float = 0.0
    """What the same tokens would have cost in plain single-token passes, each at what one costs at that moment."""
    first_token_seconds: float = 0.0
    """Prefill and the first pass, of the latest reply."""

    def add(self, step: Step) -> None:
        """Fold one step in."""
        emitted = len(step.token_ids)
        if step.index == 0:
            self.first_token_seconds = step.timings.prefill + step.timings.decode
        self.passes += 1
        self.tokens += emitted
        self.drafted += len(step.tree) - 1
        self.accepted += min(emitted, len(step.verdict.path) - 1)
        self.expected += step.expected_tokens
        self.prefill_seconds += step.timings.prefill
        self.decode_seconds += step.timings.decode
        self.plain_seconds += emitted * step.plain_seconds

    @property
    def tokens_per_pass(self) -> float:
        """Mean acceptance length: emitted tokens / target passes after prefill."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def expected_tokens_per_pass(self) -> float:
        """The speculator's forecast of `tokens_per_pass`, over the same passes."""
        return self.expected / self.passes if self.passes else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted. Low in a tree by design: alternatives at the same position exclude each other."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens / decode seconds."""
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def speedup(self) -> float:
        """Plain single-token passes for the same tokens / decode seconds, both on this device during this reply."""
        return self.plain_seconds / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def pass_cost(self) -> float:
        """What a pass cost, everything around it included, in plain single-token passes: `tokens_per_pass` / `speedup`."""
        return self.tokens_per_pass / self.speedup if self.speedup else 0.0

    @property
    def expected_speedup(self) -> float:
        """What `speedup` would be had every tree given just what the speculator expected of it."""
        return self.speedup * self.expected / self.tokens if self.tokens else 0.0

    @property
    def passes_saved(self) -> int:
        """Target passes that plain decoding would have needed besides."""
        return self.tokens - self.passes

    def to_json(self) -> dict[str, float]:
        """The figures, plain."""
        return {
            "tokens": self.tokens,
            "passes": self.passes,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tokens_per_pass": round(self.tokens_per_pass, 4),
            "expected_tokens_per_pass": round(self.expected_tokens_per_pass, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
            "decode_seconds": round(self.decode_seconds, 6),
            "tokens_per_second": round(self.tokens_per_second, 3),
            "speedup": round(self.speedup, 4),
            "pass_cost": round(self.pass_cost, 4),
            "expected_speedup": round(self.expected_speedup, 4),
            "passes_saved": self.passes_saved,
            "time_to_first_token": round(self.first_token_seconds, 6),
        }
