"""Which requests go into which pass: order, shares, ends. A fake batch records what it is fed."""

import math
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from pyggml.errors import DataError
from pyggml.generation import Finish
from pyggml.generation.passes import MOST_TOKENS
from pyggml.generation.serving import (
    Failure,
    Full,
    Request,
    RequestExpired,
    Scheduler,
    Worker,
    WorkerClosed,
)
from pyggml.generation.serving.chunks import SHORT, SLOWDOWN, UNSEEN, Chunks

import chats


class FakeSlot:
    def __init__(self, batch):
        self.batch, self.tokens = batch, []

    @property
    def n_past(self):
        return len(self.tokens)

    def close(self):
        self.batch.open_slots.remove(self)


class FakeModel:
    batches = True


class FakeBatch:
    """Slots that copy nothing but what `known` holds; logits that make token 70 the likeliest."""

    model = SimpleNamespace(batches=False)  # nothing is guessed

    def __init__(self, n_slots, deterministic=False):
        self.deterministic, self.n_ctx = deterministic, 1 << 20
        self.n_slots, self.open_slots, self.fed, self.known = n_slots, [], [], 0

    def is_long(self, n_tokens):
        return False

    def most_tokens(self):
        return MOST_TOKENS

    @property
    def n_free(self):
        return self.n_slots - len(self.open_slots)

    def open(self, prompt, model, owner=None):
        slot = FakeSlot(self)
        slot.tokens = list(prompt[: self.known])
        self.open_slots.append(slot)
        return slot

    def feed(self, pieces, every=()):
        self.fed.append({slot: len(ids) for slot, ids in pieces.items()})
        for slot, ids in pieces.items():
            slot.tokens += list(ids)
        logits = np.zeros(300, np.float32)
        logits[70] = 1
        return dict.fromkeys(pieces, logits)


@pytest.fixture
def batch():
    return FakeBatch(2)


MODEL = FakeModel()


def request(n_prompt, n_tokens=3, first=10, **given):
    """A request whose events gather in `told`. Prompts of different `first` share no prefix."""
    from pyggml.generation import Completion, Sampling

    told = []
    prompt = np.full(n_prompt, first, np.int32)
    completion = Completion(chats.vocabulary(), Sampling(temperature=0), prompt, n_tokens)
    made = Request(prompt=prompt, completion=completion, model=MODEL, tell=told.append, **given)
    return made, told


def run(scheduler):
    while scheduler.step():
        pass


@pytest.mark.quick
def test_requests_begin_in_the_order_in_which_they_came(batch):
    scheduler, order = Scheduler(batch), []
    for i in range(5):
        made, _ = request(4, first=10 + i)
        made.tell = lambda piece, i=i: order.append(i) if piece.finish else None
        scheduler.submit(made)
    scheduler.step()
    assert (scheduler.n_active, scheduler.n_waiting) == (2, 3)
    run(scheduler)
    assert order == [0, 1, 2, 3, 4] and not batch.open_slots
    assert max(len(fed) for fed in batch.fed) == 2


def test_a_long_prompt_stops_nobody_who_writes(batch):
    scheduler = Scheduler(batch)
    writer, told = request(4, n_tokens=100)
    scheduler.submit(writer)
    scheduler.step()
    long, answer = request(SHORT + 5, first=11)
    scheduler.submit(long)
    n_steps = 0
    while not answer:
        scheduler.step()
        n_steps += 1
        assert len(told) == n_steps + 1, "a token in every pass"
    assert n_steps > 1 and sorted(batch.fed[1].values()) == [1, 15], (
        "the least until it is measured"
    )


def test_a_short_prompt_is_read_at_once(batch):
    scheduler = Scheduler(batch)
    scheduler.submit(request(4, n_tokens=100)[0])
    scheduler.step()
    short, answer = request(SHORT, first=11)
    scheduler.submit(short)
    scheduler.step()
    assert len(answer) == 1 and sorted(batch.fed[1].values()) == [1, SHORT]


class Reading:
    """A prompt of a pass."""

    def __init__(self, n_left, n_new=None, reads=False):
        self.n_left, self.n_new, self.reads = n_left, n_new or n_left, reads


def test_a_chunk_is_as_long_as_streams_can_bear():
    """Passes of 4 answers take 40 ms, each token of a prompt 0.5 ms more: 64 70 ms, 128 above
    100."""
    chunks, long = Chunks(), Reading(10_000)
    sizes = []
    for _ in range(20):
        chunks.note(4, 4, 0.04)
        (n,) = chunks.shares([long], 4, 512).values()
        sizes.append(n + 4)
        chunks.note(4, n + 4, 0.04 + n * 0.0005)
    assert sizes[:4] == [16, 16, 32, 32] and sizes[-1] == 64 and sizes == sorted(sizes)
    assert 0.04 + 60 * 0.0005 < SLOWDOWN * 0.04 < 0.04 + 124 * 0.0005
    for _ in range(20):  # another program takes half of the machine when prompts are read
        (n,) = chunks.shares([long], 4, 512).values()
        chunks.note(4, n + 4, 0.04 + n * 0.005)
    assert n + 4 == 16


@pytest.mark.parametrize(("room", "size"), [(512, 512), (2048, 1024)])
def test_where_passes_are_short_a_chunk_is_as_long_as_nobody_sees(room, size):
    chunks, long = Chunks(), Reading(10_000)
    for _ in range(20):
        chunks.note(4, 4, 0.001)
        (n,) = chunks.shares([long], 4, room).values()
        chunks.note(4, n + 4, 0.001 + n * 1e-5)
    assert n + 4 == size and 0.001 + 1020 * 1e-5 < UNSEEN < 0.001 + 2044 * 1e-5


def test_those_who_end_soonest_share_with_the_first_that_came():
    chunks, long, short, shorter = Chunks(), Reading(9000), Reading(300), Reading(100)
    assert chunks.shares([long, short, shorter], 0, 512) == {long: 256, shorter: 100, short: 156}
    assert chunks.shares([shorter, short], 0, 512) == {shorter: 100, short: 300}
    told = [Reading(900, reads=True), Reading(900, reads=True)]
    assert [*chunks.shares(told, 0, 512).values()] == [32, 32] and not chunks.shares([], 3, 512)


@pytest.mark.quick
def test_prompts_share_a_chunk(batch):
    """A short prompt behind a long one is read in the first pass."""
    scheduler = Scheduler(batch)
    (long, late), (short, soon) = request(5 * MOST_TOKENS), request(MOST_TOKENS // 4, first=11)
    scheduler.submit(long)
    scheduler.submit(short)
    scheduler.step()
    assert len(soon) == 1 and not late
    assert sum(batch.fed[0].values()) <= MOST_TOKENS


def test_alone_a_prompt_gets_whole_chunks(batch):
    scheduler = Scheduler(batch)
    scheduler.submit(request(MOST_TOKENS + 5, n_tokens=1)[0])
    run(scheduler)
    assert [sum(fed.values()) for fed in batch.fed] == [MOST_TOKENS, 5]


@pytest.mark.quick
def test_what_is_cached_is_not_fed(batch):
    batch.known = 30
    made, _ = request(50, n_tokens=1)
    scheduler = Scheduler(batch)
    scheduler.submit(made)
    run(scheduler)
    assert made.n_cached == 30 and [*batch.fed[0].values()] == [20]


def test_who_shares_a_prompt_that_is_being_read_waits_for_it(batch):
    scheduler = Scheduler(batch)
    for _ in range(2):
        scheduler.submit(request(2 * MOST_TOKENS)[0])
    scheduler.submit(request(8, first=11)[0])
    scheduler.step()
    assert (scheduler.n_active, scheduler.n_waiting) == (2, 1), "the third one has the other slot"


def test_a_cancelled_request_frees_its_slot_before_the_next_pass(batch):
    scheduler = Scheduler(batch)
    made = [request(4, n_tokens=50, first=10 + i) for i in range(4)]
    for one, _ in made:
        scheduler.submit(one)
    scheduler.step()
    scheduler.cancel(made[0][0])
    scheduler.cancel(made[2][0])
    scheduler.cancel(made[2][0])  # once more does no harm
    assert (scheduler.n_active, scheduler.n_waiting, batch.n_free) == (1, 1, 1)
    scheduler.step()
    assert len(made[3][1]) == 1 and len(made[0][1]) == 1 and not made[2][1]


@pytest.mark.quick
def test_time_ends_a_request_wherever_it_is(batch, monkeypatch):
    scheduler, soon = Scheduler(batch), time.monotonic() + 600
    made = [request(4, n_tokens=10**6, first=10 + i, deadline=soon) for i in range(3)]
    for one, _ in made:
        scheduler.submit(one)
    scheduler.step()
    monkeypatch.setattr(time, "monotonic", lambda: soon)
    assert not scheduler.step() and batch.n_free == 2
    assert all(isinstance(told[-1].error, RequestExpired) for _, told in made)
    assert [len(told) for _, told in made] == [2, 2, 1]


def test_logits_that_are_no_numbers_end_one_request_alone(batch):
    scheduler = Scheduler(batch)
    (bad, lost), (_, told) = request(4), (good := request(4, first=11))
    bad.completion.take = lambda logits: (_ for _ in ()).throw(DataError("no number"))
    scheduler.submit(bad)
    scheduler.submit(good[0])
    run(scheduler)
    assert [type(x) for x in lost] == [Failure] and told[-1].finish is Finish.LENGTH


# -- the thread ---------------------------------------------------------------------------------


@pytest.fixture
def worker(batch):
    worker = Worker(Scheduler(batch), most=3)
    yield worker
    worker.close()


def finished(made):
    """Submit-able request, and an event that is set at its end."""
    request_, told = made
    done = threading.Event()

    def tell(piece):
        told.append(piece)
        if isinstance(piece, Failure) or piece.finish:
            done.set()

    request_.tell = tell
    return request_, told, done


def test_the_worker_answers_from_its_thread(worker):
    made, told, done = finished(request(4))
    worker.start()
    worker.submit([made])
    assert done.wait(120) and len(told) == 3
    end = time.monotonic() + 120
    while worker.n_active + worker.n_waiting:
        assert time.monotonic() < end, "it still counts what has ended"
        time.sleep(0.01)


def test_all_of_a_request_or_none_of_it_is_taken(worker):
    four = [request(4, first=10 + i)[0] for i in range(4)]
    with pytest.raises(Full, match="0 requests are waiting"):
        worker.submit(four)
    worker.submit(four[:3])
    assert worker.n_waiting == 3
    with pytest.raises(Full):
        worker.submit(four[3:])


def test_a_fault_ends_requests_but_not_the_worker(worker, batch):
    feed, batch.feed = batch.feed, lambda *given: 1 / 0
    worker.start()
    made, told, done = finished(request(4))
    worker.submit([made])
    assert done.wait(120) and isinstance(told[0].error, ZeroDivisionError)
    batch.feed = feed
    made, told, done = finished(request(4))
    worker.submit([made])
    assert done.wait(120) and len(told) == 3


def test_the_end_of_the_worker_is_told(worker):
    made, told, done = finished(request(4, n_tokens=10**9, deadline=math.inf))
    worker.start()
    worker.submit([made])
    worker.close()
    assert done.is_set() and isinstance(told[-1].error, WorkerClosed)
    with pytest.raises(WorkerClosed):
        worker.submit([request(4)[0]])


def test_the_prompts_of_another_owner_are_not_waited_for(batch):
    """Time would tell one key what another asks."""
    for owner, n_active in ((1, 1), (2, 2)):
        scheduler = Scheduler(FakeBatch(2))
        scheduler.submit(request(2 * MOST_TOKENS, owner=1)[0])
        scheduler.step()
        scheduler.submit(request(2 * MOST_TOKENS, owner=owner)[0])
        scheduler.step()
        assert scheduler.n_active == n_active
