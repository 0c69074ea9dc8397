"""The languages that texts are written in, as py3langid tells them: naive Bayes over n-grams of
bytes, 139 languages, NumPy alone. Imported when asked for: its table takes half a second to unpack.
"""

from collections.abc import Iterable
from typing import Any

_SURE = 0.5  # probability from which on a language is named; those of single words are far below


def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def languages(texts: Iterable[str]) -> list[str]:
    """The ISO 639 code of each text's language; "" where it cannot be told, as of a text that is
    too short or is no prose."""
    identifier = _identifier()  # 70 MB, which are not kept
    each = (identifier.classify(text) for text in texts)
    return [code if probability >= _SURE else "" for code, probability in each]
