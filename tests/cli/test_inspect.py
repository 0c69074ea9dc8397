"""`pyggml inspect`: what it says is what the file holds, of any file, in any form."""

import json
import re
import struct
from html.parser import HTMLParser

import numpy as np
import pytest
import tiny_models
from extras import need

import pyggml as library
from pyggml import gguf
from pyggml.cli.commands.inspect.command import BATCH, CTX, RANK
from pyggml.cli.commands.inspect.facts import family
from pyggml.cli.commands.inspect.fold import ranges
from pyggml.cli.terminal.words import coloured_lines
from pyggml.graph.dtypes import F32
from pyggml.look import lens
from pyggml.look.control import ControlVector
from pyggml.lora import DataConfig, LoraConfig, TrainConfig, attach, loss_and_grads
from pyggml.models import ARCHITECTURES, small_metadata, tensors_of
from pyggml.requantize.imatrix import ImportanceMatrix, InputSums

SIZES = {"embedding_length": 256, "feed_forward_length": 256}
HOSTILE = "</title><script>alert(1)</script>\x1b[31m"


@pytest.fixture
def facts(pyggml):
    """The JSON of an inspection."""

    def call(*arguments):
        ended = pyggml("inspect", *arguments, "--json")
        assert ended.code == 0, ended.err
        return json.loads(ended.out)

    return call


@pytest.fixture
def adapter(tiny, tmp_path):
    """Of ranks 3 and 5, B not 0."""
    made = attach(library.load(tiny), LoraConfig(rank=3, alpha=5.0, rank_pattern={"ffn_*": 5}))
    rng = np.random.default_rng(1)
    for name, t in made.parameters.tensors.items():
        if name.endswith("lora_b"):
            library.graph.arrays.write(t, rng.normal(0, 0.1, t.shape).astype(np.float32))
    made.save(tmp_path / "adapter.gguf")
    return tmp_path / "adapter.gguf"


def section(out, title):
    """The lines of a section."""
    lines = out.splitlines()
    start = lines.index(title) + 1
    end = next((i for i in range(start, len(lines)) if not lines[i]), len(lines))
    return lines[start:end]


# -- models -------------------------------------------------------------------------------------


def test_a_model_at_a_glance(pyggml, tiny):
    ended = pyggml("inspect", tiny)
    assert ended.code == 0 and max(map(len, ended.out.splitlines())) <= 80
    assert "holds      a model: 21 tensors, 35.1 k numbers" in ended.out
    assert "shape      layers 2, width 32" in section(ended.out, "architecture")
    (f32,) = (x for x in section(ended.out, "types") if x.startswith("F32"))
    assert f32.split() == ["F32", "21", "35.1", "k", "140", "kB", "100.0%"]
    (down,) = (x for x in section(ended.out, "tensors") if "ffn_down" in x)
    assert re.fullmatch(r"blk\.0\.\.1\.ffn_down\.weight +F32 +32 × 64 +16\.4 kB", down)
    assert any(re.search(r"\[258\] '!', ", line) for line in section(ended.out, "metadata"))
    assert pyggml("inspect", "-m", tiny).out == ended.out


def test_its_numbers_are_those_of_the_library(facts, tiny):
    found, model = facts(tiny, "--rank", 3), library.load(tiny)
    assert found["file"]["kind"] == "model" and found["file"]["n_bytes"] == tiny.stat().st_size
    assert found["model"]["hyperparameters"]["block_count"] == model.config.n_layer
    assert found["model"]["n_vocab"] == model.config.n_vocab
    n = sum(w.n_elements for w in model.parts.weights.values())
    assert found["model"]["n_parameters"] == n
    groups = found["tensors"]["groups"]
    assert sum(g["n"] for g in groups) == found["tensors"]["n"] == len(model.file.tensors)
    assert sum(g["n_bytes"] for g in groups) == sum(t["n_bytes"] for t in found["tensors"]["types"])
    lora, made = found["lora"], attach(model, LoraConfig(rank=3)).parameters
    assert lora["n_parameters"] == made.n_trained and lora["n_bytes"] == 4 * made.n_trained
    targets = {n.split(".")[2] for n in made.tensors if n.startswith("blk.")}
    assert {m["module"] for m in lora["modules"] if m["default"]} == targets
    tokenizer = found["tokenizer"]
    assert tokenizer["n_tokens"] == model.tokenizer.n_vocab
    assert found["metadata"]["tokenizer.ggml.tokens"]["n"] == 258
    assert len(found["metadata"]["tokenizer.ggml.tokens"]["first"]) == 8


def test_exceptions_are_rows_of_their_own(pyggml, tmp_path):
    a, b = np.zeros((2, 32), np.float32), np.zeros((3, 32), np.float32)
    tensors = [(f"blk.{i}.x.weight", F32, t.shape, t) for i, t in enumerate([a, b, a, a, b, a])]
    gguf.write(tmp_path / "a.gguf", {}, [*tensors, ("x.weight", F32, a.shape, a)])
    lines = section(pyggml("inspect", tmp_path / "a.gguf").out, "tensors")
    assert [line.split("  F32")[0].rstrip() for line in lines[2:]] == [
        "blk.0..5.x.weight",
        "  but 1, 4",
        "x.weight",
    ]
    assert ranges([]) == "" and ranges([7, 1, 0, 3]) == "0..1, 3, 7"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_has_a_glance(facts, tmp_path, architecture):
    """Every module that LoRA can target has its costs, and the defaults are attach's."""
    specs = tensors_of(small_metadata(ARCHITECTURES[architecture], SIZES), 64)
    every = {name: spec.shape for name, spec in specs.items()}
    tiny_models.write(tmp_path / "m.gguf", architecture, SIZES, tensors=every, n_vocab=64)
    found, made = facts(tmp_path / "m.gguf", "--rank", 2), library.load(tmp_path / "m.gguf")
    lora = found["lora"]
    assert lora["n_parameters"] == attach(made, LoraConfig(rank=2)).parameters.n_trained
    linear = [n for n, s in specs.items() if s.linear and n.startswith("blk.")]
    inside = [m for m in lora["modules"] if m["blocks"]]
    assert sum(m["n"] for m in inside) == len(linear)
    assert sum(g["n"] for g in found["tensors"]["groups"]) == len(specs)
    hyperparameters = found["model"]["hyperparameters"]
    assert hyperparameters["block_count"] == made.config.n_layer


def test_an_architecture_that_cannot_be_built_gets_its_glance(pyggml, facts, model_with):
    path = model_with(general__architecture="gptzilla", gptzilla__block_count=2)
    ended = pyggml("inspect", path)
    assert ended.code == 0
    assert section(ended.out, "LoRA") == [
        "no         pyggml cannot build it: architecture 'gptzilla' is not known"
    ]
    assert "shape      layers 2" in section(ended.out, "architecture")
    assert facts(path)["lora"]["buildable"] is False
    refused = pyggml("inspect", path, "--plan")
    assert refused.code == 2 and "architecture 'gptzilla' is not known" in refused.err


def test_a_rank_that_cannot_be_had_is_told(facts, pyggml, tiny):
    assert "rank is 64, wanted at most 16" in facts(tiny, "--rank", 64)["lora"]["refused"]
    assert "wanted at most 16" in pyggml("inspect", tiny, "--rank", 64).out


def test_the_template_and_every_tensor_when_asked_for(pyggml, facts, model_with):
    text = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    path = model_with(tokenizer__chat_template=text)
    ended = pyggml("inspect", path)
    assert ended.row("family") == f"ChatML; {len(text)} characters"
    assert text not in ended.out.replace("\n", "")
    assert text in pyggml("inspect", path, "--template").out
    assert "text" not in facts(path)["chat_template"]
    assert facts(path, "--template")["chat_template"]["text"] == text
    lines = section(pyggml("inspect", path, "--tensors").out, "tensors")
    assert sum("ffn_down" in line for line in lines) == 2
    assert family("[INST] {{ x }} [/INST]") == "Mistral" and family("{{ x }}") is None


def test_defaults_are_those_of_training():
    assert (LoraConfig.rank, DataConfig.ctx, TrainConfig.batch) == (RANK, CTX, BATCH)


# -- other files --------------------------------------------------------------------------------


def test_an_adapter(pyggml, facts, adapter):
    found = facts(adapter)["adapter"]
    assert found["alpha"] == pytest.approx(5.0) and found["architecture"] == "llama"
    assert found["modules"]["attn_q"] == [3] and found["modules"]["ffn_up"] == [5]
    ended = pyggml("inspect", adapter)
    assert "rank 5     ffn_gate, ffn_up, ffn_down" in section(ended.out, "file")
    assert "lora" not in facts(adapter)


def test_an_importance_matrix(pyggml, facts, tmp_path):
    sums = {"blk.0.a.weight": InputSums(np.ones((1, 8), np.float32), np.full(1, 3, np.float32))}
    ImportanceMatrix(sums, ("wiki\x1b.txt",), 5, 512).save(tmp_path / "i.gguf")
    found = facts(tmp_path / "i.gguf")["imatrix"]
    assert (found["n_matrices"], found["chunk_count"], found["chunk_size"]) == (1, 5, 512)
    rows = section(pyggml("inspect", tmp_path / "i.gguf").out, "file")
    assert rows[-2:] == ["from       5 chunks of 512 tokens", "text       wiki\\x1b.txt"]


def test_an_importance_matrix_of_the_older_kind(pyggml, facts, tmp_path):
    path, name = tmp_path / "imatrix.dat", b"blk.0.a.weight"
    entry = struct.pack(f"<i{len(name)}sii8f", len(name), name, 2, 8, *[1.0] * 8)
    path.write_bytes(struct.pack("<i", 1) + entry + struct.pack("<ii4s", 7, 4, b"wiki"))
    found = facts(path)["imatrix"]
    assert (found["n_matrices"], found["chunk_count"], found["datasets"]) == (1, 7, ["wiki"])
    ended = pyggml("inspect", path)
    assert ended.row("holds") == "an importance matrix" and ended.row("text") == "wiki"
    path.write_bytes(b"no matrix at all")
    refused = pyggml("inspect", path)
    assert refused.code == 2 and "is no importance matrix" in refused.err


def test_a_control_vector(pyggml, tmp_path):
    path = tmp_path / "v.gguf"
    ControlVector({1: np.ones(8, np.float32)}, "llama\x1b[31m").save(path)
    ended = pyggml("inspect", path)
    assert ended.row("holds").startswith("a control vector: 1 tensor")
    assert ended.row("for") == "llama\\x1b[31m models: --control-vector FILE:SCALE"


def test_a_vocabulary_alone(pyggml, tiny, tmp_path):
    with gguf.open(tiny) as file:
        gguf.write(tmp_path / "vocab.gguf", file.metadata, [])
    ended = pyggml("inspect", tmp_path / "vocab.gguf")
    assert ended.row("holds") == "a vocabulary"
    assert "258 tokens" in ended.row("kind") and "LoRA" not in ended.out


def test_a_model_in_several_files(pyggml, facts, tiny, tmp_path):
    with gguf.open(tiny) as file:
        tensors = [(n, t.dtype, t.shape, file.data(n)) for n, t in file.tensors.items()]
        for i, part in enumerate((tensors[:9], tensors[9:])):
            keys = dict(zip(gguf.SPLIT_KEYS, map(np.uint16, (2, i)), strict=False))
            keys[gguf.SPLIT_KEYS[2]] = np.int32(len(tensors))
            about = file.metadata if i == 0 else {}
            gguf.write(tmp_path / f"m-0000{i + 1}-of-00002.gguf", {**about, **keys}, part)
    path = tmp_path / "m-00002-of-00002.gguf"
    assert "in 2 files" in pyggml("inspect", path).out
    whole = facts(tiny)
    assert facts(path)["tensors"] == whole["tensors"] and len(facts(path)["file"]["paths"]) == 2


def test_of_texts_of_others_nothing_is_more_than_text(pyggml, tmp_path):
    path, page = tmp_path / "odd.gguf", tmp_path / "page.html"
    data = np.zeros((1, 4), np.float32)
    about = {"general.name": HOSTILE, "od\x1bd": "x" * 500, "tokenizer.ggml.model": HOSTILE}
    about |= {"general.architecture": HOSTILE, "tokenizer.chat_template": HOSTILE}
    gguf.write(path, about, [(HOSTILE, F32, data.shape, data)])
    ended = pyggml("inspect", path, "--template")
    assert ended.code == 0 and "\x1b" not in ended.out
    assert max(len(line) for line in ended.out.splitlines()) <= 80
    assert pyggml("inspect", path, "--html", page, "--template").code == 0
    text = page.read_text()
    assert "<script>" not in text and "\x1b" not in text


@pytest.mark.parametrize("value", [np.float32("nan"), np.float64("inf"), b"\xff\xfe", "", True])
def test_odd_values_are_shown_and_written(pyggml, facts, tmp_path, value):
    gguf.write(tmp_path / "odd.gguf", {"general.type": value, "x.block_count": value}, [])
    assert pyggml("inspect", tmp_path / "odd.gguf").code == 0
    assert "x.block_count" in facts(tmp_path / "odd.gguf")["metadata"]


def test_odd_hyperparameters_are_shown(pyggml, facts, model_with):
    changes = {"llama__attention__head_count": "many", "llama__feed_forward_length": -1.5}
    changes |= {"llama__rope__freq_base": np.float32("inf"), "tokenizer__ggml__bos_token_id": 10**9}
    path = model_with(**changes)
    assert pyggml("inspect", path).code == 0
    assert facts(path)["tokenizer"]["special"]["bos"] == {"id": 10**9, "text": None}
    assert "head_count is 'many'" in facts(path)["lora"]["why_not"]


# -- training -----------------------------------------------------------------------------------


def test_the_plan(pyggml, facts, tiny):
    ended = pyggml("inspect", tiny, "--plan", "--ctx", 16, "--batch", 2)
    assert ended.row("pass") == "2 windows of 16 tokens, LoRA of rank 8"
    assert re.match(r"[\d.]+ [kM]B while node [\d,]+, \S+, runs", ended.row("peak"))
    plan = facts(tiny, "--plan", "--ctx", 16, "--batch", 2)["plan"]
    assert sum(plan["nodes"].values()) == plan["n_nodes"]
    assert plan["nodes"]["linear_cross_entropy"] == 1
    assert sum(kind["n_bytes"] for kind in plan["at_peak"]) == plan["peak_bytes"]
    assert plan["peak_bytes"] <= plan["arena_bytes"]
    assert any(x.split() == ["rms_norm_mul", "17", "rms_norm,", "mul"] or "rms_norm, mul" in x
               for x in section(ended.out, "fused"))  # fmt: skip
    whole = ("--plan", "--ctx", 60, "--batch", 50)
    layers = facts(tiny, *whole, "--grad-checkpointing")["plan"]["arena_bytes"]
    assert layers < 0.95 * facts(tiny, *whole)["plan"]["arena_bytes"]


def test_a_rank_and_a_context_are_costed_with_memory(pyggml, facts, tiny):
    lora = facts(tiny, "--rank", 2, "--ctx", 16)["lora"]
    assert lora["plan"]["rank"] == 2 and lora["plan"]["ctx"] == 16
    assert "1 window of 16 tokens" in pyggml("inspect", tiny, "--rank", 2, "--ctx", 16).out
    assert "plan" not in facts(tiny, "--rank", 2)


def test_the_graph_is_folded(pyggml, tiny, tmp_path):
    need("igraph")
    lines = section(pyggml("inspect", tiny, "--graph", "--ctx", 16).out, "graph")
    assert [x.split()[0] for x in lines if "forward" in x] == ["start", "block", "block", "end"]
    page = tmp_path / "page.html"
    assert pyggml("inspect", tiny, "--graph", "--plan", "--ctx", 16, "--html", page).code == 0
    text = page.read_text()
    assert text.count("<svg") >= 8 and "the graph, block by block" in text


# -- texts --------------------------------------------------------------------------------------


def test_losses_of_a_text(pyggml, facts, tiny, text, adapter):
    model = library.load(tiny)
    ids = model.tokenizer.encode(text.read_text())[:20]
    found = facts(tiny, "--tokens", "-f", text, "--ctx", 20)["tokens"]
    losses = lens.token_losses(model, ids)
    assert found["n_tokens"] == 20 and found["loss"] == pytest.approx(losses.mean())
    assert [t["id"] for t in found["tokens"]] == list(ids)
    assert [t["loss"] for t in found["tokens"]] == [None, *map(pytest.approx, losses.tolist())]
    other = facts(tiny, "--tokens", "-f", text, "--ctx", 20, "--lora", adapter)["tokens"]
    assert abs(other["loss"] - found["loss"]) > 1e-6
    ended = pyggml("inspect", tiny, "--tokens", "-f", text, "--ctx", 20)
    assert ended.row("loss").startswith(f"{losses.mean():.4f} a token")
    assert max(map(len, ended.out.splitlines())) <= 80


def test_gradients_of_a_text(facts, pyggml, tiny, text, adapter):
    ids = library.load(tiny).tokenizer.encode(text.read_text())[:30]
    options = ("--gradients", "-f", text, "--ctx", 30, "--lora", adapter)
    found = facts(tiny, *options)["gradients"]
    _, grads = loss_and_grads(library.load(tiny, adapter), ids)
    for name, g in grads.items():
        layer, module, factor = name.rpartition(".weight.lora_")[0].rsplit(".", 1)[0], "", ""
        module, factor = name.split(".")[2], name[-1].upper()
        row = found["layers"].index(layer)
        column = found["columns"].index(f"{module} {factor}")
        assert found["norm"][row][column] == pytest.approx(np.linalg.norm(g), rel=1e-3)
    lines = section(pyggml("inspect", tiny, *options[:-2]).out, "gradients")
    assert any(line.startswith("blk.1 ") for line in lines) and " A" not in lines[2]
    assert "A's gradients are 0 while B is 0, as in a fresh adapter." in lines


def test_bars_stand_below_their_words():
    words = [("ab", 8), (" ", 0), ("c\n", 1), ("wide" * 30, 4), ("x", -1)]
    lines = [line.plain for line in coloured_lines(words, 40, has_colour=False)]
    assert lines[:2] == ["ab c", "██ ▁"] and all(len(line) <= 40 for line in lines[:-1])
    assert "".join(lines[2:-1:2]) == "wide" * 30 + "x"
    assert set("".join(lines[3:-1:2])) == {"▄", " "}
    (first, *_) = coloured_lines(words, 40, has_colour=True)
    assert first.plain == "ab c" and "color(203)" in str(first.spans[0].style)


# -- pages and refusals ------------------------------------------------------------------------


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))


def test_the_page_holds_everything_and_fetches_nothing(pyggml, tiny, text, tmp_path):
    page = tmp_path / "page.html"
    read = ("--tokens", "--gradients", "-f", text, "--ctx", 16)
    ended = pyggml("inspect", tiny, *read, "--html", page)
    assert ended.code == 0 and ended.out.startswith(f"{page}: ")
    tags = Page(page.read_text()).tags
    links = [a["href"] for tag, a in tags if tag == "a"]
    assert set(links) <= {f"#{a['id']}" for tag, a in tags if tag == "section"} and len(links) > 7
    assert not any({"src", "onload", "style"} & set(a) for _, a in tags)
    assert not any(tag in ("script", "link", "img", "iframe") for tag, _ in tags)
    policy = next(a["content"] for _, a in tags if "http-equiv" in a)
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy


@pytest.mark.parametrize(
    "options, message",
    [
        (("--tokens",), "--tokens wants a text: -f TEXT"),
        (("-f", "x"), "-f is for --tokens and --gradients"),
        (("-m", "x"), "FILE and -m name two files, wanted one"),
        (("--html", "a.html", "--json"), "--html and --json are two ways to show it, wanted one"),
        (("--plan", "--ctx", 65), "--ctx is 65, wanted at most the model's 64"),
        (("--tokens", "-f", "/no/such"), "/no/such: cannot be opened: No such file or directory"),
        (("--html", "/dev/null/page.html"), "/dev/null/page.html: cannot be written"),
    ],
)
def test_what_does_not_fit_is_one_sentence(pyggml, tiny, options, message):
    ended = pyggml("inspect", tiny, *options)
    assert ended.code == 2 and message in ended.err and ended.err.count("\n") == 1
    assert ended.out == ""


def test_a_text_of_one_token_has_no_loss(pyggml, tiny, tmp_path):
    (tmp_path / "t.txt").write_text("")
    ended = pyggml("inspect", tiny, "--tokens", "-f", tmp_path / "t.txt")
    assert ended.code == 2 and "wanted 2 or more" in ended.err
