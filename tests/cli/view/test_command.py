"""`pyggml view` as a process, and what it refuses before it starts."""

import os
import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from extras import need

from pyggml.extras import how_to_install


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to send")
def test_it_serves_this_machine_until_a_signal_comes(tiny, tmp_path):
    need("igraph")
    command = [sys.executable, "-P", "-m", "pyggml.cli", "view", tiny, "--run", tmp_path]
    running = subprocess.Popen(
        [*map(str, command), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    try:
        lines = [running.stdout.readline() for _ in range(3)]
        assert lines[0].split() == ["model", "tiny"]
        assert f"none yet in {tmp_path}" in lines[1]
        url = re.search(r"^view +(http://127\.0\.0\.1:\d+/)", lines[2])[1]
        assert "<title>tiny" in httpx.get(url, timeout=300).text
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=300)
    finally:
        running.kill()
    assert running.returncode == 130 and "stopping" in err and "Traceback" not in err
    assert not list(tmp_path.iterdir()), "nothing is written"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "wanted one MODEL, any GGUF file, or --run FOLDER"),
        (("TINY", "-m", "TINY"), "wanted one MODEL"),
        (("none.gguf",), "none.gguf: cannot be opened"),
        (("FOLDER",), "it is a folder, wanted a file"),
        (("TINY", "--run", "FOLDER/none"), "none: does not exist, wanted the folder of a run"),
        (("TINY", "--run", "TINY"), "tiny.gguf: is no folder, wanted the folder of a run"),
        (("TINY", "--port", "70000"), "70000"),
    ],
)
def test_refused(pyggml, tiny, tmp_path, arguments, message):
    need("igraph")
    places = {"TINY": str(tiny), "FOLDER": str(tmp_path)}
    given = [re.sub("TINY|FOLDER", lambda found: places[found[0]], a) for a in arguments]
    ended = pyggml("view", *given)
    assert ended.code == 2 and message in ended.err and ended.err.count("\n") == 1


def test_a_port_in_use(pyggml, tiny):
    need("igraph")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = pyggml("view", tiny, "--port", taken.getsockname()[1])
    assert ended.code == 2 and "in use" in ended.err


def test_without_its_packages_it_says_what_to_install(pyggml, tiny, monkeypatch):
    module = sys.modules["pyggml.cli.web.listening"]
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    ended = pyggml("view", tiny)
    assert ended.code == 2 and how_to_install("view") in ended.err
