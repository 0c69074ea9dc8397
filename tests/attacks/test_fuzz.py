"""Every parser of foreign bytes stands a short round of fuzzing; the fuzzer notices failures."""

import random
import time

import pytest
from cases import cases
from extras import need

from attacks import fuzz
from attacks.mutate import mutate
from attacks.targets import TARGETS, Target
from pyggml.errors import PyggmlError

N_INPUTS = 150  # of each parser, besides its seeds and the corpus


@pytest.mark.parametrize("name", cases(TARGETS, ["gguf", "json-lines"]))
@pytest.mark.filterwarnings("ignore")  # numbers that are no numbers are read, and summed
def test_a_short_round(name, monkeypatch):
    if name == "parquet":
        need("pyarrow")
    monkeypatch.setattr(fuzz, "MOST_SECONDS", 60.0)  # a busy machine is no failure
    target = TARGETS[name]
    n = len(fuzz.seeds_of(target)) + N_INPUTS
    tally = fuzz.attack(target, n, seconds=1e9, seed=1)
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.n == n
    assert tally.n_read, "not one input was read"
    assert tally.n_refused or name in ("text", "records"), "not one input was refused"


def target(read):
    return Target("made-up", "a parser of this test", read, lambda: [b"seed"])


def failures(read):
    tally = fuzz.Tally()
    fuzz.check(target(read), b"input", tally)
    return list(tally.failures)


def test_a_refusal_is_no_failure_and_another_exception_is():
    def refuse(data):
        raise PyggmlError("no")

    assert not failures(refuse)
    (what,) = failures(lambda data: data[99])
    assert "IndexError" in what


def test_a_hang_is_a_failure(monkeypatch):
    seconds = iter((0.0, 1.5))
    monkeypatch.setattr(time, "process_time", lambda: next(seconds))
    assert failures(lambda data: None) == ["took 1.5 s"]


def test_memory_beyond_the_inputs_is_a_failure(monkeypatch):
    """The peak is told: that of this process may be far above it, by the tests before."""
    peaks = iter((1 << 30, (1 << 30) + (300 << 20)))
    monkeypatch.setattr(fuzz, "_peak_bytes", lambda: next(peaks))
    assert failures(lambda data: None) == ["took 300 MiB for 5 bytes"]


def test_a_seed_that_is_refused_is_no_seed():
    def refuse(data):
        raise PyggmlError("no")

    with pytest.raises(PyggmlError):
        fuzz.attack(target(refuse), 10, 1e9, 0)


def test_a_seed_makes_the_same_inputs_again():
    def some(seed):
        rng = random.Random(seed)
        return [mutate(rng, [b"abc", b"defgh"], (b"word",), 64) for _ in range(200)]

    assert some(3) == some(3) != some(4)
    assert max(map(len, some(3))) <= 64
