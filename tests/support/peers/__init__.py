"""Small random models of transformers' classes, as the GGUF files that llama.cpp's converter makes.

    python -m peers gptneox phi2        (in tests/support; needs torch and transformers)

writes tests/golden/peers/NAME.gguf and NAME.npz: a model with its logits, and the loss and
gradients of an adapter, all by PyTorch in float32. tests/models/test_peers.py holds pyggml against
these files and against llama.cpp, and these files against PyTorch. A new architecture needs no more
than a Peer in one of the files here, entered in PEERS. `python -m peers.converter` compares the
files with those of llama.cpp's converter.
"""

from peers.dense import DENSE
from peers.experts import MIXTURES
from peers.peer import Peer, golden
from peers.recurrent import RECURRENT
from peers.variants import VARIANTS

PEERS: dict[str, Peer] = {peer.name: peer for peer in (*DENSE, *VARIANTS, *RECURRENT, *MIXTURES)}

__all__ = ["PEERS", "Peer", "golden"]
