"""The official client of OpenAI, many clients at once, and clients that go away."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pyggml.cli.web.guard import Access

LONG = {"model": "tiny", "temperature": 0}


@pytest.fixture
def openai():
    return pytest.importorskip("openai", reason="the client of OpenAI (pip install openai)")


@pytest.fixture
def client(openai, server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_the_official_client(client, server):
    given = {"messages": [{"role": "user", "content": "hello"}], "seed": 3, "max_tokens": 12}
    whole = client.chat.completions.create(model="red", logprobs=True, top_logprobs=1, **given)
    said = whole.choices[0].message.content
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens == 12
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model="red", stream=True, stream_options=options, **given
    )
    parts = list(stream)
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == said
    assert parts[-1].usage.total_tokens == whole.usage.total_tokens
    text = client.completions.create(model="tiny", prompt="the ", max_tokens=3, temperature=0)
    assert text.choices[0].text == server.said("the ", max_tokens=3, temperature=0)
    assert [model.id for model in client.models.list()] == ["tiny", "red", "blue"]


def test_the_official_client_understands_refusals(client, openai):
    with pytest.raises(openai.NotFoundError) as found:
        client.completions.create(model="gpt-9", prompt="a")
    assert found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as found:
        client.completions.create(model="tiny", prompt="a" * 600)
    assert (found.value.code, found.value.param) == ("context_length_exceeded", "prompt")


def test_the_official_client_and_keys(openai, serve):
    with serve(access=Access(keys=("secret",))) as server:
        for key, raises in (("secret", False), ("other", True)):
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
            if raises:
                with pytest.raises(openai.AuthenticationError):
                    client.models.list()
            else:
                assert client.models.list().data[0].id == "tiny"


def test_twenty_clients_at_once(server):
    """Each gets the text that it would get alone, whichever others are served beside it."""
    wanted = [(f"{i} things ", ("tiny", "red", "blue")[i % 3]) for i in range(20)]

    def ask(one):
        prompt, model = one
        return server.said(prompt, model=model, max_tokens=8, temperature=0)

    with ThreadPoolExecutor(20) as pool:
        together = list(pool.map(ask, wanted))
    assert together == [ask(one) for one in wanted]


def test_a_stream_that_is_closed_frees_its_place(serve):
    with serve(parallel=1) as server:
        server.slow_down()
        with server.endless() as stream:
            lines = stream.iter_lines()  # an iterator that is let go closes the stream
            next(lines)
            # Requests are counted between passes: the first token may be here before.
            server.until(lambda: server.http.get("/health").json()["active"] == 1)
        server.until_let_go()


def test_a_client_that_goes_away_frees_its_place(serve):
    """Also one that waits for its whole answer, or for its turn."""
    with serve(parallel=1) as server:
        server.slow_down()
        address = server.url.removeprefix("http://")
        host, port = address.split(":")
        body = b'{"prompt":"a"}'
        fields = f"Host: {host}\r\nContent-Length: {len(body)}"
        head = f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n"
        gone = [socket.create_connection((host, int(port))) for _ in range(3)]
        for connection in gone:
            connection.sendall(head.encode() + body)
        worker = server.service.worker
        server.until(lambda: (worker.n_active, worker.n_waiting) == (1, 2))
        for connection in gone:
            connection.close()
        server.until_let_go()


def test_a_stream_ends_when_the_server_stops(serve):
    with serve(parallel=1) as server:
        server.slow_down()
        with server.endless() as stream:
            lines = stream.iter_lines()
            next(lines)
            closing = threading.Thread(target=server.service.worker.close)
            closing.start()
            rest = [line for line in lines if line]
            closing.join()
        assert '"code":"stopping"' in rest[-1]
        assert server.text().json()["error"]["code"] == "stopping"
