"""Writes the golden files of the peers that are named, or of all."""

import sys

from peers import PEERS, golden
from peers.files import GOLDEN, save


def main() -> None:
    for name in sys.argv[1:] or PEERS:
        save(GOLDEN, PEERS[name], golden(PEERS[name]))
        sizes = {s: (GOLDEN / f"{name}.{s}").stat().st_size for s in ("gguf", "npz")}
        sys.stdout.write(f"{name}: {sizes}\n")


main()
