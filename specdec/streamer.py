"""Streamers of transformers (`TextStreamer` and the like) hear of a reply what they would hear of generate."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from specdec.request import Request
from specdec.step import Step


def heard(steps: Iterator[Step], request: Request) -> Iterator[Step]:
    """``steps``, told to the request's streamer, if it has one: the prompt first, then token by token, then the end.

    The end is told however the reply ends, so that nobody waits in another thread for more of it.
    """
    return steps if request.streamer is None else _told(steps, request)


def _told(steps: Iterator[Step], request: Request) -> Iterator[Step]:
    streamer = request.streamer
    try:
        streamer.put(torch.tensor([request.prompt.token_ids]))
        for step in steps:
            for token_id in step.token_ids:
                streamer.put(torch.tensor([token_id]))
            yield step
    finally:
        streamer.end()
