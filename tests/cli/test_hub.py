"""Models and data sets by their names on a hub: one on the loopback that speaks its protocol."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from extras import need
from hub_server import REVISION, serving
from processes import python

import pyggml as library
from pyggml import gguf, hub
from pyggml.errors import ConfigError
from pyggml.extras import how_to_install
from pyggml.lora import attach

ROWS = "".join(json.dumps({"text": f"the path to the other thing {i}"}) + "\n" for i in range(40))
DATA = {
    "README.md": b"# rows",
    "data/train.jsonl": ROWS.encode(),
    "data/test.jsonl": ROWS[:300].encode().rpartition(b"\n")[0] + b"\n",
}


@pytest.fixture(scope="session")
def parts(tiny, tmp_path_factory):
    """The tiny model in two files, as gguf-split writes it."""
    folder = tmp_path_factory.mktemp("parts")
    with gguf.open(tiny) as whole:
        names = [*whole.tensors]
        for i, half in enumerate((names[:5], names[5:])):
            metadata = dict(whole.metadata) if i == 0 else {}
            metadata |= {"split.no": np.uint16(i), "split.count": np.uint16(2)}
            metadata |= {"split.tensors.count": np.int32(len(names))}
            infos = [whole.tensors[n] for n in half]
            tensors = [(t.name, t.dtype, t.shape, whole.data(t.name)) for t in infos]
            gguf.write(folder / f"tiny-F32-0000{i + 1}-of-00002.gguf", metadata, tensors)
    return [*sorted(folder.iterdir())]


@pytest.fixture(scope="session")
def adapter(tiny, tmp_path_factory):
    """An adapter that changes the tiny model's mind."""
    made = attach(library.load(tiny))
    made.parameters.data[:] = np.random.default_rng(0).normal(0, 0.2, made.parameters.data.size)
    path = tmp_path_factory.mktemp("adapter") / "adapter.gguf"
    made.save(path)
    return path


@pytest.fixture
def online(tiny, parts, monkeypatch, tmp_path):
    """A hub with models and data sets, which this process and its children ask."""
    need("huggingface_hub")
    model = tiny.read_bytes()
    names = {"tiny-Q8_0.gguf": model, "tiny-Q4_K_M.gguf": model, "mmproj-tiny-F16.gguf": b""}
    repositories = {
        ("model", "us/tiny-GGUF"): names | {f"sub/{p.name}": p.read_bytes() for p in parts},
        ("model", "us/one"): {"tiny.gguf": model},
        ("dataset", "us/rows"): DATA,
        ("dataset", "us/two"): {f"{c}/{f}": d for c in "ab" for f, d in DATA.items()},
        ("dataset", "us/shards"): {"train-00000-of-00002.jsonl": ROWS.encode()},
        ("dataset", "us/held-out"): {"test.jsonl": ROWS.encode()},
    }
    with serving(repositories) as (server, address):
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield server


def test_a_model_is_downloaded_once_and_then_read_from_the_cache(online, pyggml, tiny, tmp_path):
    ended = pyggml("inspect", "us/tiny-GGUF:q8_0", "--json")
    assert ended.code == 0, ended.err
    path = tmp_path / "cache/models--us--tiny-GGUF/snapshots" / REVISION / "tiny-Q8_0.gguf"
    assert f"us/tiny-GGUF:q8_0: {path}" in ended.err and path.read_bytes() == tiny.read_bytes()
    gets = [r for r in online.requests if r[0] == "GET" and "resolve" in r[1]]
    again = pyggml("generate", "-m", "us/tiny-GGUF:Q8_0", "-p", "the ", "-n", 1, "--quiet")
    assert again.code == 0 and again.err == ""
    assert [r for r in online.requests if r[0] == "GET" and "resolve" in r[1]] == gets


@pytest.mark.filterwarnings("always:us/tiny-GGUF")
def test_offline_the_cache_serves_and_says_so(online, pyggml, monkeypatch):
    assert pyggml("inspect", "us/tiny-GGUF:Q8_0").code == 0
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    ended = pyggml("inspect", "us/tiny-GGUF:Q8_0")
    assert ended.code == 0 and "does not answer" in ended.err and "as it is cached" in ended.err
    for word in ("us/tiny-GGUF:Q4_K_M", "us/one"):
        refused = pyggml("inspect", word)
        assert refused.code == 2 and refused.err.rpartition("pyggml: ")[2].count("\n") == 1
    assert "cannot be fetched, nor is it cached: http://127.0.0.1:9 does not" in refused.err


@pytest.mark.filterwarnings("always:us/tiny-GGUF")
def test_a_model_in_parts_is_fetched_whole(online, pyggml, tiny, monkeypatch):
    ended = pyggml("inspect", "us/tiny-GGUF:F32", "--json")
    assert ended.code == 0, ended.err
    n = json.loads(pyggml("inspect", tiny, "--json").out)["tensors"]
    assert json.loads(ended.out)["tensors"] == n
    second = next(p for p in Path(os.environ["HF_HUB_CACHE"]).rglob("*-00002-of-00002.gguf"))
    second.unlink()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    refused = pyggml("inspect", "us/tiny-GGUF:F32")
    assert refused.code == 2 and "of 2 parts there are 1, wanted all" in refused.err


def test_without_a_type_it_is_the_only_file_or_the_usual_one(online):
    assert hub.model_path("us/one").name == "tiny.gguf"
    assert hub.model_path("us/tiny-GGUF").name == "tiny-Q4_K_M.gguf"
    assert hub.model_path("us/tiny-GGUF@main:tiny-Q8_0.gguf").name == "tiny-Q8_0.gguf"


def test_a_download_that_broke_off_goes_on_where_it_was(online, tiny, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)  # not 10 MB
    online.breaks_after = 5000
    try:
        path = hub.model_path("us/one")
    except ConfigError as error:  # of a client that does not try again by itself
        assert "the same command goes on from there" in str(error)
        path = hub.model_path("us/one")
    assert path.read_bytes() == tiny.read_bytes()
    ranges = [r for r in online.requests if r[0] == "GET" and r[2] and r[2] != "bytes=0-0"]
    assert ranges[-1][2].startswith("bytes=5000-"), ranges


REFUSED = {
    "us/none:Q8_0": "is not known there; one that is private wants `hf auth login`",
    "us/tiny-GGUF:Q8_1": "has no Q8_1 file: did you mean 'Q8_0'?; wanted one of its files: sub/t",
    "us/tiny-GGUF@v9:Q8_0": "has no revision 'v9'",
    "hub:us/none": "is not known there",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_the_hub_lacks_is_one_sentence(online, pyggml, text, word):
    ended = pyggml("perplexity", "-m", word, "-f", text)
    assert ended.code == 2 and REFUSED[word] in ended.err and ended.err.count("\n") == 1


def test_a_gated_model_names_its_page(online, pyggml):
    online.gated.add("us/one")
    ended = pyggml("inspect", "us/one")
    assert ended.code == 2 and "accept its terms at http://127.0.0.1:" in ended.err
    assert "/us/one, then `hf auth login`" in ended.err


def test_a_path_that_is_not_there_stays_a_path(pyggml):
    ended = pyggml("inspect", "some/model.gguf")
    assert "some/model.gguf: cannot be opened: No such file" in ended.err
    assert not hub.is_model_name("./a/b:Q8_0") and not hub.is_model_name(str(Path(__file__)))


def test_without_the_package_the_extra_is_named(pyggml, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    ended = pyggml("inspect", "us/tiny-GGUF:Q8_0")
    assert ended.code == 2 and f"needs huggingface_hub: {how_to_install('hub')}" in ended.err


def test_data_of_the_hub_trains_by_its_training_split(online, pyggml, tmp_path):
    out = tmp_path / "adapter.gguf"
    run = ("--ctx", 64, "--max-steps", 2, "--lora-rank", 2, "-o", out)
    ended = pyggml(
        "finetune", "-m", "us/one", "-f", "hub:us/rows:2", "--val-file", "hub:us/rows", *run
    )
    assert ended.code == 0, ended.err
    assert "train.jsonl (JSON Lines)" in ended.out and "test.jsonl (JSON Lines)" in ended.out
    assert "read 2 times an epoch" in ended.out
    again = pyggml("finetune", "--config", tmp_path / "adapter.yaml", "--max-steps", 1)
    assert again.code == 0, again.err
    yaml = tmp_path / "hub.yaml"
    yaml.write_text("model: us/one\nfile: hub:us/rows/data/test.jsonl\n")
    named = pyggml("finetune", "--config", yaml, "--preview", 1, "--ctx", 64)
    assert named.code == 0 and "test.jsonl" in named.err, named.err


def test_data_to_evaluate_with_is_what_the_hub_has_held_out(online, pyggml):
    ended = pyggml("eval", "-m", "us/one", "-f", "hub:us/rows", "--ctx", 32)
    assert ended.code == 0 and "hub:us/rows: " in ended.err and "test.jsonl" in ended.err


SETS = {
    "hub:us/two": "has several configurations, wanted one of hub:us/two/a, hub:us/two/b",
    "hub:us/shards": "of 2 parts there are 1, wanted all",
    "hub:us/held-out": "has no split train, but test: name a file or folder of it, such as hub:us",
    "hub:us/rows/none": "has no data there; its files of data are data/test.jsonl, data/train.j",
    "hub:us": "wanted hub:OWNER/NAME, or hub:OWNER/NAME/PATH",
}


def test_an_adapter_is_taken_by_its_name(online, pyggml, tiny, adapter, tmp_path):
    """With a weight or without, by every command that takes one, also to train it further."""
    online.repositories["model", "us/lora"] = {"lora-F16.gguf": adapter.read_bytes()}
    path = tmp_path / f"cache/models--us--lora/snapshots/{REVISION}/lora-F16.gguf"
    given = ("-m", tiny, "-p", "the ", "-n", 4, "--seed", 1)
    for word, here in (
        ("us/lora", adapter),
        ("us/lora:F16:0.5", f"{adapter}:0.5"),
        ("us/lora:0.25", f"{adapter}:0.25"),
    ):
        ended = pyggml("generate", *given, "--lora", word)
        assert ended.code == 0 and f"us/lora: {path}" in ended.err.replace(":F16:", ":"), ended.err
        assert ended.out == pyggml("generate", *given, "--lora", here).out
    merged = pyggml("merge", "-m", tiny, "--lora", "us/lora", "-o", tmp_path / "m.gguf")
    assert merged.code == 0, merged.err
    text = tmp_path / "a.txt"
    text.write_text("the path to the other thing " * 40)
    ended = pyggml(
        "finetune", "-m", tiny, "-f", text, "--dry-run", "--init", "us/lora", "--ctx", 16
    )
    assert ended.code == 0, ended.err
    refused = pyggml("generate", *given, "--lora", "us/nothing")
    assert refused.code == 2 and "us/nothing: is no file here, and as a model of" in refused.err


@pytest.mark.parametrize("word", SETS)
def test_data_that_is_not_one_set_is_refused(online, word):
    with pytest.raises(ConfigError) as caught:
        hub.data_paths(word)
    assert SETS[word] in str(caught.value)


def test_a_folder_or_pattern_of_a_data_set_is_named(online):
    assert [p.name for p in hub.data_paths("hub:us/two/a")] == ["train.jsonl"]
    assert len(hub.data_paths("hub:us/two/*/data/t*.jsonl")) == 4


def test_python_m_pyggml_is_the_command():
    ended = python("-m", "pyggml", "--version")
    assert ended.returncode == 0 and ended.stdout.startswith("pyggml ")
