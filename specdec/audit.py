"""Audit: is every token of a reply the target's own choice? The proof of losslessness that a user can run.

The finished reply is read again as ordinary text: no drafts, no tree, K/V of its own. At each position the target's choice
under the reply's own settings (greedy: the argmax; sampled: the draw under the same noise) is compared with the token that
was emitted. In float32 they are all the same. In bfloat16 and float16 the shape of a pass changes rounding, so that near
ties may fall the other way; the shortfall says how near they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.engine import SpeculativeEngine
from specdec.prompt import Prompt
from specdec.request import resolve
from specdec.target import PREFILL_CHUNK
from specdec.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Audit:
    """One value per emitted token, in score units: logits after the reply's processors (and temperature, and noise).

    ``shortfalls`` [N]: how far the emitted token lies behind the target's choice; 0 where it is the choice. ``margins`` [N]:
    how far the target's second choice lies behind its first, that is, how near a tie it was.
    """

    shortfalls: NDArray[np.float64]
    margins: NDArray[np.float64]

    @property
    def tokens(self) -> int:
        """Emitted tokens that were looked at."""
        return len(self.shortfalls)

    @property
    def own(self) -> int:
        """How many of them are the target's own choice."""
        return int((self.shortfalls == 0).sum())

    @property
    def largest_shortfall(self) -> float:
        """The worst of `shortfalls`."""
        return float(self.shortfalls.max(initial=0.0))

    @property
    def first_difference(self) -> int | None:
        """The position of the first token that is not the target's own choice."""
        differing = np.flatnonzero(self.shortfalls)
        return int(differing[0]) if len(differing) else None


def audit(
    engine: SpeculativeEngine,
    prompt: Prompt,
    token_ids: Sequence[int],
    cancelled: Callable[[], bool] = lambda: False,
    run: Callable[[Callable[[], None]], None] = lambda work: work(),
    **arguments: Any,
) -> Audit:
    """Re-score the reply ``token_ids`` to ``prompt``, made with ``arguments`` (those of `SpeculativeEngine.stream`).

    It is read in chunks, each by ``run``, which is called with what computes on the target; ``cancelled`` is polled between
    them, and then the audit ends early. Raises MemoryFullError.
    """
    target, scheduler = engine.target, engine.scheduler
    request = resolve(engine.model, engine.tokenizer, target.context_limit, prompt, **arguments)
    text = torch.tensor([[*prompt.token_ids, *token_ids]], device=target.device)
    start, cache = len(prompt.token_ids), target.new_cache()
    shortfalls: list[float] = []
    margins: list[float] = []

    def read() -> None:
        target.prefill(cache, prompt.token_ids[cache.length : min(cache.length + PREFILL_CHUNK, start - 1)])

    @torch.inference_mode()
    def score() -> None:
        done = start + len(shortfalls)
        chunk = text[0, done - 1 : done - 1 + min(PREFILL_CHUNK, start + len(token_ids) - done)].tolist()
        logits = target.verify(cache, TokenTree.chain(chunk))
        cache.commit(range(len(chunk)))
        for row in logits:
            position = start + len(shortfalls)
            scores = request.sampler.perturbed(row, text[:, :position])
            first, second = scores.topk(2).values.tolist()
            shortfalls.append(max(first - float(scores[token_ids[len(shortfalls)]]), 0.0))
            margins.append(first - second)

    with target.memory_guard():
        while cache.length < start - 1 and not cancelled():
            run(lambda: scheduler.with_room(read))
        while len(shortfalls) < len(token_ids) and not cancelled():
            run(lambda: scheduler.with_room(score))
    return Audit(np.array(shortfalls), np.array(margins))
