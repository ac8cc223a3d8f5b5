"""Sequence: one running text. What was asked, what was emitted so far, and when it ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec.accept import Verdict
from specdec.conversation import Conversation
from specdec.logits import Fetch, Fetched, View, argmax, logprobs, target_view, top_tokens
from specdec.request import MAX_BUDGET, Request
from specdec.speculators import TopK
from specdec.step import FinishReason, Logprobs, Step
from specdec.text import Detokenizer, StopStrings
from specdec.transfer import synchronize, to_device
from specdec.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Reading:
    """What the host learns of one pass: the target's next token after a node, and its most probable ones after every node.

    ``view``: what it thought of each node, and of the token that it chose itself.
    """

    choose: Callable[[int], int]
    top: Callable[[], TopK]
    view: View


class Sequence:
    """One running text: the prompt is read, then each pass emits some tokens, until a rule of ``request`` ends it.

    Every rule is applied token by token, so a stop in the middle of an accepted path ends the text exactly there. ``chat``
    holds its K/V and its speculator. ``steps`` are made and not yet taken by whoever follows the text; ``error``: what ended it
    instead of a rule. ``at_once``: all nodes are chosen on the device where that is possible, so that the host waits once per
    pass.
    """

    def __init__(
        self, request: Request, chat: Conversation, tokenizer: PreTrainedTokenizerBase, device: torch.device, at_once: bool
    ) -> None:
        prompt = request.prompt.token_ids
        self.request, self.chat = request, chat
        self.steps: deque[Step] = deque()
        self.error: Exception | None = None
        self.finish_reason: FinishReason | None = None
        self.ended = False
        """Nothing comes after ``steps``."""
        self.emitted = 0
        self.passes = 0
        self.tops: list[TopK] = []
        """What the target said after the prompt's tokens, as far as they were read for this reply."""
        self.begun: float | None = None
        """When its reading began, by the clock of `time.perf_counter`."""
        self.prefill_seconds = 0.0
        self.reused = 0
        """Tokens of the prompt whose K/V was there already."""
        self._at_once = at_once
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stop_strings = StopStrings(request.stop_strings)
        self._length = len(prompt)
        room = len(prompt) + request.max_new_tokens + MAX_BUDGET  # a path may reach beyond the last token wanted
        self._history = torch.zeros(1, room, dtype=torch.int64, device=device)
        self._history[0, : len(prompt)] = torch.tensor(prompt)
        self.root = prompt[-1]

    @property
    def unread(self) -> tuple[int, ...]:
        """The tokens of the prompt that are to be read: all but the cached ones and the last, which is the first root."""
        return self.request.prompt.token_ids[self.chat.cache.length : -1] if self.passes == 0 else ()

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.request.max_new_tokens - self.emitted

    @property
    def top_k(self) -> int:
        """How many of the target's next tokens its speculator is shown."""
        return 0 if self.request.decoding == "plain" else self.chat.speculator.top_k

    def read(self, chunk: TokenTree, logits: Tensor) -> None:
        """The target has read ``chunk`` of the prompt, with ``logits`` [N, V] where the speculator is shown any."""
        self.chat.cache.commit(range(len(chunk)))
        self.chat.token_ids.extend(chunk.token_ids.tolist())
        if self.top_k:
            self.tops.append(top_tokens(logits, self.top_k))

    def begin(self) -> None:
        """The prompt is read: the first pass may begin."""
        self.prefill_seconds = 0.0 if self.begun is None else time.perf_counter() - self.begun
        if self.request.decoding != "plain":
            top = TopK.concatenate(self.tops) if self.tops else None
            self.chat.speculator.begin(self.request.prompt.token_ids, top, self.reused)
            if self.request.prediction:
                self.chat.speculator.expect(self.request.prediction)
        self.tops.clear()

    def fetch(self, logits: Tensor, tree: TokenTree) -> Fetch | None:
        """What the host wants to know of a pass over ``tree`` with ``logits`` [N, V]; None where it looks at them itself."""
        sampler = self.request.sampler
        if not (self._at_once and sampler.draws_at_once):
            return None
        best = logits.max(-1) if sampler.is_argmax else self._draw(logits, tree)
        return Fetch(logits, (best[0], best[1]), self.top_k, tree if self.request.details else None)

    def see(self, logits: Tensor, tree: TokenTree, fetched: Fetched | None) -> Reading:
        """What the host learns of a pass over ``tree`` with ``logits`` [N, V]: what was ``fetched``, or what it finds itself.

        Where the choice needs the order of the text before it, a node is chosen when the walk reaches it, seeing its own path.
        """
        look = partial(target_view, logits, tree)
        if fetched is not None:
            return Reading(fetched.choices.__getitem__, lambda: fetched.top, fetched.view or look)
        choose: Callable[[int], int]
        if self.request.sampler.is_argmax:
            choose = argmax(logits).__getitem__
        else:
            synchronize(logits.device)  # the pass ends here; what the choices take is not its cost
            choose = self._chooser(logits, tree)
        return Reading(choose, lambda: top_tokens(logits, self.top_k), look)

    def _draw(self, logits: Tensor, tree: TokenTree) -> tuple[Tensor, Tensor]:
        sampler = self.request.sampler
        texts = self._history.new_empty(len(tree), 0)
        if not sampler.is_blind:
            paths = np.where(tree.ancestor_mask(), tree.token_ids, logits.shape[1])[:, 1:]
            before = self._history[:, : self._length].expand(len(tree), -1)  # the root included
            texts = torch.cat([before, to_device(paths, logits.device)], dim=1)
        return sampler.draw(logits, (tree.depths() + self._length).tolist(), texts)

    def _chooser(self, logits: Tensor, tree: TokenTree) -> Callable[[int], int]:
        sampler, depths = self.request.sampler, tree.depths()

        def choose(node: int) -> int:
            length = self._length + int(depths[node])
            self._history[0, length - 1] = int(tree.token_ids[node])
            return sampler.choose(logits[node], self._history[:, :length])

        return choose

    def emit(self, tree: TokenTree, verdict: Verdict) -> tuple[tuple[int, ...], str]:
        """Emit the verdict's tokens up to the first stop: their ids, and the text that became complete with them."""
        token_ids = [int(tree.token_ids[node]) for node in verdict.path[1:]] + [verdict.next_token]
        text = ""
        for count, token_id in enumerate(token_ids, start=1):
            text += self._add(token_id)
            if self.finish_reason is not None:
                return tuple(token_ids[:count]), text
        if self.request.cancelled():
            self.finish_reason = "cancelled"
            text += self._detokenizer.flush()
        return tuple(token_ids), text

    def logprobs(self, logits: Tensor, verdict: Verdict, emitted: tuple[int, ...]) -> Logprobs | None:
        """What the target, by a pass's ``logits`` [N, V], thought of the ``emitted`` tokens; None where nobody asked."""
        return None if self.request.logprobs is None else logprobs(logits, verdict.path, emitted, self.request.logprobs)

    def commit(self, tree: TokenTree, verdict: Verdict, emitted: tuple[int, ...], top: Callable[[], TopK]) -> None:
        """Keep the K/V of the emitted path, and let the speculator learn from the pass."""
        kept = verdict.path[: len(emitted)]  # a stop inside the path: what follows it is not cached
        self.chat.cache.commit(kept)
        self.chat.token_ids.extend(int(tree.token_ids[node]) for node in kept)
        if self.request.decoding != "plain":
            self.chat.speculator.observe(tree, kept, emitted, top() if self.top_k else None)
        self.root = emitted[-1]
        self.passes += 1

    def _add(self, token_id: int) -> str:
        """Append one token; sets `finish_reason` if it is the last."""
        request = self.request
        self._history[0, self._length] = token_id
        self._length += 1
        self.emitted += 1
        if token_id in request.eos_token_ids:
            self.finish_reason = "eos"
            return self._detokenizer.flush()
        piece = self._detokenizer.add(token_id)
        if (end := self._stop_strings.end(piece)) is not None:
            self.finish_reason = "stop_string"
            return piece[:end]
        if request.stopping_criteria and bool(request.stopping_criteria(self._history[:, : self._length], None)[0]):
            self.finish_reason = "stopping_criteria"
        elif self.emitted == request.max_new_tokens:
            self.finish_reason = request.length_reason
        return piece + self._detokenizer.flush() if self.finish_reason else piece
