"""Marks in a rendered text: around generated text, and at the start of given text."""

import threading

# No characters of Unicode. What stands between the first two stands in {% generation %}; the third
# is put into messages by those who look for it afterwards.
OPEN, CLOSE, MARK = "\ufdd0", "\ufdd1", "\ufdd2"


class Marking(threading.local):
    """Whether this thread's templates write OPEN and CLOSE around {% generation %} blocks."""

    on = False


MARKING = Marking()
