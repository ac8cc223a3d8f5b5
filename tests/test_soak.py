"""Minutes of many clients who ask, leave, vanish and err: nobody is told anything wrong, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
from collections import Counter
from typing import Any

import httpx
import psutil
import pytest
from serve import idle, until
from toys import ARCHITECTURES, tiny_model, tokenizer

from specdec.engine import SpeculativeEngine
from specdec.serving.http import Api
from specdec.serving.line import Line
from specdec.serving.server import serving
from specdec.serving.service import Service

CLIENTS = 32
SECONDS = 170
SYSTEM = {"role": "system", "content": "answer as briefly as you can"}
PROMPTS = [f"question {number}: {'why ' * (number % 9)}" for number in range(12)]
LENGTHS = (3, 20, 60)
SETTINGS = ({"temperature": 0}, {"temperature": 0.9, "seed": 1}, {"temperature": 1.3, "seed": 2, "top_p": 0.9})
BAD = (
    {"temperature": 9},
    {"messages": []},
    {"tools": [1]},
    {"max_tokens": -1},
    {"messages": [{"role": "user", "content": "x" * 999}]},
)
MEGABYTE = 1 << 20


def body(prompt: str, length: int, setting: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [SYSTEM, {"role": "user", "content": prompt}], "max_tokens": length, **setting}


class Soak:
    """What the clients share: where to ask, and what each text is when nobody else asks."""

    def __init__(self, address: str, engine: SpeculativeEngine) -> None:
        self.address, self.url = address, f"{address}/v1/chat/completions"
        self.counts: Counter[str] = Counter()
        self.tokens = 0
        self.memory: list[int] = []
        self.end = 0.0
        self.alone = {
            (prompt, length, number): self._text(engine, body(prompt, length, setting))
            for prompt in PROMPTS
            for length in LENGTHS
            for number, setting in enumerate(SETTINGS)
        }

    @staticmethod
    def _text(engine: SpeculativeEngine, asked: dict[str, Any]) -> str:
        sampled = {"do_sample": True, "temperature": asked["temperature"], "top_k": 0, "seed": asked.get("seed")}
        arguments = sampled if asked["temperature"] else {}
        if "top_p" in asked:
            arguments["top_p"] = asked["top_p"]
        return engine.generate(asked["messages"], max_new_tokens=asked["max_tokens"], **arguments)

    async def run(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=120, limits=limits, trust_env=False) as client:
            await asyncio.gather(self.watch(), *(self.act(client, random.Random(number)) for number in range(CLIENTS)))

    async def watch(self) -> None:
        process = psutil.Process()
        while time.monotonic() < self.end:
            self.memory.append(process.memory_info().rss)
            await asyncio.sleep(1)

    async def act(self, client: httpx.AsyncClient, dice: random.Random) -> None:
        while time.monotonic() < self.end:
            act = dice.choices((self.ask, self.stream, self.leave, self.vanish, self.err), (3, 5, 2, 1, 1))[0]
            key = dice.choice(PROMPTS), dice.choice(LENGTHS), dice.randrange(len(SETTINGS))
            await act(client, dice, body(key[0], key[1], SETTINGS[key[2]]), self.alone[key])
            self.counts[act.__name__] += 1

    async def ask(self, client: httpx.AsyncClient, dice: random.Random, asked: dict[str, Any], alone: str) -> None:
        n = 1 if asked["temperature"] else dice.choice((1, 2))
        answer = (await client.post(self.url, json={**asked, "n": n})).json()
        assert [choice["message"]["content"] for choice in answer["choices"]] == [alone] * n
        self.tokens += answer["usage"]["completion_tokens"]

    async def stream(self, client: httpx.AsyncClient, dice: random.Random, asked: dict[str, Any], alone: str) -> None:
        told, done = await self.told(client, asked, None)
        assert (told, done) == (alone, True)

    async def leave(self, client: httpx.AsyncClient, dice: random.Random, asked: dict[str, Any], alone: str) -> None:
        told, _ = await self.told(client, asked, dice.randrange(6))
        assert alone.startswith(told)

    async def told(self, client: httpx.AsyncClient, asked: dict[str, Any], most: int | None) -> tuple[str, bool]:
        """What a stream said, of at most so many events; whether it was complete."""
        told, seen = "", 0
        async with client.stream("POST", self.url, json={**asked, "stream": True}) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return told, True
                if line:
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    told += choice["delta"].get("content", "")
                    seen += 1
                if seen == most:
                    break
        return told, False

    async def vanish(self, client: httpx.AsyncClient, dice: random.Random, asked: dict[str, Any], alone: str) -> None:
        """The connection is reset: while the request is sent, while it waits, or while it is answered."""
        host, port = self.address.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        text = json.dumps({**asked, "stream": dice.random() < 0.5})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(text)}\r\n\r\n"
        writer.write((head + text[: dice.choice((None, None, 10))]).encode())
        await writer.drain()
        await asyncio.sleep(dice.random() * 0.3)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async def err(self, client: httpx.AsyncClient, dice: random.Random, asked: dict[str, Any], alone: str) -> None:
        answer = await client.post(self.url, json={**asked, **dice.choice(BAD)})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"]


@pytest.mark.soak
def test_many_clients_for_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    service, line = Service(SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer())), Line(8)
    service.engine.scheduler.prefixes.limit = 8 * MEGABYTE
    api = Api(service, line)
    with serving(api.app()) as address:
        soak = Soak(address, service.engine)
        asyncio.run(soak.run(SECONDS))
        until(lambda: idle(service) and line.idle)
        assert not api._pending._replies
        assert service.call(lambda: not service._replies)
        assert service.call(lambda: [text for text in service.engine.scheduler.prefixes._texts if text.busy]) == []
    service.close()
    service.join(10)
    third = len(soak.memory) // 3
    middle, last = (max(part) / MEGABYTE for part in (soak.memory[third : 2 * third], soak.memory[2 * third :]))
    with capsys.disabled():
        print(f"\n{dict(soak.counts)}; whole answers: {soak.tokens} tokens; memory {middle:.0f} -> {last:.0f} MiB")
    assert last - middle < 32
