"""Soak: a server under a crowd of clients, some of which break off, dawdle or send nonsense.

python -m attacks.soak --minutes 30 --clients 50

Every answer is compared with that to the same request alone. At the end the server must be idle, as
large as after its first minute (within 10 % and 16 MiB) and hold as many open files.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from attacks.serving import serving

WORDS = ("the", "cat", "sat", "on", "mat", "dog", "and", "then", "a", "b")
WAYS = ("whole", "stream", "broken off", "slow", "nonsense")
MOST_GROWTH, MOST_MORE = 1.10, 16 << 20


@dataclass
class Soak:
    """A server's address, the answers that it gives to requests alone, and what was met."""

    url: str
    alone: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def request(i: int) -> dict[str, Any]:
    """The i-th of the requests that the clients draw from; its answer follows from it alone."""
    rng = random.Random(i)
    prompt = " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))
    if i % 2:
        return {"prompt": prompt, "max_tokens": rng.randint(1, 24), "temperature": 0}
    return {"prompt": prompt, "max_tokens": rng.randint(1, 24), "temperature": 1.0, "seed": i}


async def whole(http: httpx.AsyncClient, body: dict[str, Any]) -> str:
    """The text of an answer; ValueError with what came instead."""
    answer = await http.post("/v1/completions", json=body)
    if answer.status_code != 200:
        raise ValueError(f"{answer.status_code}: {answer.text[:200]}")
    return str(answer.json()["choices"][0]["text"])


async def stream(http: httpx.AsyncClient, body: dict[str, Any], n_events: int | None) -> str:
    """The text of a stream; broken off after n_events, if given."""
    text = ""
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                text += "".join(choice["text"] for choice in event["choices"])
                if n_events is not None and (n_events := n_events - 1) < 0:
                    break
    return text


async def dawdle(url: httpx.URL, body: dict[str, Any], seconds: float) -> None:
    """Send half of a request, wait, and go."""
    _, writer = await asyncio.open_connection(url.host, url.port)
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\n"
    head += f"Content-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw[: len(raw) // 2])
    await writer.drain()
    await asyncio.sleep(seconds)
    writer.close()


async def nonsense(http: httpx.AsyncClient, rng: random.Random) -> None:
    """Send a body that is no request; ValueError unless it is refused."""
    answer = await http.post("/v1/completions", content=rng.randbytes(rng.randint(0, 300)))
    if answer.status_code != 400:
        raise ValueError(f"nonsense was answered with {answer.status_code}")


async def client(soak: Soak, seed: int, end: float) -> None:
    """One client: requests, one after the other, in drawn ways."""
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=soak.url, timeout=600) as http:
        while time.monotonic() < end:
            way, i = rng.choice(WAYS), rng.randrange(len(soak.alone))
            try:
                await _ask(soak, http, way, i, rng)
            except (ValueError, httpx.HTTPError) as error:
                soak.faults.append(f"{way}: {type(error).__name__} {error}")
            soak.counts[way] += 1


async def _ask(soak: Soak, http: httpx.AsyncClient, way: str, i: int, rng: random.Random) -> None:
    body = request(i)
    if way == "nonsense":
        return await nonsense(http, rng)
    if way == "slow":
        return await dawdle(http.base_url, body, rng.uniform(0, 2))
    if way == "broken off":
        await stream(http, body, rng.randint(0, 5))
        return None
    text = await (whole(http, body) if way == "whole" else stream(http, body, None))
    if text != soak.alone[str(i)]:
        raise ValueError(f"request {i} was answered {text!r}, alone {soak.alone[str(i)]!r}")
    return None


def size(process: psutil.Process) -> tuple[int, int]:
    """Resident bytes and open files."""
    return process.memory_info().rss, process.num_fds()


async def crowd(soak: Soak, n_clients: int, end: float, seed: int) -> None:
    """All clients until the end, then until the server is idle."""
    await asyncio.gather(*(client(soak, seed + i, end) for i in range(n_clients)))
    async with httpx.AsyncClient(base_url=soak.url) as http:
        for _ in range(600):
            health = (await http.get("/health")).json()
            if not health["active"] and not health["waiting"]:
                return
            await asyncio.sleep(0.1)
    soak.faults.append(f"the server is not idle: {health}")


async def soak_server(url: str, process: psutil.Process, minutes: float, n_clients: int) -> Soak:
    """Ask alone, then a warm-up by the whole crowd, then the soak."""
    soak = Soak(url)
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        for i in range(64):
            soak.alone[str(i)] = await whole(http, request(i))
    await crowd(soak, n_clients, time.monotonic() + min(60.0, 20 * minutes), 10_000)
    (n_before, files_before), start = size(process), time.monotonic()
    await crowd(soak, n_clients, start + 60 * minutes, 0)
    await asyncio.sleep(1)  # connections end
    n_after, files_after = size(process)
    if n_after > n_before * MOST_GROWTH + MOST_MORE:
        soak.faults.append(f"it grew from {n_before >> 20} to {n_after >> 20} MiB")
    if files_after > files_before:
        soak.faults.append(f"it holds {files_after} open files, {files_before} before")
    kinds = ", ".join(f"{n:,} {way}" for way, n in soak.counts.items())
    print(f"{soak.counts.total():,} requests of {n_clients} clients: {kinds}")
    print(f"{n_before >> 20} → {n_after >> 20} MiB, {files_before} → {files_after} open files")
    return soak


def main() -> int:
    """The exit code: 1 if a fault was met."""
    parser = argparse.ArgumentParser(prog="attacks.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--clients", type=int, default=50)
    settings = parser.parse_args()
    with serving("--queue", "256") as (port, process):
        url = f"http://127.0.0.1:{port}"
        soak = asyncio.run(soak_server(url, process, settings.minutes, settings.clients))
    for fault, n in Counter(soak.faults).most_common(20):
        print(f"{n} times: {fault}")
    print(f"{len(soak.faults)} faults")
    return bool(soak.faults)


if __name__ == "__main__":
    sys.exit(main())
