"""Whose turn it is among several models. A fake scheduler ends a request in every pass."""

import time
from types import SimpleNamespace

import pytest

from pyggml.generation.serving import Failure, Relay, RequestExpired

MODELS = {name: SimpleNamespace(name=name, parts=object()) for name in "ABC"}


class FakeScheduler:
    slots, n_active, n_bytes = (), 0, 10

    def __init__(self, model, ended):
        self.model, self.ended, self.waiting = model, ended, []

    @property
    def n_waiting(self):
        return len(self.waiting)

    def submit(self, request):
        self.waiting.append(request)

    def cancel(self, request):
        self.waiting = [each for each in self.waiting if each is not request]

    def step(self):
        if self.waiting:
            self.ended.append(self.waiting.pop(0).name)
        return bool(self.waiting)

    def fail(self, error):
        while self.waiting:
            self.waiting.pop(0).tell(Failure(error))

    def release(self):
        self.ended.append(f"closed {self.model.name}")


class Turns:
    """A relay, what has ended in it, and what it says is needed."""

    def __init__(self, n_free=1000):
        self.ended, self.kept, self.told = [], [], []

        def open_(model):
            if model.name == "C":
                raise ValueError("cannot be opened")
            self.ended.append(f"opened {model.name}")
            return FakeScheduler(model, self.ended)

        def keep(models):
            self.kept.append("".join(model.name for model in models))

        self.relay = Relay(open_, keep, lambda: n_free)

    def send(self, *names, deadline=float("inf")):
        """Requests such as A1: the first letter is the model's."""
        for name in names:
            # Adapters make other models of the same parts.
            model = SimpleNamespace(**vars(MODELS[name[0]]))
            request = SimpleNamespace(
                name=name, model=model, deadline=deadline, tell=self.told.append
            )
            self.relay.submit(request)
        return request

    def run(self):
        while self.relay.step():
            pass
        return self.ended


@pytest.fixture
def turns():
    return Turns()


def test_the_model_that_was_asked_first_runs_with_all_that_wait_for_it(turns):
    turns.send("A1", "B1", "A2", "B2")
    assert turns.relay.n_waiting == 4
    assert turns.run() == ["opened A", "A1", "A2", "opened B", "B1", "B2"]


def test_who_waits_for_another_model_is_not_passed_by_those_who_come_later(turns):
    turns.send("A1", "A2")
    turns.relay.step()
    turns.send("A3", "B1", "A4")
    assert turns.run() == ["opened A", "A1", "A2", "A3", "opened B", "B1", "A4"]


@pytest.mark.parametrize(("n_free", "closed"), [(20, []), (19, ["closed A"]), (0, ["closed A"])])
def test_as_many_stay_open_as_fit_and_one_always(n_free, closed):
    turns = Turns(n_free)
    turns.send("A1", "B1")
    assert turns.run() == ["opened A", "A1", "opened B", *closed, "B1"]
    turns.send("B2")
    assert turns.run()[-1] == "B2" and turns.kept == ["B"] * len(closed)


def test_the_voice_of_a_model_that_is_waited_for_is_kept():
    turns = Turns(0)
    turns.send("A1", "B1")
    turns.relay.step()
    turns.send("A2")
    turns.relay.step()
    assert turns.kept == ["BA"]
    assert turns.run()[-3:] == ["opened A", "closed B", "A2"]


def test_a_model_that_cannot_be_opened_fails_its_own_requests(turns):
    turns.send("C1", "A1", "C2")
    assert turns.run() == ["opened A", "A1"]
    assert [str(told.error) for told in turns.told] == ["cannot be opened"] * 2


def test_requests_that_wait_are_cancelled_expire_and_fail(turns):
    turns.send("A1")
    turns.relay.cancel(turns.send("B1"))
    turns.send("B2", deadline=time.monotonic() - 1)
    assert turns.run() == ["opened A", "A1"]
    assert isinstance(turns.told.pop().error, RequestExpired)
    turns.send("A2", "B3")
    turns.relay.fail(ValueError("it"))
    assert len(turns.told) == 2 and not turns.relay.step()
