"""Peers against llama.cpp's own converter: the same tensors, bit for bit, and the same keys.

    PYTHONPATH=LLAMA_CPP:LLAMA_CPP/gguf-py python -m peers.converter [NAME ...]

prints what differs. Keys that only the converter writes are shown too; they hold usual values.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np

from peers import PEERS, Peer
from peers.files import GOLDEN
from peers.peer import N_VOCAB, torch_model


def convert(peer: Peer, folder: Path) -> Path:
    """The file that the converter makes."""
    from conversion import ModelType, get_model_architecture, get_model_class
    from conversion.base import ModelBase

    def no_vocabulary(self) -> None:
        self.gguf_writer.add_tokenizer_model("no_vocab")
        self.gguf_writer.add_vocab_size(N_VOCAB)

    torch_model(peer).save_pretrained(folder)
    words = {"model": {"vocab": {str(i): i for i in range(N_VOCAB)}}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(words))
    # With older names of settings, which the converter may ask for.
    hparams = ModelBase.load_hparams(folder, False) | dict(peer.config)
    found = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
    found.set_vocab = no_vocabulary
    found.no_mtp = True  # Qwen's blocks that predict further tokens, which no class makes
    path = folder / "converted.gguf"
    found(folder, gguf.LlamaFileType.MOSTLY_F16, path, eager=True, hparams=hparams).write()
    return path


def differences(peer: Peer, path: Path) -> list[str]:
    """Tensors and keys in which a converted file is not the peer's."""
    theirs, ours = (gguf.GGUFReader(p) for p in (path, GOLDEN / f"{peer.name}.gguf"))
    kind = theirs.fields["general.architecture"].contents()
    if kind != peer.architecture:
        return [f"converted as {kind}"]
    a, b = ({t.name: t for t in r.tensors} for r in (theirs, ours))
    same = {
        name
        for name in a.keys() & b.keys()
        if a[name].tensor_type == b[name].tensor_type and np.array_equal(a[name].data, b[name].data)
    }
    found = [f"{name} differs" for name in sorted((a.keys() | b.keys()) - same)]
    a, b = ({k: f.contents() for k, f in r.fields.items()} for r in (theirs, ours))
    own = sorted(k for k in a.keys() | b.keys() if k.startswith(f"{peer.architecture}."))
    return found + [f"{k}: {a.get(k)}, here {b.get(k)}" for k in own if a.get(k) != b.get(k)]


def main() -> None:
    for name in sys.argv[1:] or PEERS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = differences(PEERS[name], convert(PEERS[name], Path(folder)))
            except (KeyError, NotImplementedError, ValueError) as error:
                found = [f"no file: {error!r}"]
        sys.stdout.write("".join(f"{name}: {line}\n" for line in found or ["the same"]))


if __name__ == "__main__":
    main()
