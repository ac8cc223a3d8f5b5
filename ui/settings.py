"""Settings: how the next reply is decoded, as the user set it."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

from transformers import PreTrainedModel

from specdec.request import NEUTRAL, Budget, Decoding, acting_settings

MAX_TOKENS = 4096
"""The most tokens one reply may be asked for."""
COLDEST = 0.01
"""The least temperature that is told from 0."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The user's choices for one reply. ``temperature`` 0 is greedy; ``top_p`` and ``seed`` then have no effect.

    ``own``: whether the settings of the model's generation config act for which the page has no field.
    """

    decoding: Decoding = "tree"
    budget: Budget = "auto"
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 512
    system_prompt: str = ""
    own: bool = True

    @classmethod
    def read(
        cls,
        decoding: str,
        budget: str | int,
        temperature: float,
        top_p: float,
        seed: float | None,
        max_tokens: float,
        system_prompt: str,
        own: bool = True,
    ) -> Settings:
        """Settings from the values of form fields or of a client's call.

        Numbers are brought into range (a temperature too small to tell from 0 is 0). An empty field has its default value;
        an empty seed is drawn at random. The engine refuses an unknown decoding or budget. Raises ValueError where a number
        is expected and something else is given.
        """
        text, default = str(budget or "auto"), cls()
        warmth = _number("temperature", temperature, default.temperature, 0.0, math.inf)
        return cls(
            decoding=decoding,  # type: ignore[arg-type]
            budget=int(text) if text.isdecimal() else text,  # type: ignore[arg-type]
            temperature=warmth if warmth >= COLDEST else 0.0,
            top_p=_number("top_p", top_p, default.top_p, 0.01, 1.0),
            seed=int(_number("seed", seed, secrets.randbelow(2**31), -(2**63), 2**63 - 1)),
            max_tokens=int(_number("max_tokens", max_tokens, default.max_tokens, 1, MAX_TOKENS)),
            system_prompt=(system_prompt or "").strip(),
            own=own,
        )

    def arguments(self) -> dict[str, Any]:
        """The same as arguments of `SpeculativeEngine.stream`; the page's fields override the model's generation config."""
        sampling: dict[str, bool | int | float] = {"do_sample": False, "repetition_penalty": 1.0}
        if self.temperature > 0:
            sampling |= {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
        return {
            "decoding": self.decoding,
            "budget": self.budget,
            "max_new_tokens": self.max_tokens,
            "seed": self.seed,
            **({} if self.own else NEUTRAL),
            **sampling,
        }

    def facts(self) -> dict[str, str | int | float]:
        """Flat, for display beside a reply."""
        facts: dict[str, str | int | float] = {"decoding": self.decoding, "max_tokens": self.max_tokens}
        if self.decoding != "plain":
            facts["budget"] = self.budget
        facts["temperature"] = self.temperature
        if self.temperature > 0:
            facts |= {"top_p": self.top_p, "seed": self.seed}
        return facts


def own_settings(model: PreTrainedModel) -> str:
    """The settings of the model's generation config that act on sampled replies though the page has no field for them."""
    acting = acting_settings(model, **Settings(temperature=1.0).arguments())
    return ", ".join(f"{name} {shorten(str(value), 60, placeholder=' …')}" for name, value in acting.items())


def _number(name: str, value: Any, default: float, least: float, most: float) -> float:
    """``value`` brought into range, the ``default`` where there is none."""
    if value is None:
        return default
    try:
        number = float(value) if not isinstance(value, int) else value
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"{name} must be a number, not {value!r}.")
    return min(max(number, least), most)
