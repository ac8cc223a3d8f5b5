"""Decoder: the whole way to the service, with plain arguments going in, and steps or an audit coming out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

from specdec.audit import Audit, audit
from specdec.conversation import Conversation
from specdec.engine import SpeculativeEngine
from specdec.prompt import Prompt
from specdec.serving.service import Service
from specdec.step import Step
from ui.settings import Settings


class Decoder:
    """Decodes in this process, by the engine of ``service``, in the passes of everybody's replies."""

    def __init__(self, service: Service) -> None:
        self.service = service

    @property
    def engine(self) -> SpeculativeEngine:
        """The engine in use; `ui.models` may exchange it."""
        return self.service.engine

    def parallel(self) -> int:
        """How many replies to write at once."""
        return self.service.widest()

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
        owner: Hashable = None,
    ) -> Iterator[Step]:
        """The steps of a reply to ``prompt``; ``details`` for somebody who watches. Ends within a step of ``cancelled()``.

        Texts of one ``owner`` start from each other's K/V.
        """
        return self.service.stream(
            prompt, conversation, cancelled=cancelled, details=details, owner=owner, **settings.arguments()
        )

    def audit(self, prompt: Prompt, token_ids: tuple[int, ...], settings: Settings, cancelled: Callable[[], bool]) -> Audit:
        """What the target itself says about the reply ``token_ids``; of a part of it once ``cancelled()``."""
        return audit(self.engine, prompt, token_ids, cancelled, self.service.call, **settings.arguments())
