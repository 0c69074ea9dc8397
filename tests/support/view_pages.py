"""Pages of `pyggml view` in a real browser where there is one, and a run that they show."""

import threading
from contextlib import contextmanager

import uvicorn

from pyggml.cli.web.listening import listening, url_of

HOSTILE = "<img src=x onerror=alert(1)> the path"


def step(i, n_steps=8):
    return {"event": "step", "step": i, "n_steps": n_steps, "loss": 5 / i, "seconds": 0.5, "lr": 1}


def gradients(i):
    table = {"norm": [[0.5, 0.25]], "zeros": [[0, 1]], "weight": [[1, 1]], "update": [[0.1, 0.2]]}
    names = {"layers": ["blk.1"], "columns": ["attn_q A", "attn_q B"]}
    return {"event": "gradients", "step": i, **names, **table}


DATA = {
    **{
        "n_rows": 9,
        "n_held_out": 1,
        "n_read": 10,
        "lengths": [2, 3, 4, 5],
        "answers": [1, 1, 2, 3],
    },
    **{"scripts": [["Latin", 1.0]], "absent": ["with an empty answer"]},
    "findings": [{"what": "repeating an earlier one", "n": 2, "examples": [HOSTILE]}],
}
RUN = {"event": "run", "step": 0, "settings": {"lr": 0.1}, "about": [["model", HOSTILE]]}
ANSWERS = {"event": "answers", "step": 8, "prompt": "the ", "answers": [["before", HOSTILE]]}
ANSWERS |= {"rows": [["hard", 9.0, 8.5], ["easy", 3.0, 1.5]]}
ANSWERS |= {"languages": {"shares": [["en", 0.9]], "untold": 0.1, "findings": []}}


@contextmanager
def served(app):
    """The address of an application that runs on another thread."""
    with listening("127.0.0.1", 0) as accepting:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, args=([accepting],))
        thread.start()
        try:
            yield url_of(accepting) + "/"
        finally:
            server.should_exit = True
            thread.join()


def press(page, *keys):
    for key in keys:
        page.keyboard.press(key)


def until(page, holds):
    """Wait for what no selector tells: the page's policy refuses what playwright polls with."""
    for _ in range(300):
        if holds():
            return
        page.wait_for_timeout(50)
    raise AssertionError("it did not come to be in 15 s")
