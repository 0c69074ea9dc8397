"""`import pyggml` costs nothing: the compiler and the tokenizers are loaded when they are used."""

from pathlib import Path

import pytest
import tiny_models
from extras import need
from processes import printed, python

ROOT = Path(__file__).parents[1]
HEAVY = [
    "numba",
    "llvmlite",
    "tokenizers",
    "sentencepiece",
    "jinja2",
    "rich",
    "click",
    "gguf",
    "numpy",
]


def loaded_after(script):
    """Top-level packages in sys.modules after a script, in a fresh process."""
    report = "; import sys; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    return set(printed(script + report).split())


def test_importing_the_package_loads_nothing_heavy():
    loaded = loaded_after("import pyggml")
    assert "pyggml" in loaded
    assert not loaded & set(HEAVY)


def test_looking_into_the_package_loads_nothing_heavy():
    assert not loaded_after("import pyggml; dir(pyggml); pyggml.__version__") & set(HEAVY)


def test_reading_a_file_needs_no_compiler():
    loaded = loaded_after("import pyggml; pyggml.gguf.open")
    assert "numpy" in loaded
    assert not loaded & {
        "numba",
        "llvmlite",
        "tokenizers",
        "sentencepiece",
        "jinja2",
        "rich",
        "click",
    }


@pytest.mark.quick
@pytest.mark.parametrize(
    "name", ["load", "Model", "Sampling", "generate", "ops", "gguf", "runtime"]
)
def test_names_arrive_when_asked_for(name):
    import pyggml

    assert name in dir(pyggml)
    assert getattr(pyggml, name) is not None


def test_functions_are_not_hidden_by_modules():
    """Importing a submodule sets an attribute of that name on the package."""
    import pyggml
    import pyggml.generation
    import pyggml.model

    assert callable(pyggml.load)
    assert callable(pyggml.generate)


def test_an_unknown_name_is_an_attribute_error():
    import pyggml

    with pytest.raises(AttributeError, match="no attribute 'finetune_all'"):
        pyggml.finetune_all  # noqa: B018  that it fails is the test


def test_what_is_imported_late_is_found_all_the_same():
    import pyggml.lora

    assert set(pyggml.lora.__all__) <= set(dir(pyggml.lora))
    assert all(callable(getattr(pyggml.lora, name)) for name in ("Perplexity", "perplexity"))
    with pytest.raises(AttributeError, match="no attribute 'perplexities'"):
        pyggml.lora.perplexities  # noqa: B018  that it fails is the test


def test_the_first_step_waits_for_nothing_that_it_does_not_use():
    """What a run needs at its end, or other kinds of runs: pages, evaluation, preferences."""
    modules = "import sys; print(*sys.modules, sep='\\n')"
    script = f"from pyggml.cli.commands.finetune import stages; {modules}"
    loaded = set(printed(script).split())
    assert {"pyggml.lora.trainer.loop", "pyggml.generation"} <= loaded
    assert not loaded & {
        "jinja2",
        "pyggml.look.draw",
        "pyggml.lora.evaluate",
        "pyggml.lora.data.preferences",
        "pyggml.backends.cuda",
        "pyggml.backends.webgpu",
    }


TALK = """
import io, sys
from pyggml.cli import __main__ as cli
sys.stdin = io.StringIO("the\\n")
assert cli.main([{command!r}, "-m", {model!r}, "-n", "2", *{options!r}]) == 0
"""


@pytest.mark.parametrize(
    "command, options",
    [("chat", ["--chat-template", "chatml"]), ("generate", ["-p", "the "])],
)
def test_who_talks_with_a_model_loads_no_data_of_training(command, options, tmp_path):
    model = tiny_models.write_llama(
        tmp_path / "tiny.gguf",
        len(tiny_models.TOKENS),
        n_layer=1,
        seed=5,
        keys=tiny_models.VOCABULARY,
    )
    script = TALK.format(command=command, model=str(model), options=options)
    modules = "print(*(m for m in sys.modules if m.startswith('pyggml.')), file=sys.stderr)"
    run = python("-c", script + modules)
    assert run.returncode == 0 and run.stdout, run.stderr
    loaded = run.stderr.split()
    assert "pyggml.chat.template" in loaded
    assert not [
        name for name in loaded if name.startswith(("pyggml.lora.data", "pyggml.lora.trainer"))
    ]


def test_a_server_loads_no_data_of_training():
    need("starlette")
    script = "import sys; import pyggml.cli.commands.serve.startup; print(*sys.modules)"
    loaded = printed(script).split()
    assert "pyggml.chat.messages" in loaded
    assert not [name for name in loaded if name.startswith("pyggml.lora")]
