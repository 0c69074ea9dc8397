"""Plain values of a file → the sections that a terminal and a page show."""

from collections.abc import Iterator, Mapping
from typing import Any

from pyggml.cli.commands.inspect.sections import CellTable, ReportSection
from pyggml.cli.terminal.show import count, plural, printable, size
from pyggml.errors import first_names

Facts = Mapping[str, Any]

_MOST_CHARACTERS = 60  # characters of a metadata value
_WORDS = {
    "block_count": "layers",
    "embedding_length": "width",
    "attention.head_count": "heads",
    "attention.head_count_kv": "heads of keys and values",
    "attention.key_length": "size of a head",
    "attention.sliding_window": "window",
    "feed_forward_length": "feed-forward",
    "expert_count": "experts",
    "expert_used_count": "used for a token",
    "expert_feed_forward_length": "width of an expert",
    "ssm.state_size": "state",
    "ssm.inner_size": "inner width",
    "context_length": "context",
    "rope.freq_base": "rope base",
    "rope.dimension_count": "rotated of a head",
    "rope.scaling.type": "rope scaling",
    "rope.scaling.factor": "by",
}


def head(f: Facts) -> str:
    """A title: the name and the kind of a file."""
    about = f.get("model") or f.get("adapter") or {}
    named = f["metadata"].get("general.name", {}).get("value")
    name = named if isinstance(named, str) and named else f["file"]["path"].rpartition("/")[2]
    return printable(f"{name} ({about.get('architecture') or f['file']['kind']})")


def sections(f: Facts, every_tensor: CellTable | None, template: bool) -> list[ReportSection]:
    """The glance at a file, in the order in which one asks."""
    parts = [ReportSection("file", list(_file_rows(f)))]
    if "model" in f:
        parts.append(ReportSection("architecture", list(_model_rows(f["model"]))))
    if f["tensors"]["n"]:
        parts.append(_types(f["tensors"]))
        table = every_tensor or _folded_table(f["tensors"])
        parts.append(ReportSection("tensors", table=table))
    if "lora" in f:
        parts.append(_lora(f["lora"]))
    if "tokenizer" in f:
        parts.append(ReportSection("tokenizer", list(_tokenizer_rows(f["tokenizer"]))))
    if "chat_template" in f:
        parts.append(_template(f["chat_template"], template))
    rows = [(key, _value(v)) for key, v in f["metadata"].items()]
    parts.append(
        ReportSection("metadata", table=CellTable(("key", "value"), rows), folded=len(rows) > 20)
    )
    return parts


# -- the file -------------------------------------------------------------------------------------


def _file_rows(f: Facts) -> Iterator[tuple[str, str]]:
    file, tensors = f["file"], f["tensors"]
    parts = f" in {len(file['paths'])} files" * (len(file["paths"]) > 1)
    yield "path", file["path"]
    form = "llama.cpp's older .dat"
    if file["version"] is not None:
        form = f"GGUF version {file['version']}"
    yield "", f"{form}, {size(file['n_bytes'])}{parts}"
    n = sum(t["n_parameters"] for t in tensors["types"])
    holds = f": {plural(tensors['n'], 'tensor')}, {count(n)} numbers" if n else ""
    yield "holds", f"{_KINDS.get(file['kind'], file['kind'])}{holds}"
    if tensors["zeros"]:
        yield "note", f"all of {first_names(tensors['zeros'])} is 0, as where a download broke off"
    if "adapter" in f:
        yield from _adapter_rows(f["adapter"])
    if "imatrix" in f:
        yield from _imatrix_rows(f["imatrix"])
    hint = f["metadata"].get("controlvector.model_hint", {}).get("value")
    if file["kind"] == "controlvector" and hint:
        yield "for", f"{printable(str(hint))[:40]} models: --control-vector FILE:SCALE"


_KINDS = {
    "model": "a model",
    "adapter": "an adapter",
    "imatrix": "an importance matrix",
    "controlvector": "a control vector",
    "vocabulary": "a vocabulary",
    "checkpoint": "a checkpoint of a run",
    "other": "none of the kinds that are known",
}


def _adapter_rows(a: Facts) -> Iterator[tuple[str, str]]:
    yield "for", f"{a['architecture'] or 'no architecture'} models; type {a['type']}"
    alpha = "none" if a["alpha"] is None else f"{a['alpha']:g}"
    yield "alpha", alpha
    alike: dict[str, list[str]] = {}
    for module, ranks in a["modules"].items():
        alike.setdefault(" or ".join(map(str, ranks)), []).append(module)
    for rank, modules in alike.items():
        yield f"rank {rank}", ", ".join(modules)
    yield "on", plural(a["n_tensors_adapted"], "matrix", "matrices")


def _imatrix_rows(i: Facts) -> Iterator[tuple[str, str]]:
    yield "of", f"{plural(i['n_matrices'], 'matrix', 'matrices')}"
    if i["chunk_count"]:
        each = f" of {i['chunk_size']} tokens" if i["chunk_size"] else ""
        yield "from", plural(i["chunk_count"], "chunk") + each
    for name in i["datasets"]:
        yield "text", name


def _model_rows(m: Facts) -> Iterator[tuple[str, str]]:
    yield "model", f"{m['architecture']}, {count(m['n_parameters'])} parameters"
    own = m["hyperparameters"]
    for keys in (
        ("block_count", "embedding_length"),
        ("attention.head_count", "attention.head_count_kv", "attention.key_length"),
        ("feed_forward_length",),
        ("expert_count", "expert_used_count", "expert_feed_forward_length"),
        ("ssm.state_size", "ssm.inner_size"),
        ("context_length", "attention.sliding_window"),
        ("rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"),
    ):
        there = [k for k in keys if k in own and own[k] not in (0, None)]
        if there:
            first, *more = [f"{_WORDS[k]} {_number(own[k])}" for k in there]
            yield "" if keys[0] != "block_count" else "shape", ", ".join([first, *more])
    tied = ", which is its output matrix too" if m["tied"] else ""
    yield "", f"embedding of {m['n_vocab']:,} tokens{tied}"


def _number(x: Any) -> str:
    """1,024; of a list, its range: 0 to 8."""
    if isinstance(x, list):
        distinct = list(dict.fromkeys(x))
        if all(isinstance(v, int) for v in x) and len(distinct) > 1:
            return f"{min(x):,} to {max(x):,} by layer"
        return _number(distinct[0]) if len(distinct) == 1 else f"{len(x)} values"
    if isinstance(x, float):
        return f"{x:,.0f}" if x == int(x) and abs(x) < 1e15 else f"{x:g}"
    return f"{x:,}" if isinstance(x, int) and not isinstance(x, bool) else printable(str(x))[:40]


# -- tensors --------------------------------------------------------------------------------------


def _types(tensors: Facts) -> ReportSection:
    rows = [
        (
            t["type"],
            f"{t['n']:,}",
            count(t["n_parameters"]),
            size(t["n_bytes"]),
            f"{t['share']:.1%}",
        )
        for t in tensors["types"]
    ]
    names = ("type", "tensors", "numbers", "bytes", "share")
    return ReportSection("types", table=CellTable(names, rows, frozenset({1, 2, 3, 4})))


def _folded_table(tensors: Facts) -> CellTable:
    rows, before = [], ""
    for g in tensors["groups"]:
        name = printable(g["name"])
        label = name.replace(".*.", f".{g['among']}.", 1)
        if name == before:  # an exception to the row above
            label = f"  but {g['blocks']}"
        rows.append((label, g["type"], shape(g["shape"]), size(g["n_bytes"])))
        before = name
    return CellTable(("tensor", "type", "shape", "bytes"), rows, frozenset({3}))


def shape(sizes: list[int]) -> str:
    return " × ".join(map(str, sizes))


# -- training -------------------------------------------------------------------------------------


def _lora(lora: Facts) -> ReportSection:
    if not lora["buildable"]:
        return ReportSection(
            "LoRA", [("no", f"pyggml cannot build it: {printable(lora['why_not'])}")]
        )
    rank = lora["rank"]
    rows = [
        (
            m["module"],
            m["blocks"],
            ", ".join(map(shape, m["shapes"])),
            f"{m['n_parameters']:,}",
            "yes" if m["default"] else "if named",
        )
        for m in lora["modules"]
    ]
    names = ("module", "blocks", "shape", f"rank {rank}", "target")
    said = [
        ("cost", f"rank {rank} on the default targets: {lora['n_parameters']:,} parameters"),
        (
            "",
            f"adapter file of {size(lora['n_bytes'])}; {size(lora['training_bytes'])} in training",
        ),
    ]
    if "refused" in lora:
        said.append(("but", lora["refused"]))
    if "plan" in lora:
        p = lora["plan"]
        whole = p["arena_bytes"] + p["parameter_bytes"]
        ctx = f"{plural(p['batch'], 'window')} of {p['ctx']} tokens"
        said.append(("memory", f"{size(whole)} with the graph of {ctx}; the weights stay mapped"))
    return ReportSection("LoRA", said, CellTable(names, rows, frozenset({3})))


# -- words ----------------------------------------------------------------------------------------


def _tokenizer_rows(t: Facts) -> Iterator[tuple[str, str]]:
    pre = f", pre-tokenizer {t['pre']}" if t["pre"] else ""
    n = "no tokens" if t["n_tokens"] is None else plural(t["n_tokens"], "token")
    yield "kind", f"{t['model']}{pre}; {n}"
    for name, token in t["special"].items():
        text = "" if token["text"] is None else f" {token['text']!r}"
        yield name, f"{token['id']}{text}"
    for flag in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        if flag in t:
            yield "adds" if t[flag] else "adds no", flag.removeprefix("add_").replace("_", " ")


def _template(t: Facts, whole: bool) -> ReportSection:
    family = t["family"] or "of no known family"
    rows = [("family", f"{family}; {t['n_characters']:,} characters")]
    if t["others"]:
        rows.append(("also", ", ".join(t["others"])))
    notes = [] if whole else ["--template shows it."]
    return ReportSection("chat template", rows, text=t["text"] if whole else "", notes=notes)


def _value(v: Facts) -> str:
    """A metadata value in one short line."""
    if "n" in v:
        text = f"[{v['n']:,}] {', '.join(map(_quote, v['first'][:4]))}, …"
    elif isinstance(v["value"], list):
        text = f"[{len(v['value'])}] {', '.join(map(_quote, v['value']))}"
    else:
        text = _quote(v["value"])
    text = printable(text)
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…"


def _quote(x: Any) -> str:
    return repr(x) if isinstance(x, str) else f"{x:g}" if isinstance(x, float) else str(x)
