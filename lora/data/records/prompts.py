"""Records of prompts, to which the model writes answers that are judged by the whole record.

parts                                                     row
messages [system, tools]                                  PromptRow, of messages
instruction [input, system, history, tools]               PromptRow, of messages
prompt [context, system, history, tools]                  PromptRow, of a text or of messages
"""

from pyggml.chat.messages import BadValue
from pyggml.lora.data.records.asking import (
    check_not_learned,
    is_chat,
    opening_of,
    prompt_text,
    tools,
)
from pyggml.lora.data.records.names import CHAT, INSTRUCTION, PROMPT, QUESTION
from pyggml.lora.data.records.rows import PromptRow, Row, RowPlace
from pyggml.lora.data.records.shape import Cells, Shape
from pyggml.lora.data.records.training import OF_CHATS, OF_INSTRUCTIONS, OF_PROMPTS


def _prompt(place: RowPlace, cells: Cells) -> Row:
    if not is_chat(cells):
        text = prompt_text(cells)
        return PromptRow(place, text, is_question=cells.names.get("prompt") in QUESTION)
    opening = opening_of(cells)
    check_not_learned(opening.weights)
    if opening.messages[-1]["role"] == "assistant":
        fault = "ends in an answer of the assistant, wanted a message that is to be answered"
        raise BadValue(fault, says_all=True)
    return PromptRow(place, opening.messages, tools(cells))


PROMPT_SHAPES = (
    Shape((CHAT,), _prompt, OF_CHATS),
    Shape((INSTRUCTION,), _prompt, OF_INSTRUCTIONS),
    Shape((PROMPT,), _prompt, OF_PROMPTS),
)
