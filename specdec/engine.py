"""SpeculativeEngine: propose -> verify -> accept -> commit -> yield Step.

One loop serves plain, linear and tree decoding: plain is an empty proposal, linear a tree with one branch. Speculation
never changes what the target says; it only lets one target pass say more of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from os import PathLike
from typing import Any, TypeVar
from weakref import WeakSet

from torch import nn
from transformers import PreTrainedTokenizerBase

from specdec.accept import accept
from specdec.cache import TreeCache
from specdec.cost import PassCost
from specdec.devices import dtype_name, give_back_memory
from specdec.errors import LoadError, NotANumberError, is_out_of_memory
from specdec.loading import load, out_of_memory, unwrapped
from specdec.prompt import Message, Prompt
from specdec.reply import Reading, Reply
from specdec.request import MAX_BUDGET, Request, RequestError, resolve
from specdec.sampling import NO_TOKEN
from specdec.speculators import Proposal, Speculator
from specdec.speculators.hybrid import HybridSpeculator, warm_up
from specdec.speculators.memory import Memory
from specdec.step import Step, Timings
from specdec.streamer import heard
from specdec.study import ROUNDS, load_vocabulary, study
from specdec.target import Cancelled, TargetModel
from specdec.text import SpecialText, special_texts, token_texts
from specdec.tree import TokenTree

T = TypeVar("T")


class ConversationBusyError(RuntimeError):
    """Two replies were asked of one conversation at the same time."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class Conversation:
    """All mutable state of one chat with ``target``: the K/V of its committed tokens and its speculator.

    ``token_ids`` are the tokens whose K/V is cached. After a stopped or failed reply it holds what was committed by then,
    so the next turn continues as from a fresh start. So it does after the model's weights were changed, unless they were
    written to through ``weight.data`` or a numpy view, which nobody sees.
    """

    target: TargetModel
    speculator: Speculator
    cache: TreeCache = field(init=False)
    token_ids: list[int] = field(default_factory=list)
    _edition: int = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.cache, self._edition = self.target.new_cache(), self.target.edition()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the conversation for one reply. Raises ConversationBusyError if another one is running."""
        if not self._lock.acquire(blocking=False):
            raise ConversationBusyError("this conversation is already streaming a reply; wait for it or cancel it")
        try:
            yield
        finally:
            self._lock.release()

    def rewind(self, token_ids: Sequence[int]) -> int:
        """Keep the longest cached prefix of ``token_ids`` and forget the rest; how many tokens stay cached."""
        before, self._edition = self._edition, self.target.edition()
        if self._edition != before:
            self.forget()
        shared = next(
            (i for i, (a, b) in enumerate(zip(self.token_ids, token_ids, strict=False)) if a != b),
            min(len(self.token_ids), len(token_ids)),
        )
        self.cache.rewind(shared)
        del self.token_ids[shared:]
        return shared

    def forget(self) -> None:
        """Give up the K/V, to be read again by the next turn."""
        self.cache.clear()
        self.token_ids.clear()

    def cool(self) -> bool:
        """`forget`, but not while a reply is running. Whether there was any K/V."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            warm = any(slab.capacity for slab in self.cache.slabs)
            self.forget()
            return warm
        finally:
            self._lock.release()


class SpeculativeEngine:
    """A target model with a speculator in front of it.

    ``model``: a hub id, a local folder, a ``.gguf`` file, or a loaded model (then with its ``tokenizer``), wrapped or not (see
    `specdec.loading.unwrapped`); None: the embedded default. Other keyword arguments go to `specdec.loading.load`.
    ``memory``: what outlives a conversation; None (default) remembers nothing. ``speculator``: makes the speculator of each
    new conversation, instead of the default one.
    ``static``: see `specdec.target.TargetModel`.

    Raises LoadError or UnsupportedModelError, each with one line that names the culprit and the remedy.
    """

    def __init__(
        self,
        model: str | PathLike[str] | nn.Module | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        memory: Memory | None = None,
        speculator: Callable[[], Speculator] | None = None,
        static: bool | None = None,
        **loading: Any,
    ) -> None:
        if isinstance(model, nn.Module):
            model = unwrapped(model)
            if tokenizer is None:
                raise TypeError("a loaded model needs its tokenizer: SpeculativeEngine(model, tokenizer)")
            if idle := sorted(loading.keys() - {"progress"}):
                raise TypeError(f"{', '.join(idle)} cannot be used with a loaded model: convert and move the model itself")
            self.model, self.tokenizer, self.name = model, tokenizer, model.name_or_path or type(model).__name__
        else:
            loaded = load(model, **loading)
            self.model, self.tokenizer, self.name = loaded.model, loaded.tokenizer, loaded.name
        warm_up()
        try:
            self.target = TargetModel(self.model, static, loading.get("progress") or (lambda *_: None))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            give_back_memory(error, self.model.device)
            raise LoadError(out_of_memory(self.name)) from error
        self.memory = memory
        self.vocabulary = load_vocabulary(self.model)
        self._speculator = speculator
        self._conversations: WeakSet[Conversation] = WeakSet()
        self.passes = threading.RLock()
        """Held during a pass and while its logits are read: conversations in several threads take turns, pass by pass."""

    @cached_property
    def pass_cost(self) -> PassCost:
        """What a pass costs on this device, by width: measured when first asked for, some two dozen passes."""
        return self.with_room(self.target.measure_cost)

    def with_room(self, work: Callable[[], T]) -> T:
        """What ``work()``, passes that may begin anew, returns.

        Where memory runs out every idle conversation gives up its K/V, and if there was any it is done once more.
        """
        with self.passes:
            try:
                return work()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                cooled = [other.cool() for other in list(self._conversations)]
                give_back_memory(error, self.target.device)
                if not any(cooled):
                    raise
            return work()

    @cached_property
    def _special(self) -> dict[int, SpecialText]:
        ends = self.model.generation_config.eos_token_id
        return special_texts(self.tokenizer, ends if isinstance(ends, list) else [ends])

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Each token's own text, for display; see `specdec.text.token_texts`."""
        return token_texts(self.tokenizer, token_ids, self._special)

    def speculator(self, memory: Memory | None = None) -> HybridSpeculator:
        """A new speculator for one conversation, with or without a ``memory``."""
        return HybridSpeculator(vocab_size=self.target.vocab_size, memory=memory, vocabulary=self.vocabulary)

    def conversation(self, *, remember: bool = True) -> Conversation:
        """A new, empty conversation; pass it to every turn of one chat to reuse the K/V of what the turns share.

        Without ``remember`` it neither knows nor changes the engine's memory.
        """
        make = self._speculator or partial(self.speculator, self.memory if remember else None)
        return Conversation(self.target, make())

    def study(self, progress: Callable[[str, float], bool], rounds: int = ROUNDS) -> None:
        """Complete what the speculator knows of the model itself, once per model; see `specdec.study`."""
        study(self.target, self.tokenizer, self.vocabulary, rounds, progress)

    def generate(self, prompt: str | Sequence[Message] | Sequence[int] | Prompt, **arguments: Any) -> str:
        """The whole reply as text; arguments as in `stream`."""
        return "".join(step.text for step in self.stream(prompt, **arguments))

    def stream(
        self,
        prompt: str | Sequence[Message] | Sequence[int] | Prompt,
        *,
        conversation: Conversation | None = None,
        **arguments: Any,
    ) -> Iterator[Step]:
        """Decode a reply to ``prompt`` (text, chat messages, or token ids), one Step per target pass.

        ``decoding``: "tree" (default), "linear" or "plain". ``budget``: nodes besides the root per pass, or "auto" (as many as
        pay for themselves by the measured pass cost). ``seed`` keys the noise when ``do_sample``. ``presence_penalty``,
        ``logits_processor`` and ``stopping_criteria`` (each holds at every emitted token). ``details``: compute Step.target.
        ``cancelled``: a callable polled once a step and between prefill chunks. Everything else is an argument of
        transformers' generate (streamer, max_new_tokens, do_sample, temperature, top_k, top_p, min_p, repetition_penalty,
        stop_strings, ...); what is not given comes from the model's generation_config. Without any length limit the reply
        runs to its end-of-sequence token or the model's context.

        Arguments are checked here, before the first step: raises RequestError, PromptError. A conversation that is already
        streaming raises ConversationBusyError at the first step; MemoryFullError where the device has no memory left;
        NotANumberError where the model's logits are NaN.
        """
        if conversation is not None and getattr(conversation, "target", None) is not self.target:
            raise RequestError("this conversation is of another engine: pass what conversation() of this one makes, or none")
        request = resolve(self.model, self.tokenizer, self.target.context_limit, prompt, **arguments)
        return heard(self._decode(request, conversation or self.conversation()), request)

    def _decode(self, request: Request, chat: Conversation) -> Iterator[Step]:
        with ExitStack() as stack:
            with self.passes:  # so that nobody cools it just then
                self._conversations.add(chat)
                stack.enter_context(chat.exclusive())
            stack.enter_context(self.target.memory_guard())
            cost = self.pass_cost  # measured, where it is not yet, before the clock starts
            reply = Reply(request, self.tokenizer, self.target.device, self.target.draws_at_once)
            root = request.prompt.token_ids[-1]
            start = time.perf_counter()
            try:
                self.with_room(partial(self._prefill, request, chat))
            except Cancelled:
                return
            prefill_seconds = time.perf_counter() - start
            for index in count():
                with self.passes:
                    step = self._step(index, request, chat, reply, root, cost, prefill_seconds)
                root = step.token_ids[-1]
                yield step
                if step.finish_reason is not None:
                    return

    def _step(
        self,
        index: int,
        request: Request,
        chat: Conversation,
        reply: Reply,
        root: int,
        cost: PassCost,
        prefill_seconds: float,
    ) -> Step:
        """One round: propose, verify, accept, commit."""
        top_k = self._top_k(request, chat)
        drafting = time.perf_counter()
        proposal, note = self._propose(request, chat, root, reply.remaining)
        tree = proposal.tree
        verifying = 0.0

        def verified() -> Reading:
            nonlocal verifying
            verifying = time.perf_counter()  # anew where it is done once more: what a pass costs is learnt from it
            return reply.read(self.target.verify(chat.cache, tree), tree, top_k)

        reading = self.with_room(verified)
        accepting = time.perf_counter()
        verdict = accept(tree, reading.choose, request.eos_token_ids)
        if verdict.next_token == NO_TOKEN:
            dtype = dtype_name(self.model.dtype)
            remedy = "get its weights again, or choose another --model" if dtype == "float32" else "use --dtype float32"
            chat.forget()
            raise NotANumberError(f"the logits of {self.name} are not numbers (NaN) in {dtype}: {remedy}")
        emitted, text = reply.emit(tree, verdict)
        committing = time.perf_counter()
        kept = verdict.path[: len(emitted)]  # a stop inside the path: what follows it is not cached
        context_length = chat.cache.length
        chat.cache.commit(kept)
        chat.token_ids += [int(tree.token_ids[node]) for node in kept]
        if request.decoding != "plain":
            chat.speculator.observe(tree, kept, emitted, reading.top() if top_k else None)
        done = time.perf_counter()
        if not self.target.prepared:
            cost.observe(len(tree), accepting - verifying)
        return Step(
            index=index,
            tree=tree,
            verdict=verdict,
            token_ids=emitted,
            text=text,
            timings=Timings(
                prefill=0.0 if index else prefill_seconds,
                draft=verifying - drafting,
                verify=accepting - verifying,
                accept=committing - accepting,
                commit=done - committing,
            ),
            context_length=context_length,
            plain_seconds=cost.plain,
            finish_reason=reply.finish_reason,
            target=reading.view(verdict) if request.details else None,
            note=note,
        )

    def _top_k(self, request: Request, chat: Conversation) -> int:
        """How many of the target's next tokens its speculator is shown."""
        return 0 if request.decoding == "plain" else chat.speculator.top_k

    def _prefill(self, request: Request, chat: Conversation) -> None:
        """Cache the prompt but for its last token, the first root; what the conversation holds of it stays."""
        prompt = request.prompt.token_ids
        cached = chat.rewind(prompt[:-1])
        try:
            top = self.target.prefill(chat.cache, prompt[cached:-1], self._top_k(request, chat), request.cancelled)
        finally:
            chat.token_ids += prompt[cached : chat.cache.length]
        if request.decoding != "plain":
            chat.speculator.begin(prompt, top, cached)

    def _propose(self, request: Request, chat: Conversation, root: int, remaining: int) -> tuple[Proposal, str | None]:
        """The tree to verify: within the budget, the context, and the tokens still wanted."""
        plain = Proposal(TokenTree.root(root))
        if request.decoding == "plain":
            return plain, None
        room = min(self.target.context_limit - chat.cache.length - 1, MAX_BUDGET)
        budget = room if request.budget == "auto" else min(request.budget, room)
        if remaining <= 1:
            return plain, "draft inactive: only one more token is wanted"
        if budget <= 0:
            return plain, "draft inactive: the node budget is 0"
        branches = 1 if request.decoding == "linear" else None
        worth = self.pass_cost.worth if request.budget == "auto" else None
        proposal = chat.speculator.propose(budget, branches, worth)
        if not proposal.tree.follows(root, budget, self.target.vocab_size):
            return plain, "draft inactive: what the speculator proposed is no tree for this text"
        if len(proposal.tree) == 1:
            return proposal, "draft inactive: nothing seen so far tells what may follow"
        if request.budget != "auto" or proposal.tree.scores is None:
            return proposal, None
        width = self.pass_cost.best_width(proposal.tree.scores)
        note = "draft inactive: no candidate is worth its cost in this pass" if width == 1 else None
        return Proposal(proposal.tree.prefix(width), proposal.match_length), note
