"""Bodies that wait: as they came, within a bound for all, and read one at a time."""

import asyncio
import gc
import json
import threading
import time

import httpx
import pytest
from starlette.requests import Request

from pyggml.cli.commands.serve.fields import Fields
from pyggml.cli.commands.serve.limits import MOST_BIASES, Limits
from pyggml.cli.commands.serve.params import read_chat, read_text
from pyggml.cli.web.body import Bodies
from pyggml.cli.web.connections import Patience
from pyggml.cli.web.errors import ApiError
from pyggml.generation import Sampling

N_LISTS = 20_000  # of one body: 40 KB, and once parsed 1.3 MB
MONSTER = [[] for _ in range(N_LISTS)]
SAID = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f", "x": MONSTER}}
# Where a field takes no monster at once, one stands in what it takes.
WITHIN = {
    "messages": [[SAID | {"x": MONSTER}], [SAID | {"name": "b", "y": {"z": MONSTER}}]],
    "tools": [[TOOL]],
    "stop": [["x"] * 16],
    "logit_bias": [{f"{i % 200:0{i // 200 + 4}}": 1 for i in range(MOST_BIASES)}],
}


def fields_of(read):
    """The names of all fields that a reader knows."""
    seen = set()

    class Seen(Fields):
        def check(self):
            seen.update(self._known)
            super().check()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pyggml.cli.commands.serve.params.Fields", Seen)
        with pytest.raises(ApiError):
            read({}, Sampling(), Limits())
    return sorted(seen)


PATHS = {
    "/v1/chat/completions": (fields_of(read_chat), {"messages": [SAID], "max_tokens": 1}),
    "/v1/completions": (fields_of(read_text), {"prompt": "a", "max_tokens": 1}),
}
BODIES = [
    (path, needed | {name: value})
    for path, (names, needed) in PATHS.items()
    for name in [*names, "surprise"]
    for value in [MONSTER, {"a": MONSTER}, *WITHIN.get(name, ())]
]


def n_empty_lists():
    gc.collect()
    return sum(type(each) is list and not each for each in gc.get_objects())


def test_what_waits_keeps_nothing_of_its_body(serve):
    """Every field of either request with a value of many lists; all that are taken wait at once."""
    raws = [(path, json.dumps(body).encode()) for path, body in BODIES]
    with serve(parallel=1, queue=63, max_bodies=1 << 26) as server:
        server.slow_down(0.1)
        with server.endless():
            server.until(lambda: server.service.worker.n_active == 1)
            before = n_empty_lists()
            sent = [threading.Thread(target=post, args=(server.url, *each)) for each in raws]
            for each in sent:
                each.start()
            server.until(lambda: sum(t.is_alive() for t in sent) == server.service.worker.n_waiting)
            server.until(lambda: not server.service.bodies.n_held)
            n_waiting, grown = server.service.worker.n_waiting, n_empty_lists() - before
            assert n_waiting > 12 and grown < N_LISTS, (n_waiting, grown)
        for each in sent:
            each.join()


def post(url, path, raw):
    httpx.post(f"{url}{path}", content=raw, timeout=600)


def test_many_biases_are_refused_before_they_wait(server):
    many = {str(i): 1 for i in range(MOST_BIASES + 1)}
    said = server.text("a", logit_bias=many).json()["error"]["message"]
    assert f"names {MOST_BIASES + 1} tokens, wanted at most {MOST_BIASES}" in said


# -- the budget ---------------------------------------------------------------------------------


def request(chunks):
    """A request whose body comes in these chunks; None: a client that waits."""
    left = [*chunks]

    async def receive():
        chunk = left.pop(0) if left else b""
        if chunk is None:
            await asyncio.sleep(3600)
        return {"type": "http.request", "body": chunk, "more_body": bool(left)}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


def status_of(done):
    return done.status if isinstance(done, ApiError) else 200


async def together():
    bodies = Bodies(600, 1000, Patience(body=0.2))
    halves = [
        asyncio.create_task(bodies.read(request([b'{"a": "', b"x" * 400, None]), dict))
        for _ in range(2)
    ]
    await asyncio.sleep(0)
    while bodies.n_held < 800:
        await asyncio.sleep(0.001)
    refused = bodies.read(request([b'{"a": "', b"x" * 400, b'"}']), dict)
    (third,) = await asyncio.gather(refused, return_exceptions=True)
    assert (status_of(third), third.code) == (429, "queue_full")
    assert "bytes of requests are waiting already" in third.message
    assert await bodies.read(request([b'{"b": 1}']), dict) == {"b": 1}, "a small one has room"
    ended = await asyncio.gather(*halves, return_exceptions=True)
    assert [status_of(each) for each in ended] == [408, 408]
    assert bodies.n_held == 0
    bodies.close()


def test_all_bodies_together_have_a_bound():
    asyncio.run(together())


ENDS = {
    "whole": ([b'{"a": 1}'], 200),
    "no JSON": ([b"nope"], 400),
    "refused": ([b'{"b": 1}'], 400),
    "too large": ([b"x" * 400, b"x" * 400], 413),
    "never ends": ([b'{"a": 1', None], 408),
    "fails": ([b'{"c": 1}'], 500),
}


async def ended(chunks):
    bodies = Bodies(600, 1000, Patience(body=0.1))
    under_way = []

    def make(given):
        under_way.append(1)
        assert len(under_way) == 1, "one at a time"
        time.sleep(0.002)
        under_way.pop()
        if "b" in given:
            raise ApiError(400, "refused")
        if "c" in given:
            raise ZeroDivisionError
        return given

    reads = [bodies.read(request(chunks), make) for _ in range(2 if len(chunks) > 1 else 20)]
    done = await asyncio.gather(*reads, return_exceptions=True)
    assert bodies.n_held == 0
    bodies.close()
    return {500 if isinstance(each, ZeroDivisionError) else status_of(each) for each in done}


@pytest.mark.parametrize("end", ENDS)
def test_however_a_body_ends_its_bytes_are_given_back_and_one_is_read_at_a_time(end):
    chunks, status = ENDS[end]
    assert asyncio.run(ended(chunks)) == {status}
