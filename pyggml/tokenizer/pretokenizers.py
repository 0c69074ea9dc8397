"""tokenizer.ggml.pre → the regexes that cut a text before byte-level BPE.

Patterns apply one after the other: each cuts every piece left by the one before into its matches
and the text between them. A lookahead ends at the end of its piece. The syntax is Oniguruma's.

Names and patterns are llama.cpp's (llama-vocab.cpp, unicode.cpp), taken there from each model's
tokenizer.json. llama.cpp's own matcher tells upper from lower case only in A to Z, and so do the
patterns here, even if a model's regex does not. Character classes are those of Unicode 16, in
llama.cpp those of Unicode 15: they differ in the characters assigned in 2024.
"""

from dataclasses import dataclass

from pyggml.errors import TokenizerError
from pyggml.gguf.fields import brief


@dataclass(frozen=True, slots=True)
class Pretokenizer:
    """patterns         regexes, applied in order
    ignore_merges    a piece that is a token becomes that token, without merges
    add_bos          default of the file's add_bos_token
    always_bos       BOS is added, whatever the file's add_bos_token
    has_bos          the kind's default BOS applies
    characters       merges work on characters, not on bytes
    marks_spaces     spaces become "▁" first
    whole_newlines   a run of newlines that is a token becomes that token, without merges
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    has_bos: bool = True
    always_bos: bool = False
    characters: bool = False
    marks_spaces: bool = False
    whole_newlines: bool = False


SUFFIX = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
LEAD = r"[^\r\n\p{L}\p{N}]?"
WORD = LEAD + r"\p{L}+"
MARKED_WORD = LEAD + r"[\p{L}\p{M}]+"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SYMBOLS_OR_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
DIGIT, DIGITS_1_TO_3 = r"\p{N}", r"\p{N}{1,3}"
LAST_SPACES = r"\s+(?!\S)|\s+"
SPACES = r"\s*[\r\n]+|" + LAST_SPACES
HAN_KANA = r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+"
HAN_TO_HANGUL = r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF&&[^\s]]+"
NEWLINES = r"[^\n]+|\n+"
SENTENCE_MARKS = r" ?[^(\s|.,!?\u2026\u3002\uFF0C\u3001\u0964\u06D4\u060C)]+"
# Digits in threes from the right; the text before a number joins its first group. One lookahead at
# the start of each number: one at every group would take quadratic time.
THREES_FROM_RIGHT = (
    r"[^\p{N}]*+\p{N}++|[^\p{N}]++",
    r"\A[^\p{N}]*+\p{N}{1,2}(?=(?:\p{N}{3})++\z)|\A[^\p{N}]*+\p{N}{1,3}|\p{N}{3}",
)
# The same groups, of ASCII digits only. The second pattern cuts before the first group of each run:
# the text and the runs of one or two digits before it stay in one piece. The third cuts between
# groups.
SUPERBPE = (
    r"\p{N}+",
    r"(?:(?:[0-9]{3})++(?![0-9]))?+(?:[^0-9]|[0-9]{1,2}(?![0-9]))*+"
    r"[0-9]{0,2}(?=(?:[0-9]{3})++(?![0-9])|\z)",
    r"[0-9]{3}(?=[0-9]{3})",
)


def _any(*alternatives: str) -> str:
    return "|".join(alternatives)


def _cased_words(lead: str, letters: str, suffix: str) -> str:
    """Words that end at a lower-case letter before a capital: "camelCase" is two."""
    upper, lower = rf"[{letters}&&[^a-z]]", rf"[{letters}&&[^A-Z]]"
    return f"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}"


GPT2 = r"'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = _any(SUFFIX, WORD, DIGITS_1_TO_3, SYMBOLS, SPACES)
QWEN2 = _any(SUFFIX, WORD, DIGIT, SYMBOLS, SPACES)
QWEN35 = _any(SUFFIX, MARKED_WORD, DIGIT, r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", SPACES)
TEKKEN = _any(_cased_words(LEAD, r"\p{L}", ""), DIGIT, SYMBOLS_OR_SLASH, SPACES)
GPT4O = _any(
    _cased_words(LEAD, r"\p{L}", f"(?:{SUFFIX})?"), DIGITS_1_TO_3, SYMBOLS_OR_SLASH, SPACES
)
GPT4O_MARKS = _any(
    _cased_words(LEAD, r"\p{L}\p{M}", f"(?:{SUFFIX})?"), DIGITS_1_TO_3, SYMBOLS_OR_SLASH, SPACES
)
MARKED_WORDS = f"{MARKED_WORD}(?:{SUFFIX})?"
TINY_AYA = _any(MARKED_WORDS, DIGITS_1_TO_3, SYMBOLS_OR_SLASH, SPACES)
YOUTU = _any(MARKED_WORDS, DIGIT, SYMBOLS_OR_SLASH, SPACES)
YOUTU_SCRIPTS = _any(
    r"[\uAC00-\uD7A3\u3131-\u318E]+",
    r"[\uFF01\u2026\u201C\u201D\u2018\u2019\u2014\uFF1A\uFF1B\uFF0C\u3001-\u303F\uFE30-\uFE4F]+",
    r"[\u3105-\u312F]+",
    HAN_KANA,
)
DEEPSEEK3_WORDS = _any(r"[!-/:-@\[-`{-~][A-Za-z]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+")
DEEPSEEK3 = _any(DEEPSEEK3_WORDS, r" ?[\p{P}\p{S}]+[\r\n]*", SPACES)
SPARK = _any(DEEPSEEK3_WORDS, r" ?[\p{P}\p{S}]+|[\r\n]", LAST_SPACES)
# Cased letters in the Unicode version of the model's authors.
DEEPSEEK_LETTERS = (
    r"A-Za-z\u00B5\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u01BA\u01BC-\u01BF\u01C4-\u0293"
    r"\u0295-\u02AF\u0370-\u0373\u0376\u0377\u037B-\u037D\u037F\u0386\u0388-\u038A\u038C"
    r"\u038E-\u03A1\u03A3-\u03F5\u03F7-\u0481\u048A-\u052F\u0531-\u0556\u10A0-\u10C5"
    r"\u13A0-\u13F5\u13F8-\u13FD\u1C90-\u1CBA\u1CBD-\u1CBF\u1D00-\u1D2B\u1D6B-\u1D77"
    r"\u1D79-\u1D9A\u1E00-\u1F15\u1F18-\u1F1D\u1F20-\u1F45\u1F48-\u1F4D\u1F50-\u1F57\u1F59"
    r"\u1F5B\u1F5D\u1F5F-\u1F7D\u1F80-\u1FB4\u1FB6-\u1FBC\u1FBE\u1FC2-\u1FC4\u1FC6-\u1FCC"
    r"\u1FD0-\u1FD3\u1FD6-\u1FDB\u1FE0-\u1FEC\u1FF2-\u1FF4\u1FF6-\u1FFC\u2102\u2107"
    r"\u210A-\u2113\u2115\u2119-\u211D\u2124\u2126\u2128\u212A-\u212D\u212F-\u2134\u2139"
    r"\u213C-\u213F\u2145-\u2149\u214E\u2183\u2184\u2C00-\u2C7B\u2C7E-\u2CE4\u2CEB-\u2CEE"
    r"\u2CF2\u2CF3\uA640-\uA66D\uA680-\uA69B\uA722-\uA76F\uA771-\uA787\uA78B-\uA78E"
    r"\uAB70-\uABBF\uFB00-\uFB06\uFB13-\uFB17\uFF21-\uFF3A\uFF41-\uFF5A\x{10400}-\x{1044F}"
    r"\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}"
    r"\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}"
)
DEEPSEEK_MARKS = r"!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3001\u3002"
AFMOE_SCRIPTS = (
    r"[\u4E00-\u9FFF\u3400-\u4DBF\u8C48-\uFAFF\u3040-\u309F\u30A0-\u30FF\uFF65-\uFF9F\u2F00-\u2FDF"
    r"\u0E40-\u0E7F\u0E80-\u0EFF\u1780-\u17FF\u1000-\u109F\uAA60-\uAA7F\uA9E0-\uA9FF\uAC00-\uD7AF"
    r"\u1100-\u11FF]+"
)
HAN = (
    r"\u4E00-\u9FFF\u3400-\u4DBF\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}\uF900-\uFAFF"
    r"\x{2F800}-\x{2FA1F}"
)
KIMI = _any(
    rf"[{HAN}]+", rf"{LEAD}[\p{{L}}&&[^{HAN}]]+(?:{SUFFIX})?", *(DIGITS_1_TO_3, SYMBOLS, SPACES)
)
EXAONE_MOE = _any(
    SUFFIX, LEAD + r"\p{L}(?:[\p{L}\p{M}]| \p{L})*", *(DIGIT, r" ?[^\s\p{L}\p{N}]+[\r\n/]?", SPACES)
)
SEED_CODER = _any(SUFFIX, WORD, DIGIT, r" ?[^\s\p{L}\p{N}\r\n]+", SPACES)
JAIS2 = _any(
    *(SUFFIX, WORD, DIGITS_1_TO_3, SYMBOLS),
    r"(?=\s)(?<![^\S\r\n]{512})\s*[\r\n]+",  # not after 512 spaces: bounds the search for a newline
    *(rf"\s{{{2**i}}}(?!\S)" for i in range(9, 1, -1)),
    *(r"\s{1,2}(?!\S)", r"\s"),
)
CHAMELEON = (
    *(r"<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", DIGIT),
    *(r"[\p{P}!-/:-@\[-`{-~]", GPT2),
)

_GROUPS: tuple[tuple[Pretokenizer, str], ...] = (
    (Pretokenizer((r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")), "default"),
    (
        Pretokenizer((LLAMA3,), ignore_merges=True, add_bos=True),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    (Pretokenizer((LLAMA3,)), "dbrx smaug-bpe"),
    (Pretokenizer((LLAMA3,), has_bos=False), "chatglm-bpe"),
    (Pretokenizer((LLAMA3,), ignore_merges=True, has_bos=False), "glm4 glm5"),
    (
        Pretokenizer(
            (DIGITS_1_TO_3, _any(SUFFIX, WORD, r"\p{N}+", SYMBOLS, SPACES)), ignore_merges=True
        ),
        "minicpm5",
    ),
    (
        Pretokenizer((QWEN2,)),
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2 bailingmoe"
        " bailingmoe2 llada-moe",
    ),
    (Pretokenizer((QWEN35,)), "qwen35"),
    (Pretokenizer((_any(WORD, DIGIT, SYMBOLS, SPACES),)), "ufakzeka"),
    (Pretokenizer((NEWLINES, QWEN2)), "laguna"),
    (Pretokenizer((SEED_CODER,)), "seed-coder"),
    (Pretokenizer((EXAONE_MOE,)), "exaone-moe"),
    (
        Pretokenizer((GPT2,)),
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert"
        " jina-v1-en jina-v2-code roberta-bpe mpt olmo jais trillion granite-docling exaone4",
    ),
    (
        Pretokenizer((DIGIT, GPT2)),
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
    ),
    (Pretokenizer((r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]")), "falcon"),
    (
        Pretokenizer(
            (
                *(r"[\r\n]", rf"\s?[{DEEPSEEK_LETTERS}]+", rf"\s?[{DEEPSEEK_MARKS}]+", r"\s+\z"),
                *(HAN_TO_HANGUL, r"\p{N}+"),
            )
        ),
        "deepseek-llm",
    ),
    (Pretokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN_TO_HANGUL, DIGIT)), "deepseek-coder"),
    (
        Pretokenizer((DIGITS_1_TO_3, HAN_KANA, DEEPSEEK3)),
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    ),
    (Pretokenizer((DIGITS_1_TO_3, HAN_KANA, SPARK, DIGIT)), "spark2_5"),
    (Pretokenizer((YOUTU_SCRIPTS, YOUTU), ignore_merges=True), "youtu"),
    (Pretokenizer((SENTENCE_MARKS,)), "poro-chat bloom gpt3-finnish"),
    (Pretokenizer((SENTENCE_MARKS, DIGIT)), "viking"),
    (Pretokenizer((TEKKEN,), ignore_merges=True, add_bos=True), "tekken"),
    (Pretokenizer((GPT4O,)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (Pretokenizer((GPT4O_MARKS,), ignore_merges=True), "granite-embed-multi-97m"),
    (Pretokenizer((*THREES_FROM_RIGHT, TINY_AYA)), "tiny_aya cohere2moe"),
    (Pretokenizer((*THREES_FROM_RIGHT, AFMOE_SCRIPTS, DEEPSEEK3)), "afmoe"),
    (Pretokenizer((KIMI,)), "kimi-k2"),
    (Pretokenizer(SUPERBPE), "superbpe"),
    (Pretokenizer((JAIS2,)), "jais-2"),
    (Pretokenizer(CHAMELEON, add_bos=True), "chameleon"),
    (
        Pretokenizer(
            (NEWLINES,), always_bos=True, characters=True, marks_spaces=True, whole_newlines=True
        ),
        "gemma4 granite-embed-multi-311m",
    ),
    (Pretokenizer((NEWLINES,), characters=True, marks_spaces=True), "sarvam-moe"),
    (Pretokenizer((r"\S+",), characters=True), "whitespace"),
)
PRETOKENIZERS = {name: pre for pre, names in _GROUPS for name in names.split()}


def pretokenizer(name: str | None) -> Pretokenizer:
    """The pre-tokenizer of this name, "default" for None. TokenizerError for an unknown name."""
    chosen = PRETOKENIZERS.get(name or "default")
    if chosen is None:
        names = ", ".join(sorted(PRETOKENIZERS))
        raise TokenizerError(f"tokenizer.ggml.pre is {brief(name)}, wanted one of {names}")
    return chosen
