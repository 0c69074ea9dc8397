"""What the worker tells goes to the event loop, and the worker waits for nobody."""

import threading

from pyggml.cli.commands.serve.service import Mail


class Loop:
    """An event loop that runs a call in the thread that brings it."""

    def __init__(self, closed=False):
        self.closed, self.threads, self.ran = closed, [], threading.Event()

    def call_soon_threadsafe(self, call):
        self.threads.append(threading.current_thread().name)
        if self.closed:
            self.ran.set()
            raise RuntimeError("Event loop is closed")
        call()
        self.ran.set()


class Reader:
    """A flow."""

    first = None

    def __init__(self):
        self.told = []

    def take(self, i, told):
        self.told.append((i, told))


def test_another_thread_wakes_the_loop_once_a_pass():
    mail, loop, flow = Mail(), Loop(), Reader()
    mail.loop = loop
    mail.start()
    mail.post(flow, 0, "a")
    mail.post(flow, 1, "b")
    assert flow.told == []
    mail.deliver()
    assert loop.ran.wait(10)
    mail.deliver()  # nothing was posted
    mail.close()
    assert flow.told == [(0, "a"), (1, "b")]
    assert loop.threads == ["pyggml-mail"]


def test_a_closed_loop_takes_no_letters_and_the_thread_goes_on():
    mail, flow = Mail(), Reader()
    mail.loop = closed = Loop(closed=True)
    mail.start()
    mail.post(flow, 0, "a")
    mail.deliver()
    assert closed.ran.wait(10)
    mail.loop = loop = Loop()
    mail.deliver()
    assert loop.ran.wait(10)
    mail.close()
    assert flow.told == [(0, "a")]
