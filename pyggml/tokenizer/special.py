"""Roles of special tokens (BOS, EOS, …), and the tokens that end a generation.

The rules are those of llama_vocab::impl::load, but for the second half of the first:

1. a metadata key gives a role's token, otherwise the default of the kind; llama.cpp takes it
   whatever it is, here it has to be a control token, for else each text would end in a ")"
2. a role without a token gets the token with the first name of NAMES in the vocabulary (if several
   are in it, llama.cpp takes the first of its hash table)
3. tokens with a name in ENDS are control tokens and end a generation, whatever their type
"""

import warnings
from dataclasses import dataclass, replace

import numpy as np

from pyggml.tokenizer.metadata import Metadata
from pyggml.tokenizer.partition import Special, in_order
from pyggml.tokenizer.vocabulary import Attr, Vocabulary

DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unk": 0},
    "gpt2": {"bos": 11, "eos": 11},
    "whitespace": {"bos": 11, "eos": 11},
    "gemma4": {},
    "t5": {"eos": 1, "unk": 2, "pad": 0},
    "bert": {"bos": 101, "sep": 102, "unk": 100, "pad": 0, "mask": 103},
    "rwkv": {},
}

KEYS = {
    "bos": ("bos_token_id",),
    "eos": ("eos_token_id",),
    "eot": ("eot_token_id",),
    "eom": ("eom_token_id",),
    "unk": ("unknown_token_id",),
    "pad": ("padding_token_id",),
    "sep": ("seperator_token_id",),
    "mask": ("mask_token_id",),
    "fim_pre": ("fim_pre_token_id", "prefix_token_id"),
    "fim_suf": ("fim_suf_token_id", "suffix_token_id"),
    "fim_mid": ("fim_mid_token_id", "middle_token_id"),
    "fim_pad": ("fim_pad_token_id",),
    "fim_rep": ("fim_rep_token_id",),
    "fim_sep": ("fim_sep_token_id",),
}
# An id out of range counts as missing, as in llama.cpp; for these roles there is a warning. Files
# with a padding token just past the vocabulary are common and harmless.
VITAL = ("bos", "eos", "eot", "eom")

DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
NAMES = {
    "eos": ("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "[EOS]", DEEPSEEK_END),
    "eot": (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"),
        *("<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", DEEPSEEK_END, "<end_of_utterance>"),
    ),
    "eom": ("<|eom_id|>",),
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>"),
        *("<PRE>", "\u2581<PRE>", "<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>"),
        *("<SUF>", "\u2581<SUF>", "<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>"),
        *("<MID>", "\u2581<MID>", "<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>"),
    *(DEEPSEEK_END, "[e~["),
)
ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # gpt-oss


@dataclass(frozen=True, slots=True)
class Specials:
    """attrs     the vocabulary's attributes after rule 3
    roles     role (a key of KEYS) → id or None
    ends      ids that end a generation
    matched   tokens to find in texts, in order
    """

    attrs: np.ndarray
    roles: dict[str, int | None]
    ends: frozenset[int]
    matched: tuple[Special, ...]


def read_specials(metadata: Metadata, vocabulary: Vocabulary, kind: str, has_bos: bool) -> Specials:
    """The special tokens of a vocabulary. Warns of an id out of range, see VITAL."""
    vocabulary = replace(vocabulary, attrs=vocabulary.attrs.copy())
    roles: dict[str, int | None] = {}
    for role, keys in KEYS.items():
        default = None if role == "bos" and not has_bos else _default(vocabulary, kind, role)
        roles[role] = _role(metadata, role, keys, default, len(vocabulary.tokens))
    for role in NAMES:
        if roles[role] is None and (role != "eos" or "eos" in DEFAULTS[kind]):
            roles[role] = next(iter(_ids_of_names(vocabulary, role)), None)
            _mark(vocabulary, roles[role], Attr.CONTROL)
    ends = _ends(vocabulary, roles)
    matched = _matched_tokens(metadata, vocabulary)
    return Specials(vocabulary.attrs, roles, frozenset(ends), matched)


def _default(vocabulary: Vocabulary, kind: str, role: str) -> int | None:
    """The token that a role has in vocabularies of a kind, if it may be that here."""
    id = DEFAULTS[kind].get(role)
    if id is None or id >= len(vocabulary.tokens):
        return None
    is_one = role == "unk" or vocabulary.attrs[id] & (Attr.CONTROL | Attr.UNKNOWN)
    is_end = role != "eos" or vocabulary.tokens[id] in ENDS or not _ids_of_names(vocabulary, role)
    return id if is_one and is_end else None


def _ids_of_names(vocabulary: Vocabulary, role: str) -> list[int]:
    return [vocabulary.ids[name] for name in NAMES[role] if name in vocabulary.ids]


def _role(
    metadata: Metadata, role: str, keys: tuple[str, ...], default: int | None, n: int
) -> int | None:
    role_id = default
    for key in keys:
        id = metadata.index(f"tokenizer.ggml.{key}")
        if id is not None and 0 <= id < n:
            role_id = id
        elif id is not None and role in VITAL:
            instead = "none" if role_id is None else f"token {role_id}"
            warnings.warn(
                f"tokenizer.ggml.{key} is {id}, wanted 0 to {n - 1}: {instead} is taken instead",
                RuntimeWarning,
                stacklevel=2,
            )
    return role_id


def _mark(vocabulary: Vocabulary, id: int | None, attr: int) -> None:
    if id is not None:
        vocabulary.attrs[id] |= attr


def _ends(vocabulary: Vocabulary, roles: dict[str, int | None]) -> set[int]:
    attrs, named = vocabulary.attrs, [vocabulary.ids[n] for n in ENDS if n in vocabulary.ids]
    attrs[named] |= Attr.CONTROL
    attrs[[vocabulary.ids[n] for n in ALWAYS_SHOWN if n in vocabulary.ids]] = Attr.USER_DEFINED
    by_role = [roles[r] for r in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")]
    ends = {*named, *(id for id in by_role if id is not None)}
    names = {vocabulary.tokens[id] for id in ends}
    call = names & {"<|call|>", "<|calls|>"}
    if "<|end|>" in names and call and names & {"<|return|>", "<|flush|>"}:
        # The harmony format: <|end|> ends a message, and the turn goes on.
        ends.discard(vocabulary.ids["<|end|>"])
        attrs[vocabulary.ids["<|end|>"]] = Attr.USER_DEFINED
    if "</s>" in names and names & {"<|tool_response>", "<|plamo:eos|>"}:
        ends.discard(vocabulary.ids["</s>"])
        attrs[vocabulary.ids["</s>"]] = Attr.NORMAL
    return ends


def _matched_tokens(metadata: Metadata, vocabulary: Vocabulary) -> tuple[Special, ...]:
    hidden = Attr.CONTROL | Attr.UNKNOWN
    lstrip, rstrip = _strips(metadata, vocabulary)
    return in_order(
        Special(
            vocabulary.tokens[id],
            id,
            hidden=bool(vocabulary.attrs[id] & hidden),
            lstrip=id in lstrip,
            rstrip=id in rstrip,
        )
        for id in vocabulary.having(hidden | Attr.USER_DEFINED)
    )


def _strips(metadata: Metadata, vocabulary: Vocabulary) -> tuple[set[int], set[int]]:
    """Ids whose match includes the spaces on the left, and on the right. GGUF has no key for this;
    llama.cpp knows such models by name."""
    ids = vocabulary.ids
    pre = metadata.text("tokenizer.ggml.pre") or ""
    architecture = metadata.text("general.architecture") or ""
    name = (metadata.text("general.name") or "").lower()
    if any(part in pre for part in ("jina-v2-de", "jina-v2-es", "jina-v2-code")) or any(
        part in architecture for part in ("nomic-bert-moe", "jina-bert-v3")
    ):
        return {ids["<mask>"]} if "<mask>" in ids else set(), set()
    if "phi-3" in name or "phi3" in name:
        special = vocabulary.having(Attr.CONTROL | Attr.UNKNOWN | Attr.USER_DEFINED)
        after = {*special, *(ids[n] for n in ("</s>",) if n in ids)}
        return set(), after - {ids[n] for n in ("<unk>", "<s>", "<|endoftext|>") if n in ids}
    if "modern-bert" in name:
        return {ids["[MASK]"]} if "[MASK]" in ids else set(), set()
    return set(), set()
