"""Known attacks on loaders of GGUF, on templates and on servers of models, tried here.

docs/reliability.md lists them; the last test holds that list to this file.
"""

import ast
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from attacks.targets import model, serve_app, small_model
from pyggml import gguf
from pyggml.chat.template import ChatTemplate
from pyggml.cli.__main__ import main
from pyggml.errors import AdapterError, GGUFError, TemplateError
from pyggml.lora.peft import from_peft
from pyggml.lora.peft.settings import NAME as SETTINGS
from pyggml.tokenizer import from_metadata

ROOT = Path(__file__).parents[2]
MESSAGES = [{"role": "user", "content": "hi"}]


def header(n_tensors, *infos):
    """A GGUF file without metadata: its header and the tensors' descriptions."""
    counts = np.array([n_tensors, 0], np.uint64).tobytes()
    return b"GGUF" + (3).to_bytes(4, "little") + counts + b"".join(infos) + bytes(64)


def info(name, shape, offset=0, n_axes=None, kind=0):
    """The description of a tensor of type F32."""
    text = len(name).to_bytes(8, "little") + name.encode()
    axes = (len(shape) if n_axes is None else n_axes).to_bytes(4, "little")
    numbers = np.array(shape, np.uint64).tobytes() + kind.to_bytes(4, "little")
    return text + axes + numbers + np.array(offset, np.uint64).tobytes()


def refused(path, content):
    path.write_bytes(content)
    with pytest.raises(GGUFError) as caught:
        gguf.open(path)
    return str(caught.value)


def test_cve_2025_53630_sizes_of_tensors_overflow(tmp_path):
    for n in (2**61, 2**62, 2**63 - 1, 2**64 - 1):
        refused(tmp_path / "m.gguf", header(1, info("a", [n])))


def test_cve_2026_27940_the_sum_of_sizes_overflows(tmp_path):
    """Each size fits 64 bits; their sum, with the padding of each, is small again."""
    infos = [info(f"t{i}", [2**60], offset=i * 2**62 % 2**64) for i in range(4)]
    refused(tmp_path / "m.gguf", header(4, *infos))
    refused(tmp_path / "m.gguf", header(2**63))  # and a header of more tensors than bytes


def test_cve_2024_21802_more_axes_than_a_tensor_has(tmp_path):
    content = header(1, info("a", [1] * 4, n_axes=1000))
    assert "axes" in refused(tmp_path / "m.gguf", content)


def test_cve_2026_7482_tensors_beyond_the_file_are_not_quantized(tmp_path, capsys):
    path, output = tmp_path / "m.gguf", tmp_path / "q.gguf"
    whole = small_model(width=256, n_blocks=1)
    path.write_bytes(whole[: len(whole) // 2])
    assert main(["quantize", str(path), str(output), "Q8_0"]) == 2
    assert "m.gguf: " in capsys.readouterr().err
    assert not output.exists()


def vocabulary(*more):
    tokens = [*map(chr, range(97, 123)), *more]
    types = np.ones(len(tokens), np.int32)
    keys = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "merges": [], "token_type": types}
    return from_metadata({f"tokenizer.ggml.{key}": value for key, value in keys.items()})


def test_cve_2025_49847_a_token_longer_than_any_buffer():
    long = "x" * (1 << 20)
    tokenizer = vocabulary(long)
    assert tokenizer.decode([26, 0]) == long + "a"


def test_cve_2025_52566_a_text_of_more_tokens_than_a_count_holds():
    ids = vocabulary().encode("ab" * 40_000)  # past 16 bits; no count of a fixed size stands here
    assert len(ids) == 80_000
    assert set(ids) == {0, 1}


def test_cve_2026_21869_a_negative_count_of_tokens_to_discard(client):
    answer = client.post("/v1/completions", json={"prompt": "a", "n_discard": -5})
    assert answer.status_code == 400
    assert "n_discard is not supported" in answer.text


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.__class__ }}",
        "{{ messages | attr('__class__') }}",
        "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
        "{{ self.__init__.__globals__.__builtins__.__import__('os') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{% set x = messages.append(1) %}{{ namespace.__init__ }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_cve_2024_34359_and_cve_2026_5760_templates_reach_no_python(source):
    try:
        text = ChatTemplate(source, "template").render(MESSAGES)
    except TemplateError:
        return
    assert text == ""  # what a template may not see is nothing, as in transformers


def test_cve_2024_28224_another_host_s_name_for_this_machine(client):
    assert client.get("/v1/models", headers={"host": "rebound.example"}).status_code == 403


class Planted:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_cve_2025_32434_pickles_are_not_opened(tmp_path):
    mark, folder = tmp_path / "mark", tmp_path / "peft"
    folder.mkdir()
    (folder / SETTINGS).write_text(json.dumps({"r": 2, "lora_alpha": 4, "peft_type": "LORA"}))
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Planted(mark)))
    with pytest.raises(AdapterError, match="safetensors"):
        from_peft(model(), folder, tmp_path / "a.gguf")
    assert not mark.exists()


def test_no_source_reads_pickles():
    """Numba's cache alone is made of them; pyggml.jit guards it."""
    names = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"}
    for folder in ("pyggml", "lora", "cli"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    assert not names & {alias.name.split(".")[0] for alias in node.names}, path
                if isinstance(node, ast.ImportFrom):
                    assert (node.module or "").split(".")[0] not in names, path


def test_the_page_lists_each_attack_and_its_test():
    page = (ROOT / "docs/reliability.md").read_text()
    tried = set(re.findall(r"cve_(\d{4}_\d+)", Path(__file__).read_text()))
    assert set(re.findall(r"CVE-(\d{4}-\d+)", page)) == {cve.replace("_", "-") for cve in tried}


@pytest.fixture(scope="module")
def client():
    with TestClient(serve_app(), "http://localhost") as found:
        yield found
