"""The hyperparameters of real models, whose shapes the benchmarks have."""

from dataclasses import dataclass

N_VOCAB, HEAD = 151936, 128
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True)
class Size:
    """A model's hyperparameters; n_ff: of an expert, where there are experts."""

    n_embd: int
    n_ff: int
    n_layer: int
    n_head: int
    n_head_kv: int
    tied: bool = False
    n_expert: int = 0
    n_used: int = 0

    @property
    def architecture(self) -> str:
        return "qwen3moe" if self.n_expert else "qwen3"


SIZES = {
    "0.6B": Size(1024, 3072, 28, 16, 8, tied=True),
    "1.7B": Size(2048, 6144, 28, 16, 8, tied=True),
    "8B": Size(4096, 12288, 36, 32, 8),
    "70B": Size(8192, 28672, 80, 64, 8),
    "30B-A3B": Size(2048, 768, 48, 32, 4, n_expert=128, n_used=8),
}
