"""Reply: what one call has emitted so far, and when it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec.accept import Verdict
from specdec.logits import View, argmax, fetch, target_view, top_tokens
from specdec.request import MAX_BUDGET, Request
from specdec.speculators import TopK
from specdec.step import FinishReason
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


class Reply:
    """The emitted tokens of one request, as the processors, the stopping rules and the reader need them.

    Every rule is applied token by token, so a stop in the middle of an accepted path ends the reply exactly there.
    ``at_once``: all nodes are chosen on the device where that is possible, so that the host waits once per pass.
    """

    def __init__(self, request: Request, tokenizer: PreTrainedTokenizerBase, device: torch.device, at_once: bool) -> None:
        prompt = request.prompt.token_ids
        self.finish_reason: FinishReason | None = None
        self.emitted = 0
        self._request, self._at_once = request, at_once
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stop_strings = StopStrings(request.stop_strings)
        self._length = len(prompt)
        room = len(prompt) + request.max_new_tokens + MAX_BUDGET  # a path may reach beyond the last token wanted
        self._history = torch.zeros(1, room, dtype=torch.int64, device=device)
        self._history[0, : len(prompt)] = torch.tensor(prompt)

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self._request.max_new_tokens - self.emitted

    def read(self, logits: Tensor, tree: TokenTree, top_k: int) -> Reading:
        """What a pass over ``tree`` with ``logits`` [N, V] says: choices for `specdec.accept.accept`, and ``top_k`` per node.

        Where the choice needs the order of the text before it, a node is chosen when the walk reaches it, seeing its own path.
        """
        sampler = self._request.sampler
        if self._at_once and sampler.draws_at_once:
            best = logits.max(-1) if sampler.is_argmax else self._draw(logits, tree)
            chosen, top, view = fetch(logits, best, top_k, tree if self._request.details else None)
            return Reading(chosen.__getitem__, lambda: top, view or partial(target_view, logits, tree))
        choose: Callable[[int], int]
        if sampler.is_argmax:
            choose = argmax(logits).__getitem__
        else:
            synchronize(logits.device)  # the pass ends here; what the choices take is not its cost
            choose = self._chooser(logits, tree)
        return Reading(choose, lambda: top_tokens(logits, top_k), partial(target_view, logits, tree))

    def _draw(self, logits: Tensor, tree: TokenTree) -> tuple[Tensor, Tensor]:
        sampler = self._request.sampler
        texts = self._history.new_empty(len(tree), 0)
        if not sampler.is_blind:
            paths = np.where(tree.ancestor_mask(), tree.token_ids, logits.shape[1])[:, 1:]
            before = self._history[:, : self._length].expand(len(tree), -1)  # the root included
            texts = torch.cat([before, to_device(paths, logits.device)], dim=1)
        return sampler.draw(logits, (tree.depths() + self._length).tolist(), texts)

    def _chooser(self, logits: Tensor, tree: TokenTree) -> Callable[[int], int]:
        sampler, depths = self._request.sampler, tree.depths()

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
        if self._request.cancelled():
            self.finish_reason = "cancelled"
            text += self._detokenizer.flush()
        return tuple(token_ids), text

    def _add(self, token_id: int) -> str:
        """Append one token; sets `finish_reason` if it is the last."""
        request = self._request
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
