"""Messages, and where the texts that transformers makes of some are kept."""

import datetime
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden" / "chat"
DAY = datetime.date(2025, 1, 31)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}
