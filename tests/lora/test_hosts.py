"""Ranks of three hosts that reach each other by TCP alone: network namespaces of this machine."""

import json
import subprocess
import time

import pytest
import ranked_run
from extras import needs
from hosts import MPIEXEC, hosts

from pyggml.lora.trainer.folder import existing, newest

pytestmark = [
    pytest.mark.slow,
    needs("mpi4py"),
    pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec here: an MPI, such as openmpi"),
]
DOWN = ["ip", "link", "set", "eth", "down"]


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    try:
        with hosts(tmp_path_factory.mktemp("hosts"), 3) as made:
            yield made
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: wanted root, and ip of iproute2 ({error})")


@pytest.fixture(scope="module")
def whole(tiny):
    """What one process makes."""
    trainer = ranked_run.trainer_of(tiny)
    trainer.run(progress=False)
    return json.loads(json.dumps(ranked_run.outcome(trainer)))


def ranked(hosts, n, run, **variables):
    """What the ranks print, of n of these hosts, and mpiexec's end."""
    done = hosts.mpiexec(n, [ranked_run.__file__, json.dumps([run])], **variables)
    lines = [line[line.index("[{") :] for line in done.stdout.splitlines() if "[{" in line]
    return [json.loads(line)[0] for line in lines], done


def test_three_hosts_make_the_run_of_one_process_bit_for_bit(three, tiny, whole):
    ends, done = ranked(three, 3, {"model": str(tiny)})
    assert sorted(end["rank"] for end in ends) == [0, 1, 2], done.stderr
    assert [end["outcome"] for end in ends] == [whole] * 3


# A run ends by its own limit, or by that of the launcher's daemons, whichever is first. Open MPI's
# mpiexec then ends before the ranks, with 0.
SOON = {f"PRTE_MCA_oob_tcp_keepalive_{name}": "1" for name in ("time", "intvl", "probes")}


@pytest.mark.parametrize(
    ("words", "limit", "variables", "told", "codes"),
    [
        (
            ["kill", "-STOP", "{}"],
            4.0,
            {},
            "without rank 2 on 10.73.0.3: it hangs, its host is",
            {2},
        ),
        (DOWN, 4.0, {}, "without rank 2 on 10.73.0.3: it hangs, its host is", {1, 2}),
        (DOWN, 600.0, SOON, "on node 10.73.0.3", {0}),
    ],
    ids=["stopped", "unreachable", "launcher"],
)
def test_a_silent_host_ends_the_run_and_two_go_on(
    three, tiny, whole, tmp_path, words, limit, variables, told, codes
):
    points = tmp_path / "points"
    run = {"model": str(tiny), "checkpoint_dir": str(points), "checkpoint_every": 0}
    _, done = ranked(three, 3, {**run, "stop": [2, 4, limit, words]}, **variables)
    three.on("10.73.0.3", "ip link set eth up")
    assert done.returncode in codes, done.stderr
    assert (done.stdout + done.stderr).count(told) == 1, done.stdout + done.stderr
    until = time.monotonic() + 20
    while not existing(points) and time.monotonic() < until:
        time.sleep(0.1)
    assert newest(points).name == "step-00000003.gguf"
    ends, done = ranked(three, 2, {**run, "resume": str(newest(points))})
    assert [end["outcome"][:2] for end in ends] == [whole[:2]] * 2, done.stderr
