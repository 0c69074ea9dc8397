"""Ranks that start each other: the bits of one process, the errors of all, and the death of one."""

import json
import os
import subprocess
import sys
from socket import socketpair
from threading import Event, Thread

import numpy as np
import pytest
import ranked_run
from separate_cpu import SeparateCPU

from pyggml.backends import Links
from pyggml.backends.cpu import CPU
from pyggml.errors import DeviceError, PyggmlError
from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.ranks.alone import RankLostError
from pyggml.lora.ranks.linked import links_to_ranks
from pyggml.lora.ranks.local import LocalRanks
from pyggml.lora.trainer.folder import newest
from pyggml.lora.trainer.gradient import StepGradient
from pyggml.runtime import Devices

N = 1003  # numbers of a gradient, which two and three ranks do not share evenly


@pytest.fixture
def groups():
    """n -> as many ranks of this process, for threads."""
    made = []

    def make(n):
        ends = [{} for _ in range(n)]
        for a in range(n):
            for b in range(a):
                ends[a][b], ends[b][a] = socketpair()
        made.extend(ranks := [LocalRanks(rank, sockets) for rank, sockets in enumerate(ends)])
        return ranks

    yield make
    for rank in made:
        rank.close()


def in_threads(act, ranks):
    """What act(rank) gives of each rank, or raises."""
    results = [None] * len(ranks)

    def run(rank):
        try:
            results[rank.rank] = act(rank)
        except PyggmlError as error:
            results[rank.rank] = error

    threads = [Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def gradients(n):
    rng = np.random.default_rng(n)
    scales = 10.0 ** rng.integers(-6, 6, n)
    return [(rng.normal(size=N) * scale).astype(np.float32) for scale in scales]


def in_order(parts):
    total = np.zeros(N, np.float32)
    for part in parts:
        total = total + part
    return total if len(parts) > 1 else parts[0]


# -- what goes through sockets --------------------------------------------------------------------


def test_local_ranks_exchange_flags_texts_rows_and_sums(groups):
    def act(rank):
        mine = rank.share(5)
        rows = np.arange(10.0).reshape(5, 2)[mine.start : mine.stop]
        large = np.full(1 << 20, rank.rank + 1, np.float32)  # more than a socket holds
        return (
            rank.any(rank.rank == 2),
            rank.any(False),
            rank.texts(f"ü{rank.rank}"),
            rank.join(rows, 5).tolist(),
            float(rank.add([large] * len(mine), 5, large.size).sum()),
            rank.add([large[:2]] * len(rank.share(1)), 1, 2).tolist(),
        )

    rows = np.arange(10.0).reshape(5, 2).tolist()
    for n, total in ((2, 8.0), (3, 11.0)):  # of shares 2, 3 and 1, 2, 2
        results = in_threads(act, groups(n))
        texts = [f"ü{rank}" for rank in range(n)]
        last = float(n)  # has the one batch
        wanted = (n == 3, False, texts, rows, total * (1 << 20), [last] * 2)
        assert results == [wanted] * n


def test_an_error_of_one_local_rank_is_that_of_all_and_the_end_of_one_is_told(groups):
    def act(rank):
        with rank.together():
            if rank.rank == 1:
                raise PyggmlError("the disk is full")

    assert [str(e) for e in in_threads(act, groups(3))] == ["rank 1: the disk is full"] * 3

    def wait_for_numbers(rank):
        with rank.telling():
            if rank.rank == 1:
                raise PyggmlError("the card is full")
            while True:
                rank.look()

    told = "rank 0: rank 1 has failed; rank 1: the card is full"
    assert [str(e) for e in in_threads(wait_for_numbers, groups(2))] == [told] * 2

    def leave(rank):
        if rank.rank == 0:
            return rank.close()
        with pytest.raises(RankLostError, match="rank 0 has ended"):
            rank.any(False)
        with pytest.raises(RankLostError, match="rank 0 has ended"):
            rank.look()
        return rank.is_first

    assert in_threads(leave, groups(3)) == [None, True, False]


def test_a_local_rank_that_does_not_come_is_waited_for_so_long(groups):
    first, _ = groups(2)
    first.wait_at_most(0.5)
    with pytest.raises(RankLostError) as error:
        first.any(False)
    assert error.value.faults == (("rank_timeout", "of 0.5 s has passed without rank 1: it hangs"),)


# -- from device to device ------------------------------------------------------------------------


class SocketLinks(Links):
    """Ways between devices of tests; what they move goes through sockets of its own."""

    def __init__(self, device, group, place):
        self.device, self.group, self.place = device, group, place

    def word(self):
        return "by sockets"

    def join(self, word, rank, size):
        assert (word, rank, size) == ("by sockets", self.group.rank, self.group.size)

    def exchange(self, sent, received):
        targets = [(r, np.empty(t.shape, np.float32)) for r, t in received]
        sources = [(r, CPU.read(self.device, t)) for r, t in sent]
        own = [source for r, source in sources if r == self.group.rank]
        for target in (target for r, target in targets if r == self.group.rank):
            target[:] = own.pop(0)
        others = [r for r in range(self.group.size) if r != self.group.rank]
        self.group._move(*({r: _views(r, each) for r in others} for each in (sources, targets)))
        for (_, t), (_, target) in zip(received, targets, strict=True):
            CPU.write(self.device, t, target)

    def wait(self, look):
        look()

    def cut(self):
        self.device = None


def _views(rank, arrays):
    return [memoryview(a.view(np.uint8)) for r, a in arrays if r == rank]


class Card(SeparateCPU):
    """A device with ways to others, or without them."""

    def __init__(self, group, place="", fault=None):
        super().__init__()
        self.group, self.place, self.fault = group, place, fault

    def links(self):
        if self.fault:
            raise DeviceError(self.fault)
        return SocketLinks(self, self.group, self.place) if self.place else None


def summed(rank, card, steps):
    """The sum of each step, whose gradients are these, as one rank has it on its card."""
    p, devices = Parameters({"a": (N,)}), Devices([card])
    (leaf,) = p.buffers["gradient"]
    found = []
    with devices.holding(leaf):
        gradient = StepGradient(p, devices, rank)
        for parts in steps:
            card.moved.clear()
            gradient.begin()
            for i in rank.share(len(parts)):
                gradient.next()
                CPU.write(card, devices.copy_of(leaf, card), np.resize(parts[i], leaf.shape))
            gradient.end(len(parts))
            moved = sum(card.moved.values())
            devices.gather(leaf)
            found.append(p.gradient[:N].copy())
    return found, moved


def test_cards_that_are_not_all_joined_are_waited_for_so_long(groups):
    """As where a rank hangs, or has ended, within the library that joins them."""

    class NeverJoined(SocketLinks):
        def join(self, word, rank, size):
            Event().wait(30)

    ways = groups(2)
    first, second = (Devices([Card(way, f"card {way.rank}")]) for way in ways)
    for devices in (first, second):
        card = devices.backends[0]
        card.links = lambda card=card: NeverJoined(card, card.group, card.place)

    def hang(rank):
        rank.wait_at_most(0.3 if rank.rank == 0 else 30)
        with pytest.raises(RankLostError) as error:
            links_to_ranks((first, second)[rank.rank], rank)
        rank.close()
        return str(error.value)

    late, left = in_threads(hang, groups(2))
    assert late.endswith("of 0.3 s has passed and not all cards are joined: a rank hangs")
    assert left == "rank 0 has ended, and was not expected to"


@pytest.mark.parametrize("n", [2, 3])
def test_gradients_of_cards_add_up_in_the_order_of_passes_without_the_host(groups, n):
    steps = [gradients(k) for k in (5, n, 5, 1)]
    ways = groups(n)
    cards = [Card(way, f"card {i}") for i, way in enumerate(ways)]
    for found, moved in in_threads(lambda r: summed(r, cards[r.rank], steps), groups(n)):
        for sum_, parts in zip(found, steps, strict=True):
            assert sum_.tobytes() == in_order(parts).tobytes()
        assert moved == 0


@pytest.mark.parametrize(
    ("places", "faults", "why"),
    [
        ("aa", (None, None), "2 ranks share a card"),
        ("ab", (None, "NCCL is missing"), "rank 1: NCCL is missing"),
        (("a", ""), (None, None), "rank 1: it has no card"),
        (("", ""), (None, None), None),
    ],
)
def test_without_ways_between_all_cards_the_host_adds_and_it_is_said(groups, places, faults, why):
    steps, ways = [gradients(3)], groups(2)
    cards = [Card(*each) for each in zip(ways, places, faults, strict=True)]

    def act(r):
        return summed(r, cards[r.rank], steps)[0][0].tobytes()

    if why is None:
        results = in_threads(act, groups(2))
    else:
        with pytest.warns(RuntimeWarning, match=f"gradients go through the host: {why}"):
            results = in_threads(act, groups(2))
    assert results == [in_order(steps[0]).tobytes()] * 2


# -- processes ------------------------------------------------------------------------------------


def started(n, *runs):
    """What each run of n ranks ended with, of each rank that was there at the end; and its end."""
    words = [sys.executable, "-P", ranked_run.__file__, json.dumps(runs), str(n)]
    env = {**os.environ, "NUMBA_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=env)
    return [json.loads(line) for line in done.stdout.splitlines()], done


def test_started_ranks_make_the_run_of_one_process_and_share_errors(tiny):
    run = {"model": str(tiny)}
    runs = {"batch": 2, "keep_best": True, "val_every": 2}, {"train": "full", "optimiser": "sgd"}
    split = {"compute": "f32"}, {"split": [1, 1]}  # whose passes overlap in every rank
    ends, done = started(
        3,
        *({**run, **settings} for settings in runs),
        {**run, **split[0], **split[1]},
        {**run, "differ": [1, {"lr": 0.5}]},
        {**run, "fail": [2, 2]},
    )
    assert done.returncode == 0 and len(ends) == 3, done.stderr
    for i, settings in enumerate((*runs, split[0])):
        whole = ranked_run.trainer_of(tiny, **settings)
        whole.run(progress=False)
        wanted = json.loads(json.dumps(ranked_run.outcome(whole)))
        assert [end[i]["outcome"] for end in ends] == [wanted] * 3
    alike = "rank 1 and rank 0 must be alike: settings.lr is 0.5 there and 0.01 here"
    assert [end[2]["at_once"] for end in ends] == [2] * 3
    assert all(alike in end[3]["error"] for end in ends)
    assert all("rank 2: the disk is full" in end[4]["error"] for end in ends)


@pytest.mark.parametrize("dying", [0, 2])
def test_when_a_started_rank_is_killed_the_others_save_and_any_number_goes_on(
    tiny, tmp_path, dying
):
    folder = tmp_path / "points"
    settings = {"model": str(tiny), "checkpoint_dir": str(folder), "checkpoint_every": 0}
    ends, done = started(3, {**settings, "die": [dying, 4]})
    if dying:
        assert done.returncode == 0 and "rank 2 was killed (SIGKILL)" in ends[0][0]["error"]
    else:
        assert done.returncode < 0 and not ends
    saved = newest(folder)
    assert saved.name == "step-00000003.gguf" and f"step 3 is saved as {saved}" in done.stderr
    assert not list(folder.glob(".*partial"))
    whole, alone = ranked_run.trainer_of(tiny), ranked_run.trainer_of(tiny, resume=saved)
    whole.run(progress=False)
    alone.run(progress=False)
    assert ranked_run.outcome(alone)[:2] == ranked_run.outcome(whole)[:2]
