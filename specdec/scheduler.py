"""Scheduler: many running texts, one target pass for all of them.

A round is propose -> verify -> accept -> commit -> hand out. Every text that is ready takes part: one whose prompt is read with
a token tree, one whose prompt is not with a chunk of it. A text alone is a round of one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from specdec.accept import Verdict, accept
from specdec.conversation import LEAST_SHARED, Conversation, ConversationBusyError, Prefixes
from specdec.cost import PassCost
from specdec.devices import dtype_name, give_back_memory
from specdec.errors import NotANumberError, first_line, is_out_of_memory
from specdec.logits import Fetch
from specdec.request import MAX_BUDGET, Request
from specdec.sampling import NO_TOKEN
from specdec.sequence import Reading
from specdec.sequence import Sequence as Running
from specdec.speculators import DraftRequest
from specdec.step import Step, Timings
from specdec.target import PREFILL_CHUNK, Cancelled, Span, TargetModel
from specdec.transfer import synchronize
from specdec.tree import TokenTree, common_length

T = TypeVar("T")
log = logging.getLogger(__name__)

SLOWDOWN = 2.5
"""How many times as long a pass may take because a prompt is read in it, where other texts wait for the pass."""
LEAST_CHUNK = 32
"""Tokens of a prompt that are read in a pass at least."""


@dataclass(slots=True)
class Turn:
    """One text's part in a round: a tree on its way from proposal to verdict, or, where it ``reads``, a chunk of its prompt."""

    sequence: Running
    tree: TokenTree
    note: str | None = None
    reads: bool = False
    logits: torch.Tensor = field(init=False)
    reading: Reading = field(init=False)
    verdict: Verdict = field(init=False)
    emitted: tuple[int, ...] = ()
    text: str = ""

    @property
    def span(self) -> Span:
        """What the target is to run."""
        return Span(self.sequence.chat.cache, self.tree, logits=not self.reads or self.sequence.top_k > 0)


class Scheduler:
    """Runs texts on ``target``. ``name``: of the model, for messages. ``cost``, where given, spares measuring it.

    Any thread may call it: `lock` is held during a round, and by everybody else who computes on the target. A text takes part
    in a round once the step before has been taken off `specdec.sequence.Sequence.steps`, so nothing runs ahead of its reader.
    """

    def __init__(
        self, target: TargetModel, tokenizer: PreTrainedTokenizerBase, name: str, cost: PassCost | None = None
    ) -> None:
        self.target, self.tokenizer, self.name = target, tokenizer, name
        self.lock = threading.RLock()
        self.prefixes = Prefixes(target)
        self.sequences: list[Running] = []
        """The texts that have not ended, in the order of their arrival."""
        self._cost = cost

    @property
    def cost(self) -> PassCost:
        """What a pass costs on this device: measured when first asked for, some two dozen passes."""
        with self.lock:
            if self._cost is None:
                self._cost = self.with_room(self.target.measure_cost)
            return self._cost

    def submit(self, request: Request, chat: Conversation) -> Running:
        """Let a reply to ``request`` be written behind ``chat``. Raises ConversationBusyError where one is being written."""
        sequence = Running(request, chat, self.tokenizer, self.target.device, self.target.draws_at_once)
        with self.lock:
            if chat.text.busy:
                raise ConversationBusyError("this conversation is already streaming a reply; wait for it or cancel it")
            chat.text.busy = True
            chat.text.owner, chat.text.common = request.owner, request.prompt.common
            self.sequences.append(sequence)
        return sequence

    def drop(self, sequence: Running) -> None:
        """Nobody follows ``sequence`` any more: it ends, if it has not. What was committed stays valid."""
        with self.lock:
            if not sequence.ended:
                self._end(sequence)

    def follow(self, sequence: Running) -> Iterator[Step]:
        """The steps of ``sequence``, running rounds while there is none. Raises what ended it, if that was no rule."""
        try:
            while sequence.steps or not sequence.ended:
                if sequence.steps:
                    yield sequence.steps.popleft()
                else:
                    self.step()
            if sequence.error is not None:
                raise sequence.error
        finally:
            self.drop(sequence)

    def step(self) -> bool:
        """One round: propose -> verify -> accept -> commit -> hand out. Whether any text took part.

        Where the pass over all of them fails each text has one of its own, so that it fails alone.
        """
        with self.lock:
            clock = _Clock()
            turns = clock.time("draft", self._propose)
            for group in self._verified(turns, clock):
                accepted = clock.time("accept", partial(self._each, group, self._accept))
                committed = clock.time("commit", partial(self._each, accepted, self._commit))
                self._hand_out(committed, clock)
            return bool(turns)

    def with_room(self, work: Callable[[], T]) -> T:
        """What ``work()``, passes that may begin anew, returns.

        Where memory runs out every idle text gives up its K/V, and if there was any it is done once more.
        """
        with self.lock:
            try:
                return work()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                cooled = self.prefixes.cool()
                give_back_memory(error, self.target.device)
                if not cooled:
                    raise
            return work()

    # propose

    def _propose(self) -> list[Turn]:
        """What each text that is ready puts into the pass: a tree, or a chunk of its prompt."""
        turns = [Turn(sequence, TokenTree.root(sequence.root)) for sequence in self.sequences if not sequence.steps]
        turns = [turn for turn in self._each(turns, self._admit) if turn.sequence.begun is not None]
        if not turns:
            return []
        readers = [turn for turn in turns if turn.sequence.unread]
        drafts = [turn for turn in turns if not turn.sequence.unread]
        drafts = self._each(drafts, lambda turn: self._draft(turn, len(drafts) - 1))
        self._share_width(drafts)
        self._take_chunks(readers, sum(len(turn.tree) for turn in drafts))
        return drafts + readers

    def _admit(self, turn: Turn) -> None:
        """Let the reading of a prompt begin, from what is cached of it; what is cancelled by then has no step."""
        sequence, _ = turn.sequence, self.cost  # measured, where it is not yet, before anybody's clock begins
        if sequence.passes == 0 and sequence.request.cancelled():
            raise Cancelled
        if sequence.begun is None and not self._is_read_by_another(sequence):
            sequence.begun = time.perf_counter()
            sequence.reused = self.prefixes.begin(sequence.chat.text, sequence.request.prompt.token_ids[:-1])
            if not sequence.unread:
                sequence.begin()

    def _is_read_by_another(self, sequence: Running) -> bool:
        """Whether somebody is reading, right now, what this prompt begins with: then waiting spares reading it twice."""
        mine, request = np.array(sequence.request.prompt.token_ids[:-1]), sequence.request
        for other in self.sequences:
            if other is sequence or other.begun is None or not other.unread:
                continue
            theirs = other.request
            shared = common_length(mine, np.array(theirs.prompt.token_ids[:-1]))
            if request.owner is None or request.owner != theirs.owner:
                shared = min(shared, request.prompt.common, theirs.prompt.common)
            if shared >= other.chat.cache.length + LEAST_SHARED:
                return True
        return False

    def _draft(self, turn: Turn, others: int) -> None:
        """The tree to verify beside ``others``: within the budget, the context, and the tokens still wanted."""
        sequence, request, chat = turn.sequence, turn.sequence.request, turn.sequence.chat
        if request.decoding == "plain":
            return
        room = min(self.target.context_limit - chat.cache.length - 1, MAX_BUDGET)
        budget = room if request.budget == "auto" else min(request.budget, room)
        if sequence.remaining <= 1:
            turn.note = "draft inactive: only one more token is wanted"
        elif budget <= 0:
            turn.note = "draft inactive: the node budget is 0"
        else:
            draft = DraftRequest(
                budget,
                branches=1 if request.decoding == "linear" else None,
                depth=sequence.remaining - 1,
                ends=request.eos_token_ids,
                worth=self.cost.worth(others) if request.budget == "auto" else None,
                others=others,
            )
            proposal = chat.speculator.propose(draft)
            if not proposal.tree.follows(sequence.root, budget, self.target.vocab_size):
                turn.note = "draft inactive: what the speculator proposed is no tree for this text"
                return
            turn.tree = proposal.tree
            if len(turn.tree) == 1:
                turn.note = "draft inactive: nothing seen so far tells what may follow"

    def _share_width(self, turns: Sequence[Turn]) -> None:
        """Cut the trees whose budget is open to what pays: the nodes of all texts compete by their probability."""
        fixed, open_, scores = [], [], []
        for turn in turns:
            if turn.sequence.request.budget == "auto" and len(turn.tree) > 1 and turn.tree.scores is not None:
                open_.append(turn)
                scores.append(turn.tree.scores)
            else:
                fixed.append(turn.tree)
        expected = sum(1.0 if tree.scores is None else float(tree.scores.sum()) for tree in fixed)
        widths = self.cost.share(scores, sum(map(len, fixed)), expected, len(turns))
        for turn, width in zip(open_, widths, strict=True):
            turn.tree = turn.tree.prefix(width)
            if width == 1:
                turn.note = "draft inactive: no candidate is worth its cost in this pass"

    def _take_chunks(self, turns: Sequence[Turn], width: int) -> None:
        """The next part of each prompt: as much as a pass over ``width`` nodes takes along without becoming too slow."""
        limit = PREFILL_CHUNK if width == 0 else min(PREFILL_CHUNK, max(LEAST_CHUNK, self.cost.guests(width, SLOWDOWN)))
        for turn in turns:
            turn.reads = True
            turn.tree = TokenTree.chain(turn.sequence.unread[: max(limit // len(turns), 1)])

    # verify

    def _verified(self, turns: list[Turn], clock: _Clock) -> Iterator[list[Turn]]:
        """The turns of each pass, once it is done: all of them, or where that fails each alone, so that it fails alone."""
        groups = [turns] if turns else []
        while groups:
            group = groups.pop(0)
            try:
                clock.time("verify", partial(self.with_room, partial(self._verify, group)))
            except Exception as error:
                if len(group) == 1:
                    self._fail(group[0], error)
                else:
                    log.warning("a pass over %d texts failed (%s): each has one of its own", len(group), first_line(error))
                    groups = [[turn] for turn in group]
            else:
                yield group

    def _verify(self, turns: Sequence[Turn]) -> None:
        """The target pass, and what the host learns of it."""
        start = time.perf_counter()
        for turn, logits in zip(turns, self.target.run([turn.span for turn in turns]), strict=True):
            turn.logits = logits
        drafts = [turn for turn in turns if not turn.reads]
        fetches = [turn.sequence.fetch(turn.logits, turn.tree) for turn in drafts]
        brought = iter(Fetch.bring([fetch for fetch in fetches if fetch is not None]))
        for turn, fetch in zip(drafts, fetches, strict=True):
            turn.reading = turn.sequence.see(turn.logits, turn.tree, None if fetch is None else fetch.unpack(next(brought)))
        if not drafts:
            synchronize(self.target.device)  # else its last kernels would run on the next pass's clock
        elif len(drafts) == len(turns) and not self.target.prepared:
            self.cost.observe(sum(len(turn.tree) for turn in turns), time.perf_counter() - start, len(turns))

    # accept, commit, hand out

    def _accept(self, turn: Turn) -> None:
        if turn.reads:
            return
        sequence = turn.sequence
        turn.verdict = accept(turn.tree, turn.reading.choose, sequence.request.eos_token_ids)
        if turn.verdict.next_token == NO_TOKEN:
            dtype = dtype_name(self.target.model.dtype)
            remedy = "get its weights again, or choose another --model" if dtype == "float32" else "use --dtype float32"
            sequence.chat.forget()
            raise NotANumberError(f"the logits of {self.name} are not numbers (NaN) in {dtype}: {remedy}")
        turn.emitted, turn.text = sequence.emit(turn.tree, turn.verdict)

    def _commit(self, turn: Turn) -> None:
        sequence = turn.sequence
        if not turn.reads:
            sequence.commit(turn.tree, turn.verdict, turn.emitted, turn.reading.top)
            return
        sequence.read(turn.tree, turn.logits)
        if not sequence.unread:
            sequence.begin()

    def _hand_out(self, turns: Sequence[Turn], clock: _Clock) -> None:
        """To each text that emitted something its step; a text that a rule has ended leaves."""
        drafts = [turn for turn in turns if not turn.reads]
        if not drafts:
            return
        guests = sum(len(turn.tree) for turn in turns if turn.reads)
        plain_seconds = float(self.cost.seconds(len(drafts) + guests, len(turns)))
        for turn in drafts:
            sequence, request = turn.sequence, turn.sequence.request
            step = Step(
                index=sequence.passes - 1,
                tree=turn.tree,
                verdict=turn.verdict,
                token_ids=turn.emitted,
                text=turn.text,
                timings=Timings(prefill=sequence.prefill_seconds if sequence.passes == 1 else 0.0, **clock.seconds),
                context_length=sequence.chat.cache.length - min(len(turn.verdict.path), len(turn.emitted)),
                plain_seconds=plain_seconds,
                finish_reason=sequence.finish_reason,
                target=turn.reading.view(turn.verdict) if request.details else None,
                logprobs=sequence.logprobs(turn.logits, turn.verdict, turn.emitted),
                note=turn.note,
                sequences=len(drafts),
            )
            sequence.steps.append(step)
            if sequence.finish_reason is not None:
                self._end(sequence)

    def _each(self, turns: Sequence[Turn], work: Callable[[Turn], None]) -> list[Turn]:
        """Those of ``turns`` for which ``work`` succeeds; a text for which it fails ends with its error, alone."""
        going = []
        for turn in turns:
            try:
                work(turn)
            except Exception as error:
                self._fail(turn, error)
            else:
                going.append(turn)
        return going

    def _fail(self, turn: Turn, error: Exception) -> None:
        """End a text with ``error``; with none, where it was cancelled before its first step."""
        if not isinstance(error, Cancelled):
            turn.sequence.error = self.target.explained(error)
        self._end(turn.sequence)

    def _end(self, sequence: Running) -> None:
        sequence.ended = True
        sequence.chat.text.busy = False
        self.sequences.remove(sequence)
        self.prefixes.keep(sequence.chat.text)


class _Clock:
    """Seconds of the parts of a round."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, part: str, work: Callable[[], T]) -> T:
        """What ``work()`` returns, its time noted as that of ``part``."""
        start = time.perf_counter()
        try:
            return work()
        finally:
            self.seconds[part] = time.perf_counter() - start
