"""Control vectors of a server: by its own scales, by a request's, and each request apart."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from tiny_models import NO_END

import pyggml
from pyggml.cli.commands.serve.controls import Controls
from pyggml.errors import ConfigError
from pyggml.generation import Sampling, complete
from pyggml.look.control import ControlVector

GREEDY = {"temperature": 0, "max_tokens": 12}
PROMPT = "the path to the other thing is long, and so is this prompt: the path to "


@pytest.fixture(scope="module")
def files(chatty, tmp_path_factory):
    """Name -> path of a vector, whose direction makes the tiny model say something else."""
    folder, paths = tmp_path_factory.mktemp("vectors"), {}
    n = pyggml.load(chatty).config.n_embd
    for seed, name in enumerate(("up", "down", "endless")):
        direction = np.random.default_rng(seed).normal(0, 4, n).astype(np.float32)
        if name == "endless":
            direction[:] = 3e38
        paths[name] = folder / f"{name}.gguf"
        ControlVector({1: direction}, "llama").save(paths[name])
    return paths


@pytest.fixture(scope="module")
def steered(serve, chatty, files):
    """A server that adds `up` to everything, and knows `down` and `endless`."""
    given = [(name, (path, 1.0 if name == "up" else 0.0)) for name, path in files.items()]
    with serve(controls=Controls.read(given, None, pyggml.load(chatty))) as s:
        yield s


def alone(chatty, files, scales, adapter=None, prompt=PROMPT):
    """The greedy text of a model with these vectors."""
    model = pyggml.load(chatty, adapter)
    for name, scale in scales.items():
        model = model.with_added(ControlVector.read(files[name]).addends(model, scale))
    how = Sampling(temperature=0, logit_bias=NO_END)
    ids = model.tokenizer.encode_prompt(prompt)
    return "".join(piece.text for piece in complete(model, ids, 12, how))


def test_requests_of_one_batch_stay_apart(steered, chatty, adapters, files):
    """With the server's scales, others, several, none; with adapters and without, all at once."""
    asked = [None, {}, {"down": 1.5}, {"up": -1, "down": 0.5}, {"up": 0}]
    cases = [*product(asked, (None, "red"))]

    def answer(case):
        scales, name = case
        fields = {} if scales is None else {"control_vectors": scales}
        return steered.said(PROMPT, model=name or "tiny", **fields, **GREEDY)

    with ThreadPoolExecutor(len(cases)) as pool:
        said = [*pool.map(answer, cases)]
    for (scales, name), text in zip(cases, said, strict=True):
        whole = {"up": 1} if scales is None else scales
        assert text == alone(chatty, files, whole, adapters.get(name)), (scales, name)
    assert len(set(said)) > 5, "the vectors change what is said"


def test_prompts_are_shared_by_equal_scales_alone(steered):
    def n_cached(scales):
        answer = steered.text(PROMPT, control_vectors=scales, **GREEDY)
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert n_cached({"down": 0.25}) == 0
    assert n_cached({"down": 0.26}) == 0
    assert n_cached({"down": 0.25, "up": 0}) > 8


def test_a_vector_that_makes_no_numbers_ends_its_own_request(steered, chatty, monkeypatch):
    """Beside another one, which goes on. What is added twice to one model is beyond float32."""
    voice, n = steered.service.voices["tiny"], pyggml.load(chatty).config.n_embd
    model = voice.model.with_added({"blk.1.out": np.full(n, 3e38, np.float32)})
    steered.service.voices.add("hot", lambda: replace(voice, name="hot", model=model))
    feed = steered.batch.feed
    monkeypatch.setattr(steered.batch, "feed", lambda *given: (time.sleep(0.02), feed(*given))[1])
    with steered.endless() as stream:
        lines = stream.iter_lines()
        next(lines)
        asked = {"model": "hot", "control_vectors": {"endless": 1}}
        failed = steered.text(PROMPT, **asked, **GREEDY)
        assert failed.status_code == 500 and "wanted a finite number" in failed.text
        after = [next(lines) for _ in range(40)]
        assert not [line for line in after if '"error"' in line]
    steered.until_let_go()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"upp": 1}, "has 'upp', which is no control vector here: did you mean 'up'?"),
        ({"../v.gguf": 1}, "is no control vector here"),
        ({"up": "1"}, "has 'up' '1', wanted a number from -1000 to 1000"),
        ({"up": 1e300}, "wanted a number from -1000 to 1000"),
        ({"endless": 2}, "too large for float32"),
        ({"up": True}, "wanted a number"),
        ("up", "is 'up', wanted an object"),
    ],
)
def test_what_is_no_vector_is_refused(steered, value, said):
    answer = steered.text("a", control_vectors=value, **GREEDY)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert said in error["message"], error


def test_few_models_are_kept(chatty, files):
    model = pyggml.load(chatty)
    controls = Controls.read([("up", (files["up"], 1.0))], None, model)
    made = [controls.model(model, {"up": i / 100}) for i in range(1, 41)]
    assert len({id(m) for m in made}) == 40
    assert controls.model(model, {"up": 0.4}) is made[-1]
    assert controls.model(model, {"up": 0.01}) is not made[0], "the oldest have gone"
    assert controls.model(model, None) is controls.model(model, {"up": 1.0})
    assert controls.model(model, {}) is model


def test_names_are_given_once_and_files_fit(chatty, files):
    model = pyggml.load(chatty)
    twice = [("up", (files["up"], 1.0)), ("up", (files["down"], 1.0))]
    with pytest.raises(ConfigError, match="--control-vector up is given twice"):
        Controls.read(twice, None, model)
    with pytest.raises(ConfigError, match="scale is 9, too large for float32"):
        Controls.read([("endless", (files["endless"], 9.0))], None, model)
    with pytest.raises(ConfigError, match="no direction for blocks 3 to 4"):
        Controls.read(twice[:1], (3, 4), model)
