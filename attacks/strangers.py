"""Strangers before a server with a key: connections that never end, and bodies that swell.

python -m attacks.strangers --connections 1000 --seconds 20

A client with a key asks all the while. Its answers must all come, and the slowest of a hundred may
be 0.2 s later than before. Then clients with the key send bodies of lists within lists, more than
may wait; the server may grow by 300 MiB.
"""

import argparse
import asyncio
import json
import multiprocessing
import sys
import time

import httpx
import psutil

from attacks.serving import serving

KEY = {"authorization": "Bearer right"}
ASKED = {"prompt": "the cat", "max_tokens": 1, "temperature": 0}
BODY = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\n\r\n"
# What a stranger sends first, and then again and again.
WAYS = {
    "silent": (b"", b""),
    "half a head": (b"GET /health HTTP/1.1\r\nHost: localh", b""),
    "a head for ever": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"X: y\r\n"),
    "a body for ever": (BODY, b"["),
    "answered, silent": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b""),
}
MOST_LATER, MOST_GROWTH = 0.2, 300 << 20  # seconds, bytes


async def dawdle(port: int, way: str, end: float) -> None:
    """A connection in one of the ways, and another each time that it is closed."""
    first, then = WAYS[way]
    while time.monotonic() < end:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(first)
            while time.monotonic() < end:
                writer.write(then)
                await writer.drain()
                try:
                    if not await asyncio.wait_for(reader.read(1 << 12), 1):
                        break
                except TimeoutError:
                    continue
            writer.close()
        except OSError:
            pass
        await asyncio.sleep(2)


async def ask(url: str, seconds: float) -> tuple[list[float], int]:
    """How long answers took, of a client that connects each time; how many did not come."""
    times, n_lost, end = [], 0, time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.monotonic()
        try:
            async with httpx.AsyncClient(timeout=60) as http:
                answer = await http.post(f"{url}/v1/completions", json=ASKED, headers=KEY)
                n_lost += answer.status_code != 200
        except httpx.HTTPError as error:
            print(f"lost: {type(error).__name__} {error}")
            n_lost += 1
        times.append(time.monotonic() - start)
    return sorted(times), n_lost


def crowd(port: int, n: int, seconds: float) -> None:
    """n strangers in all ways; they run in a process of their own."""

    async def all_of_them() -> None:
        ways, end = [*WAYS], time.monotonic() + seconds
        await asyncio.gather(*(dawdle(port, ways[i % len(ways)], end) for i in range(n)))

    asyncio.run(all_of_them())


async def besiege(url: str, port: int, n: int, seconds: float) -> list[str]:
    """The faults of a crowd of n strangers."""
    await ask(url, 2)  # kernels are compiled
    alone, _ = await ask(url, seconds / 2)
    strangers = multiprocessing.Process(target=crowd, args=(port, n, seconds + 3))
    strangers.start()
    await asyncio.sleep(3)  # all are there
    beside, n_lost = await ask(url, seconds)
    strangers.terminate()
    slow, before = (times[int(0.99 * len(times))] for times in (beside, alone))
    print(f"{n:,} strangers: p99 {before:.3f} → {slow:.3f} s, {n_lost} of {len(beside):,} lost")
    faults = [f"{n_lost} answers did not come"] if n_lost else []
    return faults + ["answers came too late"] * (slow > before + MOST_LATER)


async def swell(url: str, process: psutil.Process, n: int) -> list[str]:
    """The faults of n bodies of 2 MB that are lists within lists, sent at once."""
    raw = json.dumps({**ASKED, "metadata": [[] for _ in range(700_000)]}).encode()
    before, most = process.memory_info().rss, 0

    async def post(http: httpx.AsyncClient) -> int:
        answer = await http.post(f"{url}/v1/completions", content=raw, headers=KEY)
        return answer.status_code

    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=n)) as http:
        sent = [asyncio.create_task(post(http)) for _ in range(n)]
        while not all(task.done() for task in sent):
            most = max(most, process.memory_info().rss - before)
            await asyncio.sleep(0.05)
        statuses = [task.result() for task in sent]
    counts = {status: statuses.count(status) for status in sorted({*statuses})}
    print(f"{n} bodies of {len(raw) >> 10} KiB: {most >> 20} MiB more at most, {counts}")
    faults = ["the server grew too much"] if most > MOST_GROWTH else []
    return faults + ["another status than 200 and 429"] * (not {*statuses} <= {200, 429})


async def attack(url: str, port: int, process: psutil.Process, settings: argparse.Namespace) -> int:
    """Both attacks; the number of faults."""
    faults = await besiege(url, port, settings.connections, settings.seconds)
    faults += await swell(url, process, settings.bodies)
    for fault in faults:
        print(fault)
    print(f"{len(faults)} faults")
    return len(faults)


def main() -> int:
    """The exit code: 1 if a fault was met."""
    parser = argparse.ArgumentParser(prog="attacks.strangers", description=__doc__.split("\n")[0])
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--bodies", type=int, default=60)
    settings = parser.parse_args()
    with serving("--api-key", "right") as (port, process):
        return bool(asyncio.run(attack(f"http://127.0.0.1:{port}", port, process, settings)))


if __name__ == "__main__":
    sys.exit(main())
