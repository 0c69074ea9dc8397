"""Hosts of one machine, for ranks: network namespaces, each with an address on one bridge."""

import os
import shlex
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

BESIDE = str(Path(sys.executable).parent)
MPIEXEC = shutil.which("mpiexec", path=BESIDE) or shutil.which("mpiexec")
_MPI = {  # of Open MPI, whose processes are root's here
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_odls_base_sigkill_timeout": "5",
    "NUMBA_NUM_THREADS": "1",
}
# What starts a command line on a host, as ssh does.
_AGENT = """#!/bin/sh
host=$1; shift
exec ip netns exec {prefix}${{host##*.}} unshare --uts sh -c "hostname $host && $*"
"""


class Hosts:
    """Some hosts with the addresses 10.73.0.1, 10.73.0.2 and so on."""

    def __init__(self, folder, n):
        self._prefix = f"pyggml-{os.getpid()}-"
        self._bridge, self.addresses = f"{self._prefix}0", [f"10.73.0.{i + 1}" for i in range(n)]
        self._agent = folder / "agent"
        self._agent.write_text(_AGENT.format(prefix=self._prefix))
        self._agent.chmod(0o700)

    def make(self):
        """Raises OSError or CalledProcessError where that is not allowed."""
        ip("netns", "add", self._bridge)
        ip("-n", self._bridge, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._bridge, "link", "set", "bridge", "up")
        for i, address in enumerate(self.addresses, 1):
            host, port = f"{self._prefix}{i}", f"port{i}"
            ip("netns", "add", host)
            link = ("type", "veth", "peer", "name", "eth", "netns", host)
            ip("-n", self._bridge, "link", "add", port, *link)
            ip("-n", self._bridge, "link", "set", port, "master", "bridge", "up")
            ip("-n", host, "addr", "add", f"{address}/24", "dev", "eth")
            ip("-n", host, "link", "set", "eth", "up")
            ip("-n", host, "link", "set", "lo", "up")
            self.on(address, "sysctl -qw net.ipv4.tcp_retries2=5")  # TCP gives up in 13 s

    def remove(self):
        """With all processes that are left there."""
        for i in range(len(self.addresses) + 1):
            name = f"{self._prefix}{i}"
            left = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for number in left.stdout.split():
                subprocess.run(["kill", "-KILL", number], check=False)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def on(self, address, line, **how):
        """A shell's line on one of the hosts."""
        return subprocess.run([self._agent, address, line], check=not how, **how)

    def mpiexec(self, n, words, **variables):
        """Its end on the first of n hosts, with a rank on each."""
        line = [MPIEXEC, "--host", ",".join(self.addresses[:n]), "-n", str(n)]
        line += ["--prtemca", "plm_ssh_agent", str(self._agent), sys.executable, "-P", *words]
        env = {**os.environ, **_MPI, **variables}
        how = {"capture_output": True, "text": True, "timeout": 120, "env": env}
        return self.on(self.addresses[0], shlex.join(line), **how)


@contextmanager
def hosts(folder, n):
    """Inside, there are n hosts."""
    made = Hosts(folder, n)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)
