"""templates.json: what transformers' apply_chat_template writes for real models' templates.

    python make.py FOLDER_OF_TEMPLATES

With transformers 5 and Jinja2. For each *.jinja of the folder and each conversation of
`conversations.json`: the text, or null where the template refuses. The date is 2025-01-31.
"""

import datetime
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

HERE = Path(__file__).parent


class Date(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2025, 1, 31)


def main(folder):
    chat_template_utils.datetime = Date
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **names)
    conversations = json.loads((HERE / "conversations.json").read_text("utf-8"))
    found = {}
    for path in sorted(Path(folder).glob("*.jinja")):
        template, texts = path.read_text("utf-8"), {}
        for name, given in conversations.items():
            try:
                texts[name] = tokenizer.apply_chat_template(
                    **given, chat_template=template, tokenize=False
                )
            except Exception as error:
                print(f"{path.stem}, {name}: {type(error).__name__}: {error}")
                texts[name] = None
        found[path.stem] = texts
    text = json.dumps(found, ensure_ascii=False, indent=1)
    (HERE / "templates.json").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
