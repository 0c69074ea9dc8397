"""Whatever is wrong with the input: exit code 2, one sentence that names it, no output file."""

import os
from types import SimpleNamespace

import numpy as np
import pytest

from pyggml import gguf
from pyggml.graph.dtypes import DTYPES, F32


def refused(ended, *parts):
    """It ended with one line on stderr that has all of these in it."""
    assert ended.code == 2, ended
    assert ended.err.startswith("pyggml: ") and ended.err.count("\n") == 1, ended.err
    for part in parts:
        assert str(part) in ended.err


# -- models -------------------------------------------------------------------------------------


def damaged(path, how, source):
    raw = source.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "text": b"not a model at all, but text that is long enough for a header",
            "truncated": raw[: len(raw) * 2 // 3],
            "cut in the header": raw[:300],
            "a huge count": raw[:8] + (1 << 60).to_bytes(8, "little") + raw[16:],
        }[how]
    )
    return path


@pytest.mark.parametrize("which", ["text", "out"])
def test_a_link_to_itself(pyggml, tiny, text, tmp_path, which):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    files = {"text": text, "out": tmp_path / "out.gguf", which: loop}
    ended = pyggml("finetune", "-m", tiny, "-f", files["text"], "-o", files["out"])
    refused(ended, loop, "Too many levels of symbolic links")


DAMAGES = ["empty", "text", "truncated", "cut in the header", "a huge count"]
READERS = ["finetune", "generate", "perplexity", "eval", "inspect", "quantize"]


def call(pyggml, command, model, text, out):
    arguments = {
        "finetune": ("-m", model, "-f", text, "-o", out),
        "generate": ("-m", model, "-p", "a"),
        "perplexity": ("-m", model, "-f", text),
        "eval": ("-m", model, "-f", text),
        "inspect": ("-m", model),
        "quantize": (model, out, "Q8_0"),
    }[command]
    return pyggml(command, *arguments)


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_model(pyggml, tiny, text, tmp_path, command, how):
    model, out = damaged(tmp_path / "model.gguf", how, tiny), tmp_path / "out.gguf"
    refused(call(pyggml, command, model, text, out), model)
    assert not out.exists()


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("what", ["missing", "a folder", "a device"])
def test_no_model_at_all(pyggml, text, tmp_path, command, what):
    model = {"missing": tmp_path / "none.gguf", "a folder": tmp_path, "a device": "/dev/null"}[what]
    refused(call(pyggml, command, model, text, tmp_path / "out.gguf"), model)


MISFITS = {
    "architecture": ({"general__architecture": "gptzilla"}, "architecture 'gptzilla' is not known"),
    "no architecture": ({"general__architecture": None}, "architecture None is not known"),
    "pre-tokenizer": ({"tokenizer__ggml__pre": "nonesuch"}, "ggml.pre is 'nonesuch', wanted one"),
    "tokenizer": ({"tokenizer__ggml__model": "plamo2"}, "is 'plamo2', wanted one of gpt2, llama"),
    "heads": ({"llama__attention__head_count": 0}, "head_count is 0, wanted 1 to"),
    "blocks": ({"llama__block_count": 1000}, "block_count is 1000, but there are only"),
    "epsilon": ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "epsilon is nan"),
    "split": ({"split__count": 3, "split__no": 1}, "should end in -00002-of-00003.gguf"),
}


@pytest.mark.parametrize("changes, message", MISFITS.values(), ids=list(MISFITS))
def test_a_model_that_is_not_supported(finetune, model_with, changes, message):
    refused(finetune(model=model_with(**changes)), message)


@pytest.mark.parametrize("command", ["finetune", "generate", "quantize"])
def test_an_unknown_quantisation(pyggml, tiny, text, tmp_path, command):
    """Every tensor as it was, but one of a type that cannot be unpacked."""
    strange, tensors = DTYPES["I8"], []
    with gguf.open(tiny) as file:
        for name, info in file.tensors.items():
            tensors.append((name, info.dtype, info.shape, file.data(name)))
            if name == "blk.1.ffn_up.weight":
                tensors[-1] = (name, strange, info.shape, np.zeros(info.shape, np.int8))
        gguf.write(tmp_path / "model.gguf", file.metadata, tensors)
    ended = call(pyggml, command, tmp_path / "model.gguf", text, tmp_path / "out.gguf")
    refused(ended, "blk.1.ffn_up.weight", "has type I8", "known are F32")


@pytest.mark.parametrize("command", ["finetune", "generate"])
def test_a_vocabulary_of_another_model(pyggml, model_with, tiny, text, tmp_path, command):
    """Found before the training, not when its result first writes a token that is not there."""
    with gguf.open(tiny) as file:
        n = len(file.get("tokenizer.ggml.tokens"))
        tokens = [*file.get("tokenizer.ggml.tokens"), "more"]
    kinds = np.array([1] * (n - 1) + [3, 1], np.int32)
    path = model_with(tokenizer__ggml__tokens=tokens, tokenizer__ggml__token_type=kinds)
    ended = call(pyggml, command, path, text, tmp_path / "out.gguf")
    refused(ended, path, f"vocabulary has {n + 1} tokens, wanted {n}, the rows of token_embd")
    assert not (tmp_path / "out.gguf").exists()


def test_an_adapter_of_another_model(pyggml, tiny, tmp_path):
    adapter = tmp_path / "adapter.gguf"
    about = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": "llama"}
    pair = [("a.lora_a", F32, (2, 3), np.zeros((2, 3), np.float32))]
    pair += [("a.lora_b", F32, (5, 2), np.zeros((5, 2), np.float32))]
    gguf.write(adapter, about, pair)
    refused(pyggml("generate", "-m", tiny, "--lora", adapter, "-p", "a"), adapter)
    ended = pyggml("generate", "-m", tiny, "--lora", tiny, "-p", "a")
    refused(ended, tiny, "general.type is missing, wanted 'adapter'")
    assert "lora_a" not in ended.err, "a sentence, not a list of the model's tensors"


def test_an_adapter_or_a_checkpoint_is_no_model(finetune, pyggml, tmp_path):
    points = tmp_path / "points"
    assert finetune("--checkpoint-dir", points, "--max-steps", 1).code == 0
    for path, kind in ((tmp_path / "adapter.gguf", "adapter"), (*points.iterdir(), "checkpoint")):
        for given in (
            ("quantize", path, tmp_path / "out.gguf", "Q8_0"),
            ("generate", "-m", path, "-p", "a"),
        ):
            refused(pyggml(*given), path, f"general.type is '{kind}', wanted a model")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("arguments", [
    ("inspect", "FILE"),
    ("compare", "MODEL", "FILE"),
    ("eval", "-m", "MODEL", "-f", "TEXT", "--compare", "FILE"),
    ("generate", "-m", "MODEL", "--control-vector", "FILE", "-p", "the"),
    ("quantize", "MODEL", "OUT", "Q8_0", "--imatrix", "FILE"),
    ("new", "--vocab", "MODEL", "-o", "FILE"),
])  # fmt: skip
def test_a_kind_of_file_that_is_an_array(pyggml, tiny, text, tmp_path, arguments):
    file = tmp_path / "file.gguf"
    gguf.write(file, dict.fromkeys(("general.type", "general.architecture"), np.arange(2)), [])
    names = {"FILE": file, "MODEL": tiny, "TEXT": text, "OUT": tmp_path / "out.gguf"}
    ended = pyggml(*(names.get(a, a) for a in arguments))
    if arguments[0] == "inspect":
        assert ended.code == 0
    else:
        refused(ended, file)


def test_an_importance_matrix_of_more_chunks_than_fit(pyggml, tiny, tmp_path):
    matrix, out = tmp_path / "i.gguf", tmp_path / "out.gguf"
    sums = [(f"blk.0.attn_q.weight.{name}", F32, (1,), np.ones(1, np.float32))
            for name in ("in_sum2", "counts")]  # fmt: skip
    gguf.write(matrix, {"general.type": "imatrix", "imatrix.chunk_count": np.int32(-1)}, sums)
    refused(pyggml("quantize", tiny, out, "Q8_0", "--imatrix", matrix), "claims -1 chunks")


def test_names_from_a_file_do_not_command_the_terminal(pyggml, tiny, tmp_path):
    with gguf.open(tiny) as file:
        tensors = [(n, i.dtype, i.shape, file.data(n)) for n, i in file.tensors.items()]
        tensors += [("\x1b[31mred\x07", F32, (3,), np.zeros(3, np.float32))]
        gguf.write(tmp_path / "red.gguf", dict(file.metadata), tensors)
    ended = pyggml("generate", "-m", tmp_path / "red.gguf", "-p", "a")
    refused(ended, "\\x1b[31mred\\x07 is not used by this architecture")
    assert not {"\x1b", "\x07"} & set(ended.err)


# -- texts --------------------------------------------------------------------------------------

TEXTS = {
    "empty": (b"", "is empty, wanted text"),
    "not UTF-8": (b"caf\xe9 " * 50, "byte 3 is 0xe9, which is not UTF-8 there"),
    "short": (b"a few words", "holds 11 tokens, wanted at least 17 for one window of 16"),
}


@pytest.mark.parametrize("raw, message", TEXTS.values(), ids=list(TEXTS))
def test_a_text_that_cannot_be_trained_on(finetune, tmp_path, raw, message):
    path = tmp_path / "text.txt"
    path.write_bytes(raw)
    refused(finetune(data=path), path, message)


def test_a_text_whose_perplexity_has_no_meaning(pyggml, tiny, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("short")
    ended = pyggml("perplexity", "-m", tiny, "-f", path, "--ctx", 64)
    refused(ended, path, "wanted at least 128, two contexts of 64; a smaller --ctx needs less")
    refused(pyggml("perplexity", "-m", tiny, "-f", path, "--ctx", 65), " --ctx is 65, wanted 4 to")


# -- settings -----------------------------------------------------------------------------------

SETTINGS = {
    "rank 0": (("--lora-rank", 0), " --lora-rank is 0, wanted 1 to 4096"),
    "rank too large": (
        ("--lora-rank", 17),
        "--lora-rank is 17, wanted at most 16: blk.0.attn_k.weight has 16",
    ),
    "module": (("--lora-modules", "attn_q,query"), "query is no linear module of this model"),
    "no module": (("--lora-modules", ""), " --lora-modules is"),
    "a module twice": (("--lora-modules", "attn_q,attn_q"), "names, none of them twice"),
    "skip all": (("--skip-layers", 2), " --skip-layers is 2, wanted below the model's 2 blocks"),
    "ctx": (("--ctx", 65), " --ctx is 65, wanted at most the model's 64"),
    "lr": (("--lr", "nan"), " --lr is nan, wanted above 0"),
    "lr is a word": (("--lr", "fast"), "'fast' is not a valid float"),
    "scheduler": (("--lr-scheduler", "wild"), " --lr-scheduler is 'wild', wanted one of cosine"),
    "compute": (("--compute", "f8"), " --compute is 'f8', wanted one of auto, int8, bf16, f32"),
    "threads": (("--threads", -1), " --threads is -1, wanted 0 or more"),
    "several": (("--batch", 0, "--epochs", 0), " --epochs is 0, wanted 1 or more; --batch is 0"),
    "prompt": (("--prompt", "long" * 20), "the prompt has 80 tokens, wanted 1 to 63"),
    "empty prompt": (("--prompt", ""), "the prompt has 0 tokens, wanted 1 to 63"),
    "unknown": (("--lora-ranks", 3), "No such option '--lora-ranks'"),
    "a precision": (("--bf16",), "'--bf16'. Did you mean '--compute'?"),
    "a weight with a comma": (("--lora", "r/a.gguf:0,5"), "the weight '0,5' is no number, wanted"),
    "none beside others": (("--log-to", "none,wandb"), "--log-to none is unknown, wanted some of"),
    "another trainer's": (("--output-dir", 3), "'--output-dir'. Did you mean '--output'?"),
    "what is always so": (
        ("--load-in-4bit",),
        "nor need of it: the base has the types of its file",
    ),
    "llama.cpp's letter": (("-c", 64), "No such option '-c'. Did you mean '--ctx'?"),
    "two files of settings": (("--config", "a", "--config=b"), "--config is given twice"),
    "bytes": (("--prompt", "a\udcff"), "'--prompt': has half of a surrogate pair, a byte that"),
    "standard output": (("--output", "-"), "-: standard output takes no file, wanted the name"),
    "a near miss": (("--lr-scheduler", "cosin"), "wsd: did you mean 'cosine'?"),
    "a template": (("--chat-template", "chatlm"), "did you mean 'chatml'?"),
    "a module": (("--lora-modules", "attn_qq"), "of this model: did you mean 'attn_q'?; known are"),
    "nothing to resume": (("--resume", "/none"), "/none"),
}


@pytest.mark.parametrize("arguments, message", SETTINGS.values(), ids=list(SETTINGS))
def test_a_setting_out_of_range(finetune, tmp_path, arguments, message):
    refused(finetune(*arguments), message)
    assert not (tmp_path / "adapter.gguf").exists()


def test_what_is_missing_is_named(pyggml, tiny):
    refused(pyggml("finetune"), "wanted -m MODEL.gguf, -f TEXT, -o ADAPTER.gguf, or --demo")
    refused(pyggml("finetune", "-m", tiny), "wanted -f TEXT, -o ADAPTER.gguf, or --demo")
    refused(pyggml("generate", "-p", "a"), "Missing option '-m'")
    refused(pyggml("nonsense"), "No such command 'nonsense'")
    refused(pyggml("finetun"), "No such command 'finetun'. Did you mean 'finetune'?")
    refused(
        pyggml("convert-lora", "-o", "peft"), "No such option '-o': name files in turn, FROM TO"
    )
    refused(pyggml("quantize", "-m", tiny), "'-m': name files in turn, IN.gguf OUT.gguf TYPE")
    refused(
        pyggml("finetune", tiny, "a.txt"),
        "unexpected extra arguments",
        ": files are named by options, -m, -f, -o",
    )


GENERATE = {
    "ctx": (("-p", "a", "--ctx", 65), " --ctx is 65, wanted at most the model's 64"),
    "no room": (("-p", "abcd", "--ctx", 4), "the prompt has 4 tokens, wanted fewer than the 4"),
    "no prompt": (("-p", ""), "the prompt is empty"),
    "temperature": (("-p", "a", "--temp", -1), " --temp is -1.0, wanted 0 to 100"),
    "threads": (("-p", "a", "--threads", -1), "-1 is not in the range"),
    "compute": (("-p", "a", "--compute", "f8"), "'f8' is not one of 'auto', 'int8', 'bf16', 'f32'"),
    "half a character": (("-p", "\ud800"), "half of a surrogate pair"),
}


@pytest.mark.parametrize("arguments, message", GENERATE.values(), ids=list(GENERATE))
def test_a_prompt_or_setting_that_does_not_fit(pyggml, tiny, arguments, message):
    refused(pyggml("generate", "-m", tiny, *arguments), message)


def test_an_unknown_file_type(pyggml, tiny, tmp_path):
    ended = pyggml("quantize", tiny, tmp_path / "out.gguf", "Q3_X")
    refused(ended, "'Q3_X' is no file type; known are F32")


# -- places -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place, message",
    [("", "is a folder"), ("file/out.gguf", "Not a directory"), ("file/a/b.gguf", "Not a dir")],
)
def test_an_output_that_cannot_be_made(finetune, pyggml, tiny, tmp_path, place, message):
    (tmp_path / "file").write_text("")
    ended = finetune(output=tmp_path / place)
    refused(ended, tmp_path / place, message)
    assert ended.out == ""  # before anything was done
    refused(pyggml("quantize", tiny, tmp_path / place, "F16"), message)


@pytest.mark.parametrize("place", [".", "/", ""])
def test_an_output_without_a_name(finetune, place):
    refused(finetune(output=place), "is a folder, wanted the name of a file to write")


def test_an_output_in_a_folder_that_may_not_be_written(finetune, tmp_path, monkeypatch):
    def denied(dir):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as fakes:
        fakes.setattr("tempfile.TemporaryFile", denied)
        refused(finetune(), "adapter.gguf: cannot be written:", "Permission denied")
    if not hasattr(os, "mkfifo"):  # Windows
        return
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # stands for every path that is no file, /dev/null among them
    refused(finetune(output=pipe), "pipe: is a device")


def test_a_disk_without_room_for_checkpoints(finetune, tmp_path, monkeypatch):
    """Room for the adapter (8 kB and a header) but not for three times three of that."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100_000))
    assert finetune("--max-steps", 1).code == 0
    ended = finetune("--max-steps", 1, "--checkpoint-dir", tmp_path / "points")
    refused(ended, "points: needs 270 kB, but its disk has 100 kB left")
    assert "step 1" not in ended.out and not (tmp_path / "points").exists()


def test_a_checkpoint_of_another_run_or_in_the_way(finetune, tmp_path, tiny):
    folder = tmp_path / "points"
    assert finetune("--checkpoint-dir", folder, "--max-steps", 1).code == 0
    adapter = (tmp_path / "adapter.gguf").read_bytes()
    other = ("--max-steps", 1, "--lora-rank", 3, "--resume")
    said = (
        "is of another run: --lora-rank is 2 there and 3 here; length, validation and logging may "
        "change; --init trains an adapter on otherwise, -m a whole model\n"
    )
    refused(finetune(*other, folder), said)
    refused(finetune("--resume", tiny), "wanted 'checkpoint'")
    refused(finetune("--resume", tmp_path), "holds no checkpoint")
    refused(finetune("--checkpoint-dir", folder), "holds checkpoints of an earlier run")
    refused(finetune("--checkpoint-dir", tiny / "x"), "cannot be made")
    refused(finetune("--checkpoint-dir", tiny), tiny, "is a file, wanted a folder")
    ended = finetune("--resume", tmp_path / "none")
    refused(ended, "none: does not exist, wanted a checkpoint to resume from")
    assert ended.out == ""  # before the model was read
    assert (tmp_path / "adapter.gguf").read_bytes() == adapter
