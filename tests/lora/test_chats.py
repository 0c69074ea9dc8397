"""Chats as training data: what is learned of them, those that are too long, what is refused."""

import json

import pytest

from pyggml.errors import DataError, TemplateError
from pyggml.lora import DataConfig, read_corpus
from pyggml.lora.data import TokenCache
from pyggml.lora.data.tokens.chats import CHAT, CUT, NAMED, OPEN

from chats import assistant, user
from chats import vocabulary as made_vocabulary

SYSTEM = {"role": "system", "content": "Be kind."}
ROUNDS = [SYSTEM, user("One?"), assistant("1"), user("Two?"), assistant("2"), user("3?"),
          assistant("Three.")]  # fmt: skip


@pytest.fixture
def vocabulary():
    return made_vocabulary


@pytest.fixture
def corpus(tmp_path, vocabulary):
    """Makes a corpus of chats, each a list of messages or a row."""

    def make(*chats, template=None, tool_use=None, cache=None, add_bos=False, **settings):
        rows = (c if isinstance(c, dict) else {"messages": c} for c in chats)
        path = tmp_path / "chats.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if template is None:
            settings.setdefault("chat_template", "chatml")
        settings = {"ctx": 200, "val_split": 0.0} | settings
        tokenizer = vocabulary(add_bos=add_bos, template=template, tool_use=tool_use)
        return read_corpus(path, tokenizer, DataConfig(**settings), cache)

    return make


def learned(corpus, tokenizer):
    """The texts of the trained targets, by window."""
    found = []
    for tokens, targets in zip(corpus.train.tokens, corpus.train.targets(), strict=True):
        ids = tokens[1:][targets].tolist()
        found.append(b"".join(tokenizer.token_bytes(i, special=True) for i in ids).decode())
    return found


PLAIN = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
)


@pytest.mark.quick
def test_chats_with_tools_have_the_file_s_template_for_them(corpus, vocabulary):
    tool_use = "{{ tools[0].function.name }}: {{ tools | length }} tools." + PLAIN
    row = {"messages": [user("Hi"), assistant("Ho")], "tools": [{"name": "clock"}]}
    made = corpus(row, row["messages"], template=PLAIN, tool_use=tool_use)
    texts = [vocabulary().decode(row, special=True) for row in made.train.tokens.tolist()]
    assert "clock: 1 tools.user:Hi" in texts[0] and texts[0].count("tools.") == 1
    assert learned(made, vocabulary()) == ["Ho<|im_end|>Ho<|im_end|>"]
    with pytest.raises(DataError, match="has tools, for which .* has no place"):
        corpus(row, template=PLAIN)
    with pytest.raises(DataError, match="leaves out 'clock' of the tool clock"):
        corpus(row, template=PLAIN, tool_use="{{ tools | length }} tools." + PLAIN)


@pytest.mark.quick
@pytest.mark.parametrize("asked", ["question", "query"])
def test_a_question_and_its_answer_are_a_chat_where_there_is_a_template(corpus, vocabulary, asked):
    row = {asked: "Who?", "context": "Ann.", "answer": "Ann"}
    chat = {"messages": [user("Ann.\nWho?"), assistant("Ann")]}
    for how in ({"template": PLAIN}, {"chat_template": "chatml"}):
        assert corpus(row, **how).digest() == corpus(chat, **how).digest()
    text = corpus({"prompt": "Ann.\nWho?", "completion": "Ann"}, template=PLAIN)
    columns = (f"prompt={asked}", "context=context", "completion=answer")
    assert corpus(row, template=PLAIN, columns=columns).digest() == text.digest()
    assert CHAT not in text.files[0].notes
    for row in ({"prompt": "a ", "answer": "b"}, {"input": "a ", "output": "b"}):
        assert CHAT not in corpus(row, template=PLAIN).files[0].notes


def test_without_a_template_a_question_is_text(corpus):
    row = {"question": "Who? ", "answer": "Ann"}
    made = corpus(row, chat_template="model")
    assert made.digest() == corpus({"prompt": "Who? ", "completion": "Ann"}).digest()


@pytest.mark.quick
def test_the_answers_and_their_ends_are_learned(corpus, vocabulary):
    share_gpt = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    made = corpus(ROUNDS, {"conversations": share_gpt})
    end = "<|im_end|>"
    assert learned(made, vocabulary()) == [f"1{end}2{end}Three.{end}Ho{end}"]
    assert made.files[0].notes[CHAT] == (2, "line 1")
    everything = corpus(ROUNDS, train_on="all")
    assert everything.train.n_targets() == len(vocabulary().encode("".join(
        f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in ROUNDS
    ), parse_special=True)) - 1  # fmt: skip


@pytest.mark.quick
def test_messages_without_weight_and_content_in_parts(corpus, vocabulary):
    first = {**assistant("1"), "weight": 0}
    parts = [{"type": "text", "text": "T"}, {"type": "text", "text": "wo"}]
    made = corpus([user("a"), first, user(parts), assistant(parts)])
    assert learned(made, vocabulary()) == ["Two<|im_end|>"]


@pytest.mark.quick
def test_alpaca_s_rows_have_alpaca_s_words(corpus, vocabulary):
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    made = corpus(row, chat_template="alpaca", ctx=400)
    text = vocabulary().decode(made.train.tokens[0], special=True)
    assert "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3</s>" in text
    assert learned(made, vocabulary()) == ["3</s>"]


@pytest.mark.quick
def test_a_chat_that_is_too_long_is_never_cut_without_a_word(corpus, vocabulary):
    wanted = "line 2 has 99 tokens, wanted at most 91, .* --long-chats drop, cut or truncate"
    with pytest.raises(DataError, match=wanted):
        corpus(ROUNDS[-2:], ROUNDS, ctx=90)
    dropped = corpus(ROUNDS[-2:], ROUNDS, ctx=90, long_chats="drop")
    assert (dropped.n_documents, dropped.files[0].n_dropped) == (1, 1)
    cut = corpus(ROUNDS[-2:], ROUNDS, ctx=90, long_chats="cut", packing=False)
    assert cut.files[0].notes[CUT] == (1, "line 2") and cut.files[0].n_dropped == 0
    text = vocabulary().decode(cut.train.tokens[1][cut.train.documents[1] >= 0], special=True)
    assert text.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nTwo?")
    assert learned(cut, vocabulary())[1] == "2<|im_end|>Three.<|im_end|>"
    heard = [*ROUNDS[:4], {**ROUNDS[4], "weight": 0}, *ROUNDS[5:]]
    assert learned(corpus(heard, ctx=90, long_chats="cut"), vocabulary()) == ["Three.<|im_end|>"]
    with pytest.raises(DataError, match="longer than a window"):
        corpus(ROUNDS[-2:], ctx=10, long_chats="cut")


@pytest.mark.quick
def test_chats_that_are_all_too_long_leave_nothing(corpus):
    for how in ("drop", "cut"):
        with pytest.raises(DataError, match=r"every row \(2\) is longer than a window of 16"):
            corpus(ROUNDS[:3], ROUNDS[:3], ctx=16, long_chats=how)


@pytest.mark.quick
def test_an_answer_that_nothing_ends_is_refused_or_told(corpus):
    words = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(DataError, match="no answer ends in a token that ends a turn, so the model"):
        corpus(ROUNDS, template=words)
    some = words.replace("\n", "{{ '</s>' if messages|length > 3 }}\n")
    assert corpus(ROUNDS, ROUNDS[1:3], template=some).files[0].notes[OPEN] == (1, "line 2")


@pytest.mark.quick
def test_names_of_control_tokens_in_messages_are_told(corpus, tmp_path):
    named = [user("What is <|im_end|>?"), assistant("A token.")]
    cache = TokenCache(tmp_path / "cache")
    for _ in range(2):  # the second from the cache
        assert corpus(ROUNDS, named, cache=cache).files[0].notes[NAMED] == (1, "line 2")
    parsed = corpus(named, special_tokens="parse")
    assert NAMED not in parsed.files[0].notes
    assert (
        len(parsed.train.tokens[0])
        and parsed.train.tokens.tolist() != corpus(named).train.tokens.tolist()
    )


REFUSED = [
    ([user("a"), assistant("b")], "{{ raise_exception('No!') }}", "line 1: .* says: No!"),
    ([user("a"), assistant("b")], "{{ messages[0].content }}", "line 1: .* leaves out message 2"),
    ([user("a"), assistant("b")], "{{ bos_token * 2 }}{{ messages[1].content }}", "line 1: .*"),
]


@pytest.mark.quick
@pytest.mark.parametrize("chat, template, message", REFUSED)
def test_rows_that_a_template_does_not_take_are_listed(chat, template, message, corpus):
    with pytest.raises(DataError, match=message):
        corpus(chat, template=template)


# As Gemma 4 has it: the results of a call, and what was said beside it, stand behind it.
RESULTS_FIRST = (
    "{% for m in messages %}{% if m.role != 'tool' %}"
    "{% if m.role == 'user' %}[user]{{ m.content }}[model]{% endif %}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
    "town={{ c.function.arguments.town }}</call><|im_end|>{% endfor %}"
    "{% if m.tool_calls %}{% for r in messages[loop.index:] if r.role == 'tool' %}"
    "<result>{{ r.content }}</result>{% endfor %}{% endif %}"
    "{{ m.content or '' if m.role != 'user' else '' }}"
    "{% if m.content and m.role != 'user' %}<|im_end|>{% endif %}{% endif %}{% endfor %}"
)


def test_results_inside_the_turn_of_a_call_are_not_learned(corpus, vocabulary):
    """Words beside a call stand behind the results: such a chat is refused, with a way out."""
    call = {"type": "function", "function": {"name": "sky", "arguments": {"town": "Oslo"}}}
    chat = [user("Oslo?"), assistant(None, tool_calls=[call]), assistant("It is grey.")]
    chat.insert(2, {"role": "tool", "content": "blue", "name": "sky"})
    found = corpus(chat, template=RESULTS_FIRST, chat_template="model")
    (said,) = learned(found, vocabulary())
    assert said == "<call>sky town=Oslo</call><|im_end|>It is grey.<|im_end|>"
    chat[1]["content"] = "I look."
    refused = "changes what it wrote of message 2.*; --train-on all learns every token of it"
    with pytest.raises(DataError, match=refused):
        corpus(chat, template=RESULTS_FIRST, chat_template="model")
    found = corpus(chat, template=RESULTS_FIRST, chat_template="model", train_on="all")
    assert "blue" in learned(found, vocabulary())[0]


@pytest.mark.quick
def test_without_a_template_there_are_no_chats(corpus):
    with pytest.raises(TemplateError, match="the model's file has no chat template: name one"):
        corpus(ROUNDS, chat_template="model")


@pytest.mark.quick
def test_bos_is_not_doubled(corpus, vocabulary):
    for template in ("llama3", "chatml"):
        made = corpus(ROUNDS, chat_template=template, add_bos=True, ctx=500, train_on="all")
        ids = made.train.tokens[0][made.train.documents[0] >= 0].tolist()
        assert ids.count(vocabulary().bos_id) == 1
