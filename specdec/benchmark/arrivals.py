"""Arrivals: a server as its visitors meet it. They come at random moments, over HTTP, however long others are served.

A Poisson process: the times between two arrivals are exponentially distributed. What is driven is on this machine, and for a
bounded time.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from specdec.engine import SpeculativeEngine
from specdec.serving.http import Api
from specdec.serving.line import Line
from specdec.serving.server import serving
from specdec.serving.service import Service

MOST_REQUESTS = 1000
MOST_SECONDS = 600.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(slots=True)
class Visit:
    """What one visitor met. ``moments``: when text came, in seconds since the arrival. ``error``: what came instead."""

    arrived: float
    moments: list[float] = field(default_factory=list)
    tokens: int = 0
    ended: float = 0.0
    error: str | None = None


async def drive(
    url: str,
    prompts: Sequence[str],
    rate: float,
    *,
    requests: int = 100,
    seconds: float = 60.0,
    seed: int = 0,
    asked: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Send ``prompts`` in turn to the API at ``url``, ``rate`` a second on average, and fold what the visitors meet.

    At most so many ``requests``, none later than ``seconds`` after the first; who is not served in as long again is given up.
    ``asked``: further fields of each request. Raises ValueError where ``url`` is not on this machine or a bound is too wide.
    """
    if urlsplit(url).hostname not in LOOPBACK:
        raise ValueError(f"{url} is not on this machine: only a loopback address can be driven")
    if not (rate > 0 and 0 < requests <= MOST_REQUESTS and 0 < seconds <= MOST_SECONDS):
        raise ValueError(f"pass a rate above 0, at most {MOST_REQUESTS} requests and at most {MOST_SECONDS:.0f} seconds")
    gaps = np.random.default_rng(seed).exponential(1 / rate, requests)
    arrivals = np.concatenate([[0.0], np.cumsum(gaps[1:])])
    arrivals = arrivals[arrivals <= seconds]
    start = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits(), trust_env=False) as client:
        visits = [
            _visit(client, start, arrival, {"messages": [{"role": "user", "content": prompt}], **asked}, 2 * seconds)
            for arrival, prompt in zip(arrivals.tolist(), _in_turn(prompts, len(arrivals)), strict=True)
        ]
        return fold(await asyncio.gather(*visits))


async def _visit(client: httpx.AsyncClient, start: float, arrival: float, body: dict[str, Any], patience: float) -> Visit:
    await asyncio.sleep(start + arrival - time.perf_counter())
    visit = Visit(time.perf_counter() - start)
    try:
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + patience - arrival):
            await _follow(client, start, visit, {**body, "stream": True, "stream_options": {"include_usage": True}})
    except TimeoutError:
        visit.error = "gave up"
    except httpx.HTTPError as error:
        visit.error = repr(error)
    visit.ended = time.perf_counter() - start
    return visit


async def _follow(client: httpx.AsyncClient, start: float, visit: Visit, body: dict[str, Any]) -> None:
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            visit.error = (await answer.aread()).decode()
            return
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                visit.error = event["error"]["message"]
            elif event.get("usage"):
                visit.tokens = event["usage"]["completion_tokens"]
            elif any(choice["delta"].get("content") for choice in event["choices"]):
                visit.moments.append(time.perf_counter() - start - visit.arrived)


def fold(visits: Sequence[Visit]) -> dict[str, Any]:
    """Tokens a second over the whole time, and the median and the 95th percentile of what visitors wait for, in seconds."""
    served = [visit for visit in visits if visit.error is None and visit.moments]
    duration = max(visit.ended for visit in visits) - min(visit.arrived for visit in visits)
    return {
        "requests": len(visits),
        "failed": len(visits) - len(served),
        "errors": sorted({visit.error for visit in visits if visit.error}),
        "seconds": duration,
        "tokens_per_second": sum(visit.tokens for visit in served) / duration,
        "first_token_seconds": _spread([visit.moments[0] for visit in served]),
        "gap_seconds": _spread([after - before for visit in served for before, after in pairwise(visit.moments)]),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {} if not values else {"median": float(np.median(values)), "p95": float(np.percentile(values, 95))}


def _in_turn(prompts: Sequence[str], count: int) -> list[str]:
    return [prompts[index % len(prompts)] for index in range(count)]


def measure(engine: SpeculativeEngine, prompts: Sequence[str], rate: float, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What `drive` finds of a server that runs ``engine``, as wide as `Service.widest` says."""
    service = Service(engine)
    try:
        width = service.call(service.widest)
        with serving(Api(service, Line(width), pending=MOST_REQUESTS).app()) as url:
            return {"rate": rate, "width": width, **asyncio.run(drive(url, prompts, rate, asked=asked))}
    finally:
        service.close()
        service.join(10)


def arrivals_text(figures: dict[str, Any]) -> str:
    """`measure` in one line."""
    first, gap = figures["first_token_seconds"], figures["gap_seconds"]
    waits = "; ".join(
        f"{name}: median {1e3 * wait['median']:.0f} ms, 95th percentile {1e3 * wait['p95']:.0f} ms"
        for name, wait in (("first token", first), ("gap between pieces", gap))
        if wait
    )
    return (
        f"{figures['requests']} requests in {figures['seconds']:.0f} s, {figures['rate']:g} a second, at most "
        f"{figures['width']} replies at once, {figures['failed']} failed: {figures['tokens_per_second']:.1f} tokens/s; {waits}"
    )
