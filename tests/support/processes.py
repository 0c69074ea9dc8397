"""Other processes of this Python, which are waited for."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python(*words, cwd=ROOT, **changes):
    """Python with these words, in a folder, with changes of the environment: how it ended, and what
    it wrote, as text."""
    command, env = [sys.executable, *map(str, words)], {**os.environ, **changes}
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=600
    )


def printed(script, *words, **changes):
    """What a script has printed, which must end well."""
    done = python("-P", "-c", script, *words, **changes)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
