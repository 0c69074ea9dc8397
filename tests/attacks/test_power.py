"""Power cuts: what a disk may be left with, and that commands leave their output whole."""

import shutil
from pathlib import Path

import pytest

from attacks.kills import SCENARIOS, write_inputs
from attacks.power import attack, faults

AT = Path("/run")
OPEN = 'openat(AT_FDCWD</run>, ".a.partial", O_WRONLY|O_CREAT|O_TRUNC, 0666) = 3</run/.a.partial>'
WRITE, SYNC = 'write(3</run/.a.partial>, ""..., 9) = 9', "fsync(3</run/.a.partial>) = 0"
RENAME, SYNC_NAME = 'rename(".a.partial", "a.gguf") = 0', "fsync(3</run>) = 0"
ORDER = (OPEN, WRITE, SYNC, RENAME, SYNC_NAME)


class Output:
    """The folder of a run that wrote one file, as far as the replay looks at it."""

    def __truediv__(self, name):
        return AT / name

    def __str__(self):
        return str(AT)

    def rglob(self, pattern):
        return [Written("/run/a.gguf")]


class Written(type(AT)):
    def is_file(self):
        return True


TRAIN = next(s for s in SCENARIOS if s.output == "a.gguf")


@pytest.mark.parametrize(
    ("calls", "fault"),
    [
        (ORDER, ""),
        ((OPEN, WRITE, RENAME, SYNC_NAME), "may be torn"),
        ((OPEN, WRITE, RENAME, SYNC, SYNC_NAME), "may be torn"),
        ((OPEN, SYNC, WRITE, RENAME, SYNC_NAME), "may be torn"),
        (ORDER[:-1], "may be lost"),
        ((*ORDER[:-1], SYNC), "may be lost"),
    ],
)
def test_orders_of_writing_and_syncing(calls, fault):
    n_states, wrong = faults(TRAIN, calls, Output(), [])
    assert n_states >= len(calls)
    assert (fault in " ".join(wrong)) if fault else not wrong


def test_a_checkpoint_that_was_there_stays():
    """The first one may go once the second one's name is on the disk."""

    def checkpoint(number):
        names = ("a.gguf", f"points/{number}"), (".a.partial", "points/.partial")
        made = [call.replace(*names[0]).replace(*names[1]) for call in ORDER]
        return [*made[:-1], "fsync(3</run/points>) = 0"]

    def remove(number):
        return f'unlink("points/{number}") = 0'

    early = [*checkpoint(1), *checkpoint(2)[:-1], remove(1), checkpoint(2)[-1]]
    for calls, is_wrong in (([*checkpoint(1), *checkpoint(2), remove(1)], False), (early, False)):
        _, wrong = faults(TRAIN, [*calls, *ORDER], Output(), [])
        assert any("no checkpoint" in fault for fault in wrong) == is_wrong
    _, wrong = faults(TRAIN, [*checkpoint(1), remove(1), *checkpoint(2), *ORDER], Output(), [])
    assert any("no checkpoint" in fault for fault in wrong)


@pytest.mark.skipif(  # calls are recorded by it; the orders above are replayed without
    shutil.which("strace") is None, reason="needs strace, which Linux alone has"
)
def test_a_folder_survives(tmp_path):
    write_inputs(tmp_path)
    assert attack(next(s for s in SCENARIOS if s.name == "convert"), tmp_path) == 0
