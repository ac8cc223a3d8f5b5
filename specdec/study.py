"""Study: what a speculator may learn of a model before the first chat, once per model, from the model alone.

The target fills a `Vocabulary` with its own next tokens: after every token of the vocabulary, and along conversations that
it writes all by itself. Whoever waits sees progress; what is interrupted goes on at the next start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.errors import PromptError
from specdec.folders import model_file, studied_file
from specdec.speculators.vocabulary import ChatFrame, Vocabulary
from specdec.target import TargetModel
from specdec.template import ChatTemplate

log = logging.getLogger(__name__)

TOP_K = 50
"""Next tokens that self-talk draws from and the table learns from."""
ROUNDS = 12
"""Rounds of self-talk after which a model is known well enough."""
ROWS, LENGTH = 64, 256
"""Texts of self-talk per round, and their tokens."""

_QUESTION, _REPLY = "QUESTION-5e1f", "REPLY-5e1f"


def study(
    target: TargetModel,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: Vocabulary,
    rounds: int,
    progress: Callable[[str, float], bool],
) -> None:
    """Complete ``vocabulary`` up to ``rounds`` of self-talk, and save it.

    ``progress(what, share done)`` is called before each pass and may take its time; False stops here. What is there by
    then is saved.
    """
    before = vocabulary.adjacent, vocabulary.rounds
    newline = tokenizer.encode("\n", add_special_tokens=False)
    frame = chat_frame(tokenizer)
    try:
        vocabulary.learn_adjacency(
            lambda token_ids: target.top_after(token_ids, TOP_K),
            target.vocab_size,
            newline[0] if newline else 0,
            lambda share: progress("studying the vocabulary", share),
        )
        if frame is not None and vocabulary.adjacent >= target.vocab_size:
            vocabulary.self_talk(
                target.batch_writer(len(frame.head) + LENGTH, TOP_K),
                frame,
                lambda share: progress("studying conversations of its own", share),
                rounds,
                ROWS,
                LENGTH,
            )
    finally:
        if (vocabulary.adjacent, vocabulary.rounds) != before:
            vocabulary.save(model_file("vocabulary", target.model))


def load_vocabulary(model: PreTrainedModel) -> Vocabulary:
    """What earlier studies of this very model saved; an empty one where there was none, or where it is damaged."""
    try:
        return Vocabulary.load(studied_file(model_file("vocabulary", model).name))
    except FileNotFoundError:
        return Vocabulary()
    except ValueError as error:
        log.warning("%s", error)
        return Vocabulary()


def chat_frame(tokenizer: PreTrainedTokenizerBase) -> ChatFrame | None:
    """The chat template of ``tokenizer``, cut where a message goes; None where there is none or it cannot be cut."""
    messages = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": _REPLY},
        {"role": "user", "content": _QUESTION},
    ]
    try:
        text = ChatTemplate(tokenizer).text(messages)
    except PromptError:
        return None
    head, _, rest = text.partition(_QUESTION)
    to_reply, _, rest = rest.partition(_REPLY)
    to_question, found, _ = rest.partition(_QUESTION)
    head_ids, reply_ids, question_ids = (
        tuple(tokenizer.encode(piece, add_special_tokens=False)) for piece in (head, to_reply, to_question)
    )
    if not (found and head_ids and reply_ids and question_ids):
        return None
    ends = {reply_ids[0], question_ids[0], tokenizer.eos_token_id} - {None}
    return ChatFrame(head_ids, reply_ids, question_ids, frozenset(ends))
