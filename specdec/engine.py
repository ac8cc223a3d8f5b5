"""SpeculativeEngine: propose -> verify -> accept -> commit -> yield Step.

One loop serves plain, linear and tree decoding: plain is an empty proposal, linear a tree with one branch. Speculation
never changes what the target says; it only lets one target pass say more of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from os import PathLike
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.conversation import Conversation
from specdec.cost import PassCost
from specdec.devices import give_back_memory
from specdec.errors import LoadError, is_out_of_memory
from specdec.loading import load, out_of_memory, unwrapped
from specdec.prompt import Message, Prompt
from specdec.request import Request, RequestError, resolve
from specdec.scheduler import Scheduler
from specdec.speculators import Speculator
from specdec.speculators.hybrid import HybridSpeculator, warm_up
from specdec.speculators.memory import Memory
from specdec.step import Step
from specdec.streamer import heard
from specdec.study import ROUNDS, load_vocabulary, study
from specdec.target import TargetModel
from specdec.text import SpecialText, special_texts, token_texts


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
            if tokenizer is None:
                raise TypeError("a loaded model needs its tokenizer: SpeculativeEngine(model, tokenizer)")
            if idle := sorted(loading.keys() - {"progress"}):
                raise TypeError(f"{', '.join(idle)} cannot be used with a loaded model: convert and move the model itself")
            self.model: PreTrainedModel = unwrapped(model)
            self.tokenizer, self.name = tokenizer, self.model.name_or_path or type(self.model).__name__
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
        self.scheduler = Scheduler(self.target, self.tokenizer, self.name)
        self.memory = memory
        self.vocabulary = load_vocabulary(self.model)
        self._speculator = speculator

    def use_memory(self, memory: Memory | None) -> None:
        """Let new conversations draft from ``memory`` and learn into it; None: from no memory."""
        self.memory = memory

    @property
    def pass_cost(self) -> PassCost:
        """What a pass costs on this device, by width: measured when first asked for, some two dozen passes."""
        return self.scheduler.cost

    def move_in(self, cost: PassCost | None = None) -> None:
        """See the model afresh where its weights have come to another device, with a ``cost`` that is known there."""
        self.target = TargetModel(self.model)
        self.scheduler = Scheduler(self.target, self.tokenizer, self.name, cost)

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
        ``frequency_penalty``, ``logits_processor`` and ``stopping_criteria`` (each holds at every emitted token). ``details``:
        compute Step.target. ``logprobs``: compute Step.logprobs, with so many of the most probable tokens. ``prediction``: text
        or token ids that the reply will probably be much like, to copy guesses from; the target does not read it.
        ``cancelled``: a callable polled once a step and between prefill chunks. ``owner``: texts of one owner start from each
        other's K/V (see `specdec.conversation.Text`). Everything else is an argument of transformers' generate (streamer,
        max_new_tokens, do_sample, temperature, top_k, top_p, min_p, repetition_penalty,
        stop_strings, ...); what is not given comes from the model's generation_config. Without any length limit the reply
        runs to its end-of-sequence token or the model's context.

        Arguments are checked here, before the first step: raises RequestError, PromptError. A conversation that is already
        streaming raises ConversationBusyError at the first step; MemoryFullError where the device has no memory left;
        NotANumberError where the model's logits are NaN.
        """
        request = self.request(prompt, conversation, **arguments)
        return heard(self._follow(request, conversation or self.conversation()), request)

    def request(
        self, prompt: str | Sequence[Message] | Sequence[int] | Prompt, conversation: Conversation | None, **arguments: Any
    ) -> Request:
        """What `stream` is asked for, checked: for `specdec.scheduler.Scheduler.submit`. Raises RequestError, PromptError."""
        if conversation is not None and getattr(conversation, "target", None) is not self.target:
            raise RequestError("this conversation is of another engine: pass what conversation() of this one makes, or none")
        return resolve(self.model, self.tokenizer, self.target.context_limit, prompt, **arguments)

    def _follow(self, request: Request, chat: Conversation) -> Iterator[Step]:
        yield from self.scheduler.follow(self.scheduler.submit(request, chat))
