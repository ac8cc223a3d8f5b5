"""Decoder: the whole way into the engine, with plain arguments going in, and steps or an audit coming out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from specdec.audit import Audit, audit
from specdec.conversation import Conversation
from specdec.engine import SpeculativeEngine
from specdec.prompt import Prompt
from specdec.step import Step
from ui.settings import Settings


class Decoder:
    """Decodes in this process. ``engine`` may be exchanged between two replies."""

    def __init__(self, engine: SpeculativeEngine) -> None:
        self.engine = engine

    @contextmanager
    def telling(self, tell: Callable[[str], None]) -> Iterator[None]:
        """While open, ``tell`` hears what the engine prepares before it goes on."""
        target = self.engine.target
        before, target.progress = target.progress, lambda text, _: tell(text)
        try:
            yield
        finally:
            target.progress = before

    def conversation(self, *, remember: bool = True) -> Conversation | None:
        """A new conversation for `steps`, as the engine's; None where none outlives a reply."""
        return self.engine.conversation(remember=remember)

    def steps(
        self,
        conversation: Conversation | None,
        prompt: Prompt,
        settings: Settings,
        cancelled: Callable[[], bool],
        details: bool,
    ) -> Iterator[Step]:
        """The steps of a reply to ``prompt``; ``details`` for somebody who watches. Ends within a step of ``cancelled()``."""
        return self.engine.stream(
            prompt, conversation=conversation, cancelled=cancelled, details=details, **settings.arguments()
        )

    def audit(self, prompt: Prompt, token_ids: tuple[int, ...], settings: Settings, cancelled: Callable[[], bool]) -> Audit:
        """What the target itself says about the reply ``token_ids``; of a part of it once ``cancelled()``."""
        return audit(self.engine, prompt, token_ids, cancelled, **settings.arguments())
