"""Files on a disk that others use too: opened as what they are, replaced whole, held by one.

writing   a file or folder that appears whole or not at all, and what killed processes left of them
reading   regular files alone: no pipe that blocks, no device that never ends
locks     the system's locks on open files
own       links and owners: whose a file is
safe_tensors tensors by name in a file of safetensors
json_text JSON, each name once in an object; why a text is none
"""

import os
import sys
from pathlib import Path

from pyggml.files.own import behind_links, in_characters
from pyggml.files.reading import first_hole, open_regular, read_bytes
from pyggml.files.writing import new_folder, open_to_append, replacing

__all__ = [
    "behind_links", "first_hole", "in_characters", "new_folder", "open_regular", "open_to_append",
    "read_bytes", "replacing", "user_cache",
]  # fmt: skip


def user_cache() -> Path:
    """The folder where the operating system keeps caches of this user, ours in it.

    RuntimeError for a user without a home.
    """
    if sys.platform == "win32":
        root = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local")
    elif sys.platform == "darwin":
        root = Path.home() / "Library/Caches"
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "pyggml"
