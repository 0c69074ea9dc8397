"""generate, perplexity, quantize, inspect, warmup: what they print is what the library says."""

import json
import re

import numpy as np
import pytest
from kinds import KINDS

import pyggml as library
from pyggml import gguf
from pyggml.cli.commands import warmup
from pyggml.cli.terminal.generation import sampling_of
from pyggml.cli.terminal.show import count, plural, printable, size, span
from pyggml.generation import Sampling
from pyggml.generation import generate as tokens_of
from pyggml.look.control import ControlVector
from pyggml.lora import LoraConfig, attach, merge, perplexity
from pyggml.lora.data import Document, Documents, pack
from pyggml.models import ARCHITECTURES
from pyggml.quants import dequantize


@pytest.fixture(scope="session")
def adapter(tiny, tmp_path_factory):
    """An adapter that changes the tiny model's mind."""
    model = library.load(tiny)
    made = attach(model)
    made.parameters.data[:] = np.random.default_rng(0).normal(0, 0.2, made.parameters.data.size)
    path = tmp_path_factory.mktemp("adapter") / "adapter.gguf"
    made.save(path)
    return path


# -- generate -----------------------------------------------------------------------------------


def test_generate_prints_the_prompt_and_what_the_library_makes_of_it(pyggml, tiny, adapter):
    model = library.load(tiny, adapter)
    how = Sampling(temperature=0.9, top_k=7, top_p=0.8, seed=3)
    stream = model.tokenizer.stream()
    made = [stream.feed(t) for t in tokens_of(model, model.tokenizer.encode("the "), 20, how)]
    wanted = printable("the " + "".join(made) + stream.flush())
    arguments = ("--temp", 0.9, "--top-k", 7, "--top-p", 0.8, "--seed", 3, "-n", 20)
    ended = pyggml("generate", "-m", tiny, "--lora", adapter, "-p", "the ", *arguments)
    assert (ended.code, ended.out, ended.err) == (0, wanted + "\n", "")
    plain = pyggml("generate", "-m", tiny, "-p", "the ", *arguments)
    assert plain.out.startswith("the ") and plain.out != ended.out


def test_commands_add_control_vectors_by_their_scales(pyggml, tiny, text, tmp_path):
    model, path = library.load(tiny), tmp_path / "v.gguf"
    rng = np.random.default_rng(0)
    blocks = range(1, model.config.n_layer)
    directions = {i: rng.standard_normal(model.config.n_embd, np.float32) for i in blocks}
    ControlVector(directions, "x").save(path)
    prompt, how = model.tokenizer.encode("the "), Sampling(temperature=0)
    with model.trace(add=ControlVector(directions).addends(model, 2.5)):
        made = model.tokenizer.decode([*tokens_of(model, prompt, 20, how)])
    arguments = ("generate", "-m", tiny, "-p", "the ", "-n", 20, "--temp", 0)
    halves = ("--control-vector", f"{path}:2", "--control-vector", f"{path}:0.5")
    for given in (("--control-vector", f"{path}:2.5"), halves):
        assert pyggml(*arguments, *given).out == printable("the " + made) + "\n"
    assert pyggml(*arguments).out != printable("the " + made) + "\n"
    measured = ("perplexity", "-m", tiny, "-f", text, "--ctx", 16)
    assert pyggml(*measured).out != pyggml(*measured, *halves).out
    ended = pyggml(*arguments, "--control-vector", tiny)
    assert ended.code == 2 and "wanted 'controlvector'" in ended.err


def test_generate_writes_each_token_when_it_is_there(pyggml, tiny, monkeypatch):
    heard = []
    for place in ("commands.generate", "terminal.generation"):
        monkeypatch.setattr(f"pyggml.cli.{place}.say", lambda text, end="\n": heard.append(text))
    pyggml("generate", "-m", tiny, "-p", "the ", "-n", 5, "--temp", 0)
    assert heard[0] == "the " and len(heard) == 1 + 5 + 1


def test_generate_says_when_the_context_is_full(pyggml, tiny):
    ended = pyggml("generate", "-m", tiny, "-p", "abc", "-n", 9, "--ctx", 5)
    assert ended.code == 0 and ended.err == "note: the context of 5 tokens is full\n"
    ended = pyggml("generate", "-m", tiny, "-p", "abc", "-n", 2, "--ctx", 5)
    assert ended.code == 0 and ended.err == ""


def test_an_error_behind_the_prompt_has_a_line_of_its_own(pyggml, tiny):
    ended = pyggml("generate", "-m", tiny, "-p", "the ", "--grammar", "root ::= x")
    assert ended.code == 2 and ended.out == "the \n" and "cannot be followed" in ended.err


def test_a_new_line_can_be_written_in_a_prompt(pyggml, tiny):
    ended = pyggml("generate", "-m", tiny, "-p", r"a\nb\\n\t\d", "-n", 1)
    assert ended.out.startswith("a\nb\\n\t\\d")


def test_a_token_that_commands_the_terminal_does_not_reach_it(pyggml, tiny):
    ended = pyggml("generate", "-m", tiny, "-p", "a\x1b[31mb\tc\n", "-n", 1)
    assert ended.out.startswith("a\\x1b[31mb\tc\n")


def test_generate_ends_before_a_stop_string(pyggml, tiny):
    whole = pyggml("generate", "-m", tiny, "-p", "the ", "-n", 40, "--seed", 1)
    letter = next(c for c in whole.out[8:] if c.isascii() and c.isalnum())
    found = pyggml("generate", "-m", tiny, "-p", "the ", "-n", 40, "--seed", 1, "--stop", letter)
    assert found.out == whole.out[: whole.out.index(letter, 4)] + "\n"


def test_texts_of_sampling_options_have_escapes_as_prompts_do():
    given = {"stop": (r"\n\n", r"a\\n"), "logit_bias": {r"\n": -1.0}, "temp": None}
    how = sampling_of(given)
    assert how.stop == ("\n\n", "a\\n") and how.logit_bias == {"\n": -1.0}


def test_generate_lists_probabilities_that_are_the_model_s(pyggml, tiny):
    """Whatever the bias: of 20 likeliest tokens, in order, the first has the most."""
    options = ("-n", 3, "--temp", 0, "--logprobs", 20, "--compute", "f32", "--logit-bias", "5=9")
    ended = pyggml("generate", "-m", tiny, "-p", "the ", *options)
    first, *lines = ended.out.splitlines()
    logits = library.load(tiny, compute="f32").logits(library.load(tiny).tokenizer.encode("the "))
    p = np.exp(logits[-1] - logits[-1].max())
    p = 100 * np.sort(p / p.sum())[::-1]
    shown = [float(x) for x in re.findall(r" ([\d.]+) %", lines[0])]
    assert first == "the " and len(lines) == 3
    np.testing.assert_allclose(shown, p[:20], atol=0.051)


# -- perplexity ---------------------------------------------------------------------------------


def test_perplexity_prints_every_running_value_and_the_last(pyggml, tiny, adapter, text):
    found = list(perplexity(library.load(tiny, adapter), text.read_text(), 32))
    ended = pyggml("perplexity", "-m", tiny, "--lora", adapter, "-f", text, "--ctx", 32)
    values = "".join(f"[{p.chunk}]{p.value:.4f}," for p in found)
    last = f"Final estimate: PPL = {found[-1].value:.4f} +/- {found[-1].error:.5f}"
    assert len(found) > 3 and (ended.code, ended.out) == (0, f"{values}\n{last}\n")
    assert re.fullmatch(rf"{len(found)} chunks of 32 tokens\nsome .*s left\n", ended.err)


# -- quantize -----------------------------------------------------------------------------------


def test_perplexity_of_json_lines_is_that_of_their_documents(pyggml, tiny, tmp_path):
    """Each ends in the end of text, as in training. That token, written in a row, is read as it
    unless asked not."""
    texts = ["the path to", "the other<|endoftext|>thing", "a path " * 6]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    tokenizer = library.load(tiny).tokenizer
    for mode, parse in (("auto", True), ("plain", False)):
        ids = [[*tokenizer.encode(t, parse_special=parse), tokenizer.eos_id] for t in texts]
        pieces = Documents.of([Document(i) for i in ids]).pieces(16)
        last = list(perplexity(library.load(tiny), pack(pieces, 16, whole=True)))[-1]
        options = ("--ctx", 16, "--special-tokens", mode)
        ended = pyggml("perplexity", "-m", tiny, "-f", path, *options)
        estimate = f"PPL = {last.value:.4f} +/- {last.error:.5f}\n"
        assert (ended.code, ended.out.split("estimate: ")[1]) == (0, estimate)


def test_perplexity_s_estimate_leaves_out_the_start(pyggml, tiny, text, monkeypatch):
    """A first chunk of 78 s, most of it compiling; then one of 2 s."""
    times = iter([0.0, 2.0])
    monkeypatch.setattr("pyggml.cli.terminal.progress.perf_counter", lambda: next(times))
    ended = pyggml("perplexity", "-m", tiny, "-f", text, "--ctx", 32)
    n = ended.out.count("[")
    assert ended.err == f"{n} chunks of 32 tokens\nsome {2 * (n - 2)} s left\n" and n > 5


def test_perplexity_reads_a_text_as_llama_cpp_does(pyggml, tiny, tmp_path):
    """Line ends stay as they are, but the last is dropped: 33 bytes and it make two contexts."""
    path = tmp_path / "text.txt"
    path.write_bytes(b"0123\r\n" * 5 + b"01\n")
    model = library.load(tiny)
    assert len(model.tokenizer.encode("0123\r\n" * 5 + "01")) == 32
    wanted = list(perplexity(model, "0123\r\n" * 5 + "01", 16))[-1]
    ended = pyggml("perplexity", "-m", tiny, "-f", path, "--ctx", 16)
    assert f"PPL = {wanted.value:.4f} +/- {wanted.error:.5f}" in ended.out
    refused = pyggml("perplexity", "-m", tiny, "-f", path, "--ctx", 17)
    assert "has 32 tokens, wanted at least 34" in refused.err


def test_quantize_of_a_quantised_model_wants_a_word(pyggml, tiny, tmp_path):
    small, out = tmp_path / "small.gguf", tmp_path / "out.gguf"
    assert pyggml("quantize", tiny, small, "Q4_0").code == 0
    ended = pyggml("quantize", small, out, "Q8_0")
    assert ended.code == 2 and "small.gguf: --allow-requantize is off, but " in ended.err
    assert not out.exists()
    assert pyggml("quantize", small, out, "Q8_0", "--allow-requantize").code == 0


def test_quantize_says_each_tensor_and_both_sizes(pyggml, tiny, tmp_path):
    out = tmp_path / "out.gguf"
    ended = pyggml("quantize", tiny, out, "q8_0", "--tensors")
    lines = ended.out.splitlines()
    with gguf.open(out) as file:
        types = {n: t.dtype.name for n, t in file.tensors.items()}
    assert ended.code == 0 and len(lines) == len(types) + 3
    (line,) = (x for x in lines if "blk.0.ffn_up.weight" in x)
    assert types["blk.0.ffn_up.weight"] == "Q8_0"
    assert "(64, 32)         F32 → Q8_0, 8.2 kB → 2.2 kB, error 0." in line
    assert lines[-3].startswith("rounding   an error of 0.")
    (line,) = (x for x in lines if "output_norm" in x)
    assert line.endswith("F32 kept") and types["output_norm.weight"] == "F32"
    assert lines[-2] == f"{tiny}: {size(tiny.stat().st_size)}"
    assert lines[-1].startswith(f"{out}: {size(out.stat().st_size)}, ")


def test_quantize_keeps_what_was_learned_of_a_base(pyggml, tiny, tmp_path):
    base, merged, out = (tmp_path / f"{name}.gguf" for name in ("base", "merged", "out"))
    assert pyggml("quantize", tiny, base, "Q4_0").code == 0
    changed = library.load(base)
    made = attach(changed, LoraConfig(rank=2, modules=("attn_q",)))
    made.parameters.data[:] = np.random.default_rng(0).normal(0, 0.01, made.parameters.data.size)
    merge(made.model, merged, "F32")
    shares = []
    for more in ((), ("--base", base)):
        ended = pyggml("quantize", merged, out, "Q4_0", *more)
        assert ended.code == 0 and ("update     " in ended.out) == bool(more)
        name = "blk.0.attn_q.weight"
        files = map(gguf.open, (base, merged, out))
        w0, w, q = (dequantize(f.data(name), f.tensors[name].dtype.name) for f in files)
        shares.append(((q - w0) * (w - w0)).sum() / np.square(w - w0).sum())
    assert shares[0] < 0.5 and shares[1] == pytest.approx(1, abs=0.1)
    other = tmp_path / "other.gguf"
    with gguf.open(base) as file:
        tensors = [(n, i.dtype, i.shape, file.data(n)) for n, i in file.tensors.items()]
        gguf.write(other, file.metadata, [t for t in tensors if t[0] != name])
    ended = pyggml("quantize", merged, out, "Q8_0", "--base", other)
    assert (
        ended.code == 2 and "is not the model before training: 'blk.0.attn_q.weight'" in ended.err
    )


# -- warmup -------------------------------------------------------------------------------------


def test_warmup_uses_every_architecture_and_type(pyggml, monkeypatch, tmp_path):
    """Of those that stand for all: models of the others are made alike."""
    used = []
    monkeypatch.setattr(warmup, "ARCHITECTURES", {name: ARCHITECTURES[name] for name in KINDS})
    monkeypatch.setattr(warmup, "_use", lambda path, threads: used.append(library.load(path)))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ended = pyggml("warmup")
    assert ended.code == 0 and "ready after" in ended.out
    assert {m.config.architecture for m in used} == set(KINDS)
    types = {t.dtype.name for m in used for t in m.parts.weights.values()}
    assert types >= {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K"}
    assert list(tmp_path.iterdir()) == []


def test_warmup_trains_and_generates(tiny, monkeypatch):
    heard = []
    monkeypatch.setattr(warmup.Trainer, "run", lambda self, **how: heard.append("trained"))
    logits = np.zeros(9, np.float32)
    monkeypatch.setattr(warmup.Session, "feed", lambda self, ids: heard.append(len(ids)) or logits)
    monkeypatch.setattr(warmup, "Sampler", lambda how: lambda z: heard.append(z is logits))
    warmup._use(tiny, threads=1)
    assert heard == ["trained", 16, 1, True]


# -- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "found, wanted",
    [
        (size(0), "0 B"),
        (size(999), "999 B"),
        (size(1000), "1.0 kB"),
        (size(99_949), "99.9 kB"),
        (size(123_456), "123 kB"),
        (size(999_600), "1.0 MB"),
        (size(18_860_992), "18.9 MB"),
        (size(7.2e12), "7.2 TB"),
        (count(999), "999"),
        (count(29_400_000), "29.4 M"),
        (count(1_720_574_976), "1.72 B"),
        (plural(1, "window"), "1 window"),
        (plural(1370, "window"), "1,370 windows"),
        (plural(2, "matrix", "matrices"), "2 matrices"),
        (span(0.04), "40 ms"),
        (span(4.25), "4.2 s"),
        (span(59.4), "59 s"),
        (span(59.6), "1 min 0 s"),
        (span(3725), "1 h 2 min"),
    ],
)
def test_numbers_as_a_reader_wants_them(found, wanted):
    assert found == wanted
