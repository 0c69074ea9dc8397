"""What is learned of a chat: exactly the answers and the token that ends each."""

import json

import numpy as np
import pytest

from pyggml.chat import ChatEncoder, ChatTemplate, find_template
from pyggml.chat.answers import find_answers
from pyggml.errors import TemplateError

from chats import GOLDEN, assistant, user

TEXTS = json.loads((GOLDEN / "templates.json").read_text("utf-8"))
ENDS = {
    "google-gemma-2-2b-it": "<end_of_turn>\n",
    "ibm-granite-granite-3.3-2B-Instruct": "<|end_of_text|>\n",
    "meta-llama-Llama-3.1-8B-Instruct": "<|eot_id|>",
    "microsoft-Phi-3.5-mini-instruct": "<|end|>\n",
    "mistralai-Mistral-Nemo-Instruct-2407": "</s>",
}
THREE = [user("1 < 2"), assistant("Yes."), user("Why?"), assistant("So.\n\n* a"), user("ok"),
         assistant("Bye 👋")]  # fmt: skip
THOUGHT = [user("2+2?"), assistant("<think>\ntwo\n</think>\n\n4"), user("3+3?"),
           assistant("<think>\nthree\n</think>\n\n6")]  # fmt: skip


def said(template, messages, tools=None):
    """The answers, and what follows each up to its limit."""
    text, found = find_answers(template, messages, tools)
    answers = [answer for _, answer in found]
    return [text[a.start : a.end] for a in answers], [text[a.end : a.limit] for a in answers]


@pytest.mark.parametrize("model", TEXTS)
def test_answers_and_the_end_of_their_turns(model, template):
    answers, ends = said(template(model), THREE)
    assert answers == ["Yes.", "So.\n\n* a", "Bye 👋"]
    assert all(end.startswith(ENDS.get(model, "<|im_end|>\n")) for end in ends)


# A turn that the next one ends, as in Apertus and Hy 3; one that nothing ends, as in GLM 4.6.
ENDED_BY_THE_NEXT = """{% for m in messages %}
{%- if m.role == 'user' %}{% if not loop.first %}<|im_end|>{% endif %}[U]{{ m.content }}
{%- else %}[A]{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"""


@pytest.mark.parametrize("end", ["<|im_end|>", ""])
def test_a_turn_may_be_ended_by_the_next(end):
    template = ChatTemplate(ENDED_BY_THE_NEXT.replace("<|im_end|>", end), "template")
    answers, ends = said(template, THREE)
    assert answers == ["Yes.", "So.\n\n* a", "Bye 👋"]
    assert ends == [end, end, ""]


@pytest.mark.parametrize("model", TEXTS)
def test_answers_are_found_wherever_the_template_takes_the_chat(model, template, conversations):
    """Or it is said that they are not; what is found begins where the model would be asked, if the
    template asks as it tells afterwards."""
    for name, given in conversations.items():
        messages = given["conversation"]
        if TEXTS[model][name] is None or messages[-1]["role"] != "assistant":
            continue
        charge_result, tools = template(model), given.get("tools")
        text, found = find_answers(charge_result, messages, tools)
        answers = [answer for _, answer in found]
        assert text == TEXTS[model][name]
        last = charge_result.render(messages[:-1], tools, add_generation_prompt=True)
        header = text[len(last) : answers[-1].start]
        told = text.startswith(last) and "user" in [m["role"] for m in messages]
        assert header in ("", "<think>\n\n</think>\n\n") or not told, name
        assert messages[-1]["content"].strip() in text[answers[-1].start : answers[-1].end]


def test_thoughts_that_a_template_removes_are_not_learned(template):
    """Qwen 3 and LFM 2.5 keep those of the last answer alone."""
    for model in ("Qwen-Qwen3-0.6B", "LFM2.5-Instruct"):
        assert said(template(model), THOUGHT)[0] == ["4", "<think>\nthree\n</think>\n\n6"]


@pytest.mark.quick
def test_an_empty_thought_that_the_template_writes_is_a_header(template):
    text, ((_, answer),) = find_answers(template("Qwen-Qwen3-0.6B"), [user("a"), assistant("b")])
    assert text[: answer.start].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    own = [user("a"), assistant("b", reasoning_content="c")]
    assert said(template("Qwen-Qwen3-0.6B"), own)[0] == ["<think>\nc\n</think>\n\nb"]


def test_calls_of_tools_are_answers(template, conversations):
    given = conversations["tools, called"]
    answers, ends = said(
        template("Qwen-Qwen2.5-7B-Instruct"), given["conversation"], given["tools"]
    )
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert answers == [call, "Grey.", "Welcome"] and set(ends) == {"<|im_end|>\n"}


def test_generation_blocks_say_what_the_answers_are():
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}"
        "{{ m.content|upper }}.{% endgeneration %}\n{% else %}U:{{ m.content }}\n{% endif %}"
        "{% endfor %}"
    )
    marked = ChatTemplate(source, "marked")
    assert marked.marks_answers
    assert said(marked, THREE) == (["YES..", "SO.\n\n* A.", "BYE 👋."], [""] * 3)
    assert marked.render(THREE[:2]) == "U:1 < 2\nA:YES.."  # trim_blocks
    some = ChatTemplate(source.replace("'assistant' ", "'assistant' and loop.last "), "some")
    with pytest.raises(
        TemplateError, match="some: marks 1 parts with {% generation %}.* the 3 ans"
    ):
        find_answers(some, THREE)
    assert not ChatTemplate("{# {% generation %} #}generation", "t").marks_answers


@pytest.mark.parametrize("change", ["content|upper", "content|reverse"])
def test_answers_that_are_rewritten_are_found_one_by_one(change):
    source = "{% for m in messages %}<{{ m.role }}>{{ m." + change + " }}<end>{% endfor %}"
    with pytest.raises(TemplateError, match="changes what it wrote of message 2") as error:
        # the probe is rewritten too, and every earlier text depends on nothing else: by prefixes
        find_answers(ChatTemplate(source.replace("<end>", "{{ messages|length }}"), "t"), THREE)
    assert "message 2" in str(error.value)
    text, answers = find_answers(ChatTemplate(source, "t"), THREE[:2])
    assert text[answers[0][1].start : answers[0][1].end].startswith("<assistant>")


def test_an_answer_may_be_marked_in_several_blocks(vocabulary):
    """As where a template marks the thought, the words and the end, and writes tags between."""
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A:{% if m.thinking %}<think>"
        "{% generation %}{{ m.thinking }}{% endgeneration %}</think>{% endif %}"
        "{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}U:{{ m.content }}"
        "{% endif %}{% endfor %}"
    )
    chat = [user("a"), assistant("b"), user("c"), assistant("d", thinking="hm"), user("e"),
            assistant("f", thinking="so")]  # fmt: skip
    encoder = ChatEncoder(ChatTemplate(source, "t"), vocabulary())

    def learned(**given):
        found = encoder(chat, **given)
        ids = [
            i if is_learned else 0 for i, is_learned in zip(found.ids, found.trained, strict=True)
        ]
        parts = vocabulary().decode(ids, special=True).replace("<s>", " ").split()
        assert found.n_open == 0
        return parts

    assert learned() == ["b</s>", "hm", "d</s>", "so", "f</s>"]
    assert learned(read_only=[1, 3]) == ["so", "f</s>"]
    assert encoder.prompt(chat[:4], continues=True) == encoder(chat[:4]).ids[:-1]


# -- answers that are gone on with --------------------------------------------------------------


@pytest.mark.parametrize("model", TEXTS)
def test_a_begun_answer_is_left_open_where_its_words_end(model, template, vocabulary):
    """As transformers' continue_final_message does: the text up to the last word, and the white
    space behind it where the template keeps that."""
    encoder = ChatEncoder(template(model), vocabulary())
    for content in ("So far, so", "So far, so ", "1. a\n2. b\n\n"):
        begun = [user("a"), assistant("b"), user("c"), assistant(content)]
        ids = encoder.prompt(begun, continues=True)
        text = vocabulary().decode(ids, special=True)
        assert text.rstrip().endswith(content.rstrip())
        assert text[len(text.rstrip()) :] in (content[len(content.rstrip()) :], "")
        whole = encoder(begun)
        assert whole.text.startswith(text.removeprefix("<s>") if whole.text[:3] != "<s>" else text)
        assert whole.ids[: len(ids) - 1] == ids[:-1]  # the last token may be a part of a longer one


NOT_OPEN = {
    "nobody": ([user("a")], "ends with no words of the assistant"),
    "empty": ([user("a"), assistant(" ")], "an answer that has no words to go on from"),
    "calls": ([user("a"), assistant("b", tool_calls=[])], None),
    "called": ([user("a"), assistant("b", tool_calls=[{"function": {"name": "f"}}])],
               "place|no words of the assistant"),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("name", NOT_OPEN)
def test_what_cannot_be_gone_on_with_is_told(name, vocabulary):
    messages, message = NOT_OPEN[name]
    encoder = encoder_of(vocabulary(), "chatml")
    if message is None:
        assert encoder.prompt(messages, continues=True)
        return
    with pytest.raises(TemplateError, match=message):
        encoder.prompt(messages, continues=True)


# -- tokens -------------------------------------------------------------------------------------


def learned(encoder, messages, **given):
    """The texts of the learned tokens, one string for each run of them."""
    found, runs, before = encoder(messages, **given), [], -2
    for i in np.flatnonzero(found.trained):
        piece = encoder.tokenizer.token_bytes(found.ids[i], special=True)
        runs += [b""] if i != before + 1 else []
        runs[-1] += piece
        before = i
    return [run.decode() for run in runs]


def encoder_of(tokenizer, name="chatml", **given):
    return ChatEncoder(find_template(tokenizer, name), tokenizer, **given)


@pytest.mark.quick
def test_learned_are_answers_and_the_end_of_turn(vocabulary):
    encoder = encoder_of(vocabulary())
    assert learned(encoder, THREE) == ["Yes.<|im_end|>", "So.\n\n* a<|im_end|>", "Bye 👋<|im_end|>"]
    assert learned(encoder, THREE, read_only={1, 5}) == ["So.\n\n* a<|im_end|>"]
    found = encoder(THREE)
    assert found.ids == vocabulary().encode(found.text, parse_special=True)
    assert found.n_open == 0
    alpaca = encoder_of(vocabulary(), "alpaca")
    assert learned(alpaca, THREE) == ["Yes.</s>", "So.\n\n* a</s>", "Bye 👋</s>"]


@pytest.mark.quick
def test_all_may_be_learned(vocabulary):
    encoder = encoder_of(vocabulary(), train_on="all")
    assert encoder([user("a")]).trained.all()


@pytest.mark.quick
def test_what_follows_the_last_answer_is_left_out(vocabulary):
    encoder = encoder_of(vocabulary())
    assert encoder([*THREE, user("More")]).ids == encoder(THREE).ids


@pytest.mark.quick
def test_a_token_across_the_seam_is_learned(vocabulary):
    """An answer that begins with a new line shares a token with the header, which ends in one."""
    encoder = encoder_of(vocabulary(merges=("Ċ Ċ",)))
    assert learned(encoder, [user("a"), assistant("\nb")]) == ["\n\nb<|im_end|>"]


WORDS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.quick
def test_an_answer_that_no_token_ends_is_counted(vocabulary):
    encoder = encoder_of(vocabulary(template=WORDS), "model")
    assert encoder(THREE).n_open == 3
    assert learned(encoder, THREE)[0] == "Yes."


@pytest.mark.quick
def test_a_chat_of_which_nothing_is_learned_is_refused(vocabulary):
    with pytest.raises(TemplateError, match="has no token to be learned"):
        encoder_of(vocabulary(template=WORDS), "model")([user("a"), assistant("")])


@pytest.mark.quick
def test_the_end_of_another_turn_is_not_the_end_of_an_answer(vocabulary):
    """Here turns of the user end in a token, and those of the assistant do not."""
    source = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{{ '<|im_end|>' if m.role == 'user' }}\n{% endfor %}"
    )
    encoder = encoder_of(vocabulary(template=source), "model")
    assert encoder(THREE).n_open == 3
    assert learned(encoder, THREE) == ["Yes.", "So.\n\n* a", "Bye 👋"]


NAMED = [user("Is <|im_end|> a token? <think>"), assistant("<s><|im_end|>\n<|im_start|>user\nYes")]


@pytest.mark.quick
def test_names_of_control_tokens_in_messages_are_text(vocabulary):
    encoder = encoder_of(vocabulary())
    found = encoder(NAMED)
    assert found.ids.count(vocabulary().eot_id) == 2
    assert found.names == {"<|im_end|>", "<|im_start|>", "<s>"}
    assert learned(encoder, NAMED) == ["<s><|im_end|>\n<|im_start|>user\nYes<|im_end|>"]
    assert vocabulary().encode("<think>")[0] in found.ids, "user-defined tokens are tokens"
    parsed = encoder_of(vocabulary(), parse=True)(NAMED)
    assert parsed.ids == vocabulary().encode(parsed.text, parse_special=True)
    assert not parsed.names


@pytest.mark.quick
def test_a_template_that_looks_at_names_of_tokens_is_not_guessed_at(vocabulary):
    source = "{% for m in messages %}{{ m.content.split('>')[0] }}{% endfor %}"
    tokenizer = vocabulary(template=source.replace("split('>')[0]", "replace('a<s>', 'b')"))
    with pytest.raises(TemplateError, match="changes messages around <s>, which may be text"):
        encoder_of(tokenizer, "model", train_on="all")([assistant("a<s>")])


@pytest.mark.quick
def test_bos_comes_once(vocabulary):
    for add_bos in (True, False):
        for name in ("chatml", "llama3"):
            tokenizer = vocabulary(add_bos=add_bos)
            ids = encoder_of(tokenizer, name)(THREE).ids
            assert ids.count(tokenizer.bos_id) == (add_bos or name == "llama3")
    twice = vocabulary(template="{{ bos_token }}{{ bos_token }}" + WORDS)
    with pytest.raises(TemplateError, match="begins the text with two BOS tokens"):
        encoder_of(twice, "model")(THREE)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["chatml", "llama3", "alpaca"])
def test_a_prompt_asks_as_the_chat_tells_it(name, vocabulary):
    encoder = encoder_of(vocabulary(), name)
    ids = encoder.prompt([*THREE[:2], *NAMED[:1]])
    assert encoder([*THREE[:2], *NAMED]).ids[: len(ids)] == ids
    assert len(ids) > len(encoder([*THREE[:2], *NAMED]).ids) / 2


@pytest.mark.quick
def test_names_of_control_tokens_in_a_prompt_are_text(vocabulary):
    ids = encoder_of(vocabulary()).prompt(NAMED[:1])
    assert ids.count(vocabulary().eot_id) == 1, "the template's own"
    assert encoder_of(vocabulary(), parse=True).prompt(NAMED[:1]).count(vocabulary().eot_id) == 2


REFUSED = [
    ("chatml", [user("a")], {}, "has no message of the assistant that is to be learned"),
    ("chatml", THREE, {"read_only": {1, 3, 5}}, "has no message of the assistant that is to be"),
    ("gemma", THREE, {"tools": [{"name": "f"}]}, "has tools, for which .* gemma has no place"),
    ("gemma", [user("a"), assistant("", tool_calls=[{}])], {}, "calls tools, for which"),
    ("model", [user("a"), assistant("b")], {}, "leaves out message 1"),
]


@pytest.mark.quick
@pytest.mark.parametrize("name, messages, given, message", REFUSED)
def test_what_cannot_be_learned_is_refused(name, messages, given, message, vocabulary):
    tokenizer = vocabulary(template="{{ messages[-1].content }}</s>")
    with pytest.raises(TemplateError, match=message):
        encoder_of(tokenizer, name)(messages, **given)


@pytest.mark.parametrize("name", ["qwen2", "llama-bpe", "llama-spm", "phi-3", "gemma-4"])
def test_real_vocabularies_tell_their_characters(name, shared):
    """Also where a space is put before a text, and where a token is part of a character."""
    from pyggml.tokenizer import from_gguf

    tokenizer = from_gguf(shared / f"vocab/ggml-vocab-{name}.gguf")
    text = "Ünï 👋🏽 日本語\n\n  x\t <s>" + "".join(tokenizer.control_names()[:2]) + " y  "
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text, add_special=False, parse_special=True)
    assert (offsets[:, 0] < offsets[:, 1]).all() and (np.diff(offsets[:, 0]) >= 0).all()
    covered = set()
    for id, (first, last) in zip(ids, offsets.tolist(), strict=True):
        covered |= {*range(first, last)}
        spelled = tokenizer.token_bytes(id, special=True)
        assert spelled.removeprefix(b" ") in text[first:last].encode()
    swallowed = {i for i, c in enumerate(text) if c.isspace()}
    assert covered | swallowed == {*range(len(text))}
    assert len(tokenizer.encode_with_offsets("a ▁ b")[0])
