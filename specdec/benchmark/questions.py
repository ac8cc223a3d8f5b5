"""Questions: what the lanes are asked, in Spec-Bench's format (arXiv 2401.07851)."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

OWN = Path(__file__).with_name("questions.jsonl")
"""This repo's own set, written for it: chat, code, rewriting, extraction, translation, reasoning, long context."""


class QuestionsError(ValueError):
    """A question file that cannot be used; the message names the file, the line and the remedy."""


@dataclass(frozen=True, slots=True)
class Question:
    """One conversation: the user's ``turns``, asked one after the other."""

    question_id: str
    category: str
    turns: tuple[str, ...]


def load_questions(path: Path = OWN, categories: Collection[str] = (), limit: int | None = None) -> list[Question]:
    """Read questions from a JSON-lines file; only the named ``categories``, at most ``limit`` (spread over the file)."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise QuestionsError(f"cannot read {path}: {error.strerror}; pass --questions FILE.jsonl") from error
    questions = [_parse(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    known = sorted({question.category for question in questions})
    if unknown := set(categories) - set(known):
        raise QuestionsError(f"{path} has no category {', '.join(sorted(unknown))}; it has {', '.join(known)}")
    chosen = [question for question in questions if not categories or question.category in categories]
    if not chosen:
        raise QuestionsError(f"{path} holds no question")
    if limit is not None and limit < len(chosen):
        chosen = [chosen[i * len(chosen) // limit] for i in range(limit)]
    return chosen


def _parse(path: Path, number: int, line: str) -> Question:
    try:
        entry = json.loads(line)
        question = Question(str(entry["question_id"]), str(entry["category"]), tuple(entry["turns"]))
    except (ValueError, KeyError, TypeError) as error:
        raise QuestionsError(
            f"{path} line {number} is not a Spec-Bench question (question_id, category, turns): {error!r}"
        ) from error
    if not question.turns or not all(isinstance(turn, str) and turn for turn in question.turns):
        raise QuestionsError(f"{path} line {number}: turns must be a list of texts")
    return question
