"""Connections that wait: whatever a client leaves undone, and wherever it stops, has an end."""

import asyncio
import logging
import socket
from itertools import product

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from virtual_clock import VirtualLoop, Wire

from pyggml.cli.web.body import Bodies
from pyggml.cli.web.connections import Patience, Places, network_of
from pyggml.cli.web.errors import HANDLERS
from pyggml.cli.web.guard import Access, Guard
from pyggml.cli.web.server import WatchedServer

KEY = "Authorization: Bearer right\r\n"
HEAD = "Host: localhost\r\nAccept: */*\r\n"
REQUESTS = {
    "page": f"GET / HTTP/1.1\r\n{HEAD}\r\n",
    "page of 1.0": f"GET / HTTP/1.0\r\n{HEAD}\r\n",
    "no such path": f"GET /no HTTP/1.1\r\n{HEAD}\r\n",
    "other host": "GET /v1/read HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    "read": f"POST /v1/read HTTP/1.1\r\n{HEAD}{KEY}Content-Length: 20\r\n\r\n{'b' * 20}",
    "stranger": f"POST /v1/read HTTP/1.1\r\n{HEAD}Content-Length: 20\r\n\r\n{'b' * 20}",
    "ignored": f"POST /v1/ignore HTTP/1.1\r\n{HEAD}{KEY}Content-Length: 20\r\n\r\n{'b' * 20}",
    "in chunks": f"POST /v1/read HTTP/1.1\r\n{HEAD}{KEY}Transfer-Encoding: chunked\r\n\r\n"
    "5\r\nhello\r\n3\r\nyou\r\n0\r\nX: y\r\n\r\n",
    "asks first": f"POST /v1/read HTTP/1.1\r\n{HEAD}{KEY}Expect: 100-continue\r\n"
    "Content-Length: 5\r\n\r\nhello",
    "upgrade": f"GET / HTTP/1.1\r\n{HEAD}Connection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    "other protocol": "\x16\x03\x01\x02" + "\x00" * 40,
    "connect": f"CONNECT / HTTP/1.1\r\n{HEAD}\r\n",
    "blank lines": "\r\n" * 40,
    "large": f"GET /v1/large HTTP/1.1\r\n{HEAD}{KEY}\r\n",
    "stream": f"GET /v1/stream HTTP/1.1\r\n{HEAD}{KEY}\r\n",
}
WAYS = ("silent", "drips", "does not read", "has asked before", "asks twice at once")
PATIENCE = Patience()


async def read(request):
    chunks = []
    await Bodies(1000, 10**6, Patience(rate=100.0))._receive(request, chunks)
    return PlainTextResponse(b"".join(chunks))


async def ignore(request):
    return PlainTextResponse("ignored")


async def large(request):
    return PlainTextResponse("x" * 400_000)


async def stream(request):
    async def parts():
        for _ in range(50):
            yield b"x" * 10_000
            await asyncio.sleep(0.1)

    return StreamingResponse(parts())


APP = Starlette(
    routes=[
        Route("/", ignore),
        Route("/v1/read", read, methods=["POST"]),
        Route("/v1/ignore", ignore, methods=["POST"]),
        Route("/v1/large", large),
        Route("/v1/stream", stream),
    ],
    middleware=[Middleware(Guard, access=Access(keys=("right", "other")))],
    exception_handlers=HANDLERS,
)


class House:
    """A server without sockets, on a clock that leaps."""

    def __init__(self, most=1 << 20, patience=PATIENCE):
        self.places = Places(most, patience)
        self.server = WatchedServer(APP, self.places, grace=1)
        self.config = self.server.config
        self.config.load()

    def connect(self, address="10.0.0.1", reads=True):
        made = self.config.http_protocol_class(
            config=self.config, server_state=self.server.server_state, app_state={}
        )
        return Wire(made, address, reads)

    async def watch(self, seconds, tick=0.1):
        """Let so much time pass, as the server's ticks do."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end:
            await asyncio.sleep(tick)
            self.places.sweep(loop.time())


def run(work):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


async def act(wire, way, raw, n):
    """The first n bytes of a request, in one of the ways, and then nothing more."""
    if way == "has asked before":
        wire.feed(REQUESTS["page"].encode())
        await asyncio.sleep(1)
    if way == "asks twice at once":
        wire.feed(raw + raw[:n])
        return
    wire.feed(raw[:n])
    if way == "drips":
        for i in range(n, n + 100):  # the rest, byte by byte, and then what goes on for ever
            await asyncio.sleep(4)
            wire.feed(raw[i : i + 1] or b"x")


async def all_end():
    house, loop = House(), asyncio.get_running_loop()
    cases, acts = {}, []
    for (name, text), way in product(REQUESTS.items(), WAYS):
        raw = text.encode()
        for n in range(len(raw) + 1):
            wire = house.connect(reads=way != "does not read")
            acts.append(asyncio.ensure_future(act(wire, way, raw, n)))
            cases[name, way, n] = wire
    await house.watch(120, 0.5)
    late = [case for case, wire in cases.items() if wire.closed is None]
    for task in acts:
        task.cancel()
    assert not late, (len(late), late[:20])
    assert not house.places._taken and loop.time() < 200
    return cases


def test_a_connection_ends_wherever_its_client_stops(caplog):
    """Each request of the table, cut after each byte, in each way. Nothing of it is logged."""
    with caplog.at_level(logging.WARNING, "uvicorn.error"):
        cases = run(all_end())
    assert len(cases) > 6000
    whole = cases["read", "silent", len(REQUESTS["read"])]
    assert whole.sent.startswith(b"HTTP/1.1 200") and whole.closed > PATIENCE.idle - 1
    head = [cases["read", "silent", n].closed for n in (0, 1, 40)]
    assert all(PATIENCE.head - 1 < t < PATIENCE.head + 1 for t in head)
    stalled = cases["large", "does not read", len(REQUESTS["large"])].closed
    assert PATIENCE.answer < stalled < PATIENCE.answer + PATIENCE.parting + 2
    assert not [r for r in caplog.records if r.name.startswith("uvicorn")]


async def honest():
    """Slow, but not too slow: in a body, before one, in what is read."""
    house = House(patience=Patience(rate=100.0))
    body = house.connect()
    body.feed(f"POST /v1/read HTTP/1.1\r\n{HEAD}{KEY}Content-Length: 900\r\n\r\n".encode())
    reader = house.connect(reads=False)
    reader.feed(REQUESTS["large"].encode())
    for _ in range(9):
        await house.watch(1.5)
        body.feed(b"b" * 100)
        await asyncio.sleep(0)
    assert reader.closed is None
    await house.watch(0.2)
    assert body.sent.endswith(b"b" * 900), body.sent
    slow = house.connect()
    slow.feed(f"POST /v1/read HTTP/1.1\r\n{HEAD}{KEY}Content-Length: 900\r\n\r\n".encode())
    await house.watch(PATIENCE.body + 0.5)
    assert slow.sent.startswith(b"HTTP/1.1 408") and b"too slowly: 0 bytes in 10 s" in slow.sent


def test_who_is_slow_within_the_limits_is_served():
    run(honest())


# -- places -------------------------------------------------------------------------------------


async def displaced(ways, n_addresses):
    """Many slow connections of some addresses, and an honest client at each moment."""
    house = House(most=20)
    for i in range(100):
        for way in ways:
            address = f"10.0.{i % n_addresses}.1"
            wire = house.connect(address, reads=way != "page unread")
            wire.feed({"silent": b"", "half": b"GET / HT"}.get(way, REQUESTS["page"].encode()))
        client = house.connect("10.0.0.1")
        client.feed(REQUESTS["read"].encode())
        await asyncio.sleep(0)
        await house.watch(0.1)
        assert client.sent.startswith(b"HTTP/1.1 200"), (i, client.sent, client.closed)
        client.abort()
        assert len(house.places._taken) <= 20


WAITING = ("silent", "half", "page", "page unread")


@pytest.mark.parametrize("n_addresses", [1, 3, 100])
@pytest.mark.parametrize("way", [*WAITING, WAITING])
def test_a_client_with_a_key_gets_in_whoever_waits(way, n_addresses):
    run(displaced([way] if isinstance(way, str) else way, n_addresses))


async def kept():
    """The connections of one address, and those that have shown a key, outlast a crowd."""
    house = House(most=20)
    mine, other = house.connect("10.0.0.1"), house.connect("10.0.0.2")
    mine.feed(REQUESTS["read"].encode())
    other.feed(b"GET / HT")
    await house.watch(0.2)
    for _ in range(200):
        house.connect("10.9.9.9")
        await asyncio.sleep(0)
    assert mine.closed is None and other.closed is None
    crowd = [c for c in house.places._taken if c.address == "10.9.9.9"]
    assert len(crowd) == house.places.most_of_address == 10
    for i in range(200):
        house.connect(f"10.9.{i}.9")
        await asyncio.sleep(0)
    assert mine.closed is None and other.closed is not None


def test_a_crowd_displaces_itself_first():
    run(kept())


async def busy(caplog):
    house = House(most=2)
    for _ in range(2):
        house.connect().feed(REQUESTS["stream"].encode())
    await house.watch(0.3)
    stranger, third = house.connect(), house.connect()
    stranger.feed(REQUESTS["stranger"].encode())
    await house.watch(0.1)
    assert stranger.sent.startswith(b"HTTP/1.1 401") or stranger.closed
    assert not caplog.records
    third.feed(REQUESTS["read"].encode())
    await house.watch(0.2)
    assert third.sent.startswith(b"HTTP/1.1 503") and b"all connections are taken" in third.sent
    assert "all 2 connections have a request under way" in caplog.text
    await house.watch(10)
    fourth = house.connect()
    fourth.feed(REQUESTS["read"].encode())
    await house.watch(0.1)
    assert fourth.sent.startswith(b"HTTP/1.1 200")


def test_where_all_are_busy_a_client_is_told_so(caplog):
    run(busy(caplog))


async def upgrades():
    house, with_key = House(), REQUESTS["upgrade"].replace(HEAD, HEAD + KEY)
    for text in (REQUESTS["upgrade"], with_key):
        house.connect().feed(text.encode())
        await house.watch(0.1)


def test_upgrades_are_logged_of_clients_with_a_key(caplog):
    run(upgrades())
    assert [r.getMessage() for r in caplog.records] == [
        "a client asks for websocket, wanted HTTP/1.1 alone"
    ]


def test_whose_an_address_is():
    assert network_of("2001:db8:1:2:3:4:5:6") == network_of("2001:db8:1:2::9")
    assert network_of("2001:db8:1:2::1") != network_of("2001:db8:1:3::1")
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") != network_of("10.0.0.2")
    assert network_of("") == "" and network_of("fe80::1%eth0") == "fe80::/64"


# -- sockets ------------------------------------------------------------------------------------


def test_more_half_sent_heads_than_places(serve):
    with serve(places=Places(16)) as server:
        address = server.url.removeprefix("http://").split(":")
        slow = []
        for i in range(64):
            slow.append(socket.create_connection((address[0], int(address[1]))))
            slow[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: loc")
            if i % 8 == 0:
                assert server.http.get("/health", headers={"connection": "close"}).is_success
        assert server.text("a", max_tokens=1).status_code == 200
        server.until(lambda: len(server.places._taken) <= 16)
        for each in slow:
            each.close()


def test_slow_heads_end_in_time(serve):
    with serve(places=Places(16, Patience(head=0.2))) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as slow:
            slow.sendall(b"GET / HT")
            assert slow.recv(100) == b""
        assert server.text("a", max_tokens=1).status_code == 200
