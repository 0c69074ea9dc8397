"""`pyggml serve` as a process: its first lines, its refusals, its end."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from tiny_models import NO_END

from pyggml.cli.commands.serve.command import is_loopback
from pyggml.cli.web.listening import listening
from pyggml.extras import how_to_install

START_SECONDS = 300  # on a busy machine, with kernels to compile


@pytest.fixture
def process(chatty, adapters):
    """Starts `pyggml serve` on a free port; the process and its URL."""
    started = []

    def start(*arguments, **environment):
        command = [
            sys.executable,
            "-P",
            "-m",
            "pyggml.cli",
            "serve",
            "-m",
            str(chatty),
            "--port",
            "0",
        ]
        running = subprocess.Popen(
            [*command, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        started.append(running)
        lines = []
        late = threading.Timer(START_SECONDS, running.kill)  # ends the lines, and so the wait
        late.start()
        for line in running.stdout:
            lines.append(line)
            if found := re.search(r"serving +(http://\S+)/v1", line):
                late.cancel()
                return running, found[1], lines
        late.cancel()
        raise AssertionError(running.stderr.read())

    yield start
    for running in started:
        running.kill()
        running.communicate(timeout=60)


def test_names_that_are_not_utf_8_or_steer_terminals(process, adapters, tmp_path):
    names = [b"m\xff.gguf", b"\x1b[31ma.gguf"]
    files = [Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)) for name in names]
    for file, adapter in zip(files, adapters.values(), strict=True):
        shutil.copy(adapter, file)
    running, url, lines = process("--lora", files[0], "--lora", files[1])
    ids = [each["id"] for each in httpx.get(f"{url}/v1/models").json()["data"][1:]]
    assert ids == ["m\\xff", "\x1b[31ma"] and "\\x1b[31ma" in "".join(lines)
    for name in [*ids, "m\ufffd", "\udcff"]:
        body = json.dumps({"model": name, "prompt": "the", "max_tokens": 1})
        status = httpx.post(f"{url}/v1/completions", content=body, timeout=60).status_code
        assert status == {"m\ufffd": 404, "\udcff": 400}.get(name, 200)
        assert httpx.get(f"{url}/v1/models/m%FF").status_code == 404
    running.terminate()
    said = "".join(lines) + "".join(running.communicate(timeout=60))
    assert "\x1b" not in said and "Traceback" not in said


def test_a_connection_stays_longer_than_clients_keep_theirs(process):
    """httpx lets one go after 5 seconds; one that is closed then may have a request under way."""
    _, url, _ = process()
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    for pause in (5.5, 0):
        connection.request("GET", "/health")
        assert connection.getresponse().read()
        time.sleep(pause)
    connection.close()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to send")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_after_the_answers_under_way(process, adapters, number):
    running, url, lines = process("--lora", f"red={adapters['red']}", "--parallel", 2)
    assert re.search(r"^cache .*: 2 answers at once, 512 tokens each", "".join(lines), re.M)
    wait_until_it_answers(url)
    body = {"prompt": "a", "model": "red", "stream": True, "max_tokens": 100, "temperature": 0}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as stream:
        parts = stream.iter_lines()
        next(parts)
        running.send_signal(number)
        assert [part for part in parts if part][-1] == "data: [DONE]"
    _, err = running.communicate(timeout=300)
    assert running.returncode == (143 if number == signal.SIGTERM else 130)
    assert "stopping when the answers under way are done" in err and "Traceback" not in err


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cuts no file that is mapped")
@pytest.mark.parametrize("n_left", [4096, -1], ids=["most is gone", "a byte is gone"])
def test_a_model_cut_short_ends_it_with_a_sentence_and_no_half_answer(
    process, chatty, tmp_path, n_left
):
    model = shutil.copy(chatty, tmp_path / "model.gguf")
    running, url, _ = process("-m", model)
    wait_until_it_answers(url)
    body = {"prompt": "a", "stream": True, "logit_bias": NO_END}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as stream:
        parts = stream.iter_lines()
        next(parts)
        os.truncate(model, n_left % model.stat().st_size)
        with suppress(httpx.RemoteProtocolError):
            assert "data: [DONE]" not in [*parts]
    _, err = running.communicate(timeout=300)
    assert running.returncode == 2 and err.count("\n") == 1, err
    assert re.search(r"model\.gguf: was (cut short|changed) while it was in use", err), err


def test_names_keys_and_the_page(process, adapters):
    folder = ("--adapters", adapters["red"].parent)
    lora = ("--lora", f"{adapters['red']}:0.5", "--lora", f"b={adapters['blue']}")
    _, url, _ = process(*lora, "--alias", "base", "--web", *folder, PYGGML_API_KEY="k1")
    wait_until_it_answers(url)
    assert httpx.get(f"{url}/v1/models").status_code == 401
    listed = httpx.get(f"{url}/v1/models", headers={"authorization": "Bearer k1"}).json()
    assert [model["id"] for model in listed["data"]] == ["base", "red", "b"]
    headers, body = {"authorization": "Bearer k1"}, {"name": "r", "file": adapters["red"].name}
    assert httpx.post(f"{url}/v1/adapters", json=body).status_code == 401
    added = httpx.post(f"{url}/v1/adapters", json=body, headers=headers, timeout=60)
    about = {"id": "r", "object": "adapter", "file": "red.gguf", "model": "base"}
    assert added.json() == about
    assert "<title>base" in httpx.get(f"{url}/").text


def test_an_answer_goes_on_beyond_its_context(process):
    """What it writes then depends on nothing but its own tokens, so that a prompt in the cache that
    has shifted is read anew."""
    _, url, _ = process("--ctx", 32, "--context-shift", "--keep", 4, "--parallel", 1)
    body = {"prompt": "the path ", "temperature": 0, "max_tokens": 90, "logit_bias": NO_END}
    one, same = (
        httpx.post(f"{url}/v1/completions", json=body, timeout=600).json() for _ in range(2)
    )
    assert one["usage"]["completion_tokens"] == 90
    assert one["choices"] == same["choices"]


def wait_until_it_answers(url):
    """The socket listens before the line is printed."""
    httpx.get(f"{url}/health", timeout=START_SECONDS)


REFUSED = [
    (("--host", "0.0.0.0"), "--host is 0.0.0.0, where others can connect: wanted --api-key"),
    (("--api-key", "a b"), "--api-key has a character that no header can hold"),
    (("--ctx", "9999"), "--ctx is 9999, wanted at most the model's 512"),
    (
        ("--context-shift", "--ctx", "64", "--keep", "63"),
        "--keep is 63, wanted 0 to 62 of 64 tokens",
    ),
    (("--cache-type", "q4_k"), "--cache-type is 'q4_k', wanted one of f16, f32, bf16, q8_0"),
    (("--parallel", "0"), "--parallel is 0, wanted 1 to 64"),
    (("--lora", "tiny=x.gguf"), "--lora tiny has the name of the model itself"),
    (("--lora", "a=missing.gguf"), "missing.gguf"),
    (("--chat-template", "nope"), "is no chat template"),
    (("--host", "192.0.2.1", "--api-key", "k"), "192.0.2.1:0: "),
    (("--adapters", "none"), "--adapters is none, wanted a folder"),
    (("--temp", "-1"), "--temp is -1.0, wanted 0 to 100"),
]


@pytest.mark.parametrize("arguments, message", REFUSED, ids=[m for _, m in REFUSED])
def test_refused(pyggml, chatty, arguments, message):
    with warnings.catch_warnings():
        ended = pyggml("serve", "-m", chatty, "--port", 0, *arguments)
    assert ended.code == 2 and message in ended.err and ended.err.count("\n") == 1


def test_a_port_in_use(pyggml, chatty, server):
    ended = pyggml("serve", "-m", chatty, "--port", server.url.rpartition(":")[2])
    assert ended.code == 2 and "in use" in ended.err


def test_small_writes_do_not_wait_for_each_other():
    with listening("127.0.0.1", 0) as accepting:
        client = socket.create_connection(accepting.getsockname())
        connection, _ = accepting.accept()
        with client, connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_without_its_packages_it_says_what_to_install(pyggml, chatty, monkeypatch):
    module = sys.modules["pyggml.cli.web.listening"]
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    ended = pyggml("serve", "-m", chatty)
    assert ended.code == 2 and how_to_install("serve") in ended.err


def test_what_the_loopback_is():
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.0.1", "example.org", "")))
