"""llama.cpp with several sequences in one batch, by the functions of llama.h."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from extras import need


class LlamaBatch:
    """A model with a context of several sequences; keys and values are kept in F32."""

    def __init__(self, path: Path, n_seq: int, n_ctx: int) -> None:
        self.lib = lib = need("llama_cpp")
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(
            str(path).encode(), lib.llama_model_default_params()
        )
        assert self._model, f"llama.cpp does not load {path}"
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch = n_seq * n_ctx, n_seq, n_seq * n_ctx
        params.type_k = params.type_v = params.flash_attn_type = 0
        params.n_threads = params.n_threads_batch = 2
        self._context = lib.llama_init_from_model(self._model, params)
        assert self._context, f"llama.cpp makes no context of {path}"
        self.n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._n_past = [0] * n_seq

    def __enter__(self) -> "LlamaBatch":
        return self

    def __exit__(self, *_: object) -> None:
        self.lib.llama_free(self._context)
        self.lib.llama_model_free(self._model)

    def feed(self, pieces: Mapping[int, Sequence[int]]) -> dict[int, np.ndarray]:
        """Logits after every token of these sequences, (T, n_vocab) each: one batch, in which
        their tokens take turns."""
        rows = [(i, n, t) for n, piece in pieces.items() for i, t in enumerate(piece)]
        rows.sort(key=lambda row: row[:2])
        batch = self.lib.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for at, (i, n, token) in enumerate(rows):
            batch.token[at], batch.pos[at] = int(token), self._n_past[n] + i
            batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = 1, n, 1
        error = self.lib.llama_decode(self._context, batch)
        self.lib.llama_batch_free(batch)
        assert not error, f"llama_decode gave {error}"
        logits = [
            np.ctypeslib.as_array(
                self.lib.llama_get_logits_ith(self._context, at), (self.n_vocab,)
            ).copy()
            for at in range(len(rows))
        ]
        for n, piece in pieces.items():
            self._n_past[n] += len(piece)
        return {
            n: np.stack([z for z, (_, of, _) in zip(logits, rows, strict=True) if of == n])
            for n in pieces
        }
