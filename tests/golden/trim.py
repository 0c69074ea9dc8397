"""../shared/fixtures -> tests/golden/models: as much of the golden models as a clone can carry.

One file of each type and one architecture of each kind (rotary pairs beside or apart from each
other, biases, norms on heads, tied output, convolutions, scans), one adapter with its
gradients, every fourth row of logits. Names and keys are those of the full set; `rows` says which
rows of logits were kept.

    python tests/golden/trim.py
"""

import shutil
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
FULL = HERE.parents[1] / "../shared/fixtures"
KEPT = HERE / "models"
ROWS = np.arange(3, 48, 4)
# architecture -> its model file's type, the reference logits of that type, whether with adapter
MODELS = {
    "llama": ("Q8_0", ["Q8_0_exact"], False),
    "qwen2": ("Q4_K_M", ["Q4_K_M_exact"], False),
    "qwen3": ("F16", ["f32_hf", "f32_hf_lora"], True),
    "lfm2": ("Q4_K_M", ["Q4_K_M_exact"], False),
    "mamba": ("Q4_K_M", ["Q4_K_M_exact"], False),
}


def trimmed(architecture: str) -> dict[str, np.ndarray]:
    """The arrays of one architecture that are kept."""
    _, logits, adapter = MODELS[architecture]
    with np.load(FULL / f"{architecture}-golden.npz") as full:
        kept = {"tokens": full["tokens"], "rows": ROWS} | {k: full[k][ROWS] for k in logits}
        if adapter:
            kept |= {k: full[k] for k in full.files if k == "lora_loss" or k.startswith("grad/")}
        return kept


def main() -> None:
    KEPT.mkdir(exist_ok=True)
    for architecture, (kind, _, adapter) in MODELS.items():
        for part in (kind, "lora") if adapter else (kind,):
            name = f"{architecture}-{part}.gguf"
            shutil.copyfile(FULL / name, KEPT / name)
        np.savez_compressed(KEPT / f"{architecture}-golden.npz", **trimmed(architecture))
    for file in sorted(KEPT.iterdir()):
        print(f"{file.stat().st_size:>9} {file.name}")


if __name__ == "__main__":
    main()
