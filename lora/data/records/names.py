"""What the columns of rows are called, and what a name means in the tools that write rows: TRL,
LLaMA-Factory, Axolotl, ms-swift, distilabel, lm-evaluation-harness, and the sets of UltraFeedback
and Orca."""

from collections.abc import Mapping
from functools import lru_cache
from string import ascii_uppercase

from pyggml.chat.messages import MARKS, MEDIA, OTHER_MARKS

Names = tuple[str, ...]  # of one part of a row, each as good as another; the first is the part's

PROMPT = ("prompt", "question", "query", "input")
QUESTION = ("question", "query")  # of them, those that ask somebody
ANSWER = ("completion", "response", "answer", "output", "generation")
INSTRUCTION, GIVEN = ("instruction",), ("input", "context")  # Alpaca's, and Dolly's
CONTEXT = ("context", "article", "passage")
SYSTEM = ("system", "system_prompt", "system_message")
HISTORY, TOOLS, TEXT = ("history",), ("tools",), ("text",)
CHAT = ("messages", "conversations", "conversation")
CHOSEN, REJECTED = ("chosen", "chosen_response"), ("rejected", "rejected_response")
ALTERNATIVE = ("rejected_response", "rejected_messages")  # beside an answer that is chosen
LABEL = ("label", "kto_tag")
CLASS = ("label",)
ANCHOR, POSITIVE, NEGATIVE = ("anchor", "query"), ("positive",), ("negative",)
CHOICES, KEY = ("choices", "options"), ("answer", "answerKey")
KEY_AGAIN = ("answer_index", "answer_idx")
LETTERS = tuple(ascii_uppercase[:10])  # columns of choices

# Further names of those tools, by meaning; no row here has them.
_PROMPTS = """inputs prompts questions instructions user human user_prompt user_message request
    problem document dialog dialogue dialogs chat turns segments message_1 unanswerable_question
    prompt_messages"""
_ANSWERS = """completions responses answers outputs generations rejected_responses preferred_output
    non_preferred_output preferred dispreferred reply target targets solution summary assistant gpt
    bot revision corrected final_answer message_2 reasoning thinking reasoning_content"""
_SYSTEMS = "system_instruction sys_prompt sys"
_KEYS = "answer_key correct_answer"

# What a name means → the names of columns, here and in those tools.
MEANINGS: Mapping[str, Names] = {
    "a prompt": (*PROMPT, *INSTRUCTION, *CONTEXT, *CHAT, *TEXT, *_PROMPTS.split()),
    "a system text": (*SYSTEM, *_SYSTEMS.split()),
    "earlier rounds": HISTORY,
    "which are tools": (*TOOLS, "functions"),
    "an answer": (*ANSWER, *CHOSEN, *REJECTED, *ALTERNATIVE, *_ANSWERS.split()),
    "which --objective kto or classify learns from": LABEL,
    "among which `pyggml eval` asks": (*CHOICES, *LETTERS, "endings"),
    "the key of a question": (*KEY[1:], *KEY_AGAIN, *_KEYS.split()),
    "a mark of what is learned": (*MARKS, *OTHER_MARKS),
    "which is no text": MEDIA,
}
_BY_NAME = {name: meaning for meaning, names in MEANINGS.items() for name in names}


@lru_cache(maxsize=1 << 12)
def meaning_of(name: str) -> str:
    """What a column's name means, as the end of a sentence; "" for a name that no tool gives one.

    Case, spaces and hyphens do not count, but in the letters of choices.
    """
    folded = name.strip().lower().replace(" ", "_").replace("-", "_")
    return _BY_NAME.get(name) or _BY_NAME.get(folded, "")
