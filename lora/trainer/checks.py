"""What holds when a run begins: its settings fit its model and text, and all ranks are alike."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pyggml.errors import ConfigError, Fault, PyggmlError
from pyggml.lora.config import TrainConfig
from pyggml.lora.data import Corpus
from pyggml.lora.ranks import Ranks
from pyggml.lora.trainer.arithmetic import RunArithmetic
from pyggml.lora.trainer.identity import differences
from pyggml.model import Model


def check_settings(model: Model, corpus: Corpus, config: TrainConfig, ranks: Ranks) -> None:
    """Raises ConfigError if the settings do not fit, DataError for tokens that the model lacks."""
    faults: list[Fault] = []
    ctx = corpus.train.ctx
    if ctx > model.config.n_ctx:
        faults.append(("ctx", f"is {ctx}, wanted at most the model's {model.config.n_ctx}"))
    if config.compute not in ("auto", model.compute):
        fault = f"is {config.compute}, but the model was loaded with {model.compute}"
        faults.append(("compute", fault))
    routers = (name for name in model.parts.weights if name.endswith("ffn_gate_inp.weight"))
    if config.router_aux_loss_coef and not any(routers):
        faults.append(("router_aux_loss_coef", "wants a mixture of experts: this model has none"))
    cards = model.devices.beside_host
    if config.step_in_backward and cards:
        why = f"is True: on the CPU alone, and the model is on {cards[0].name}"
        faults.append(("step_in_backward", why))
    if config.step_in_backward and ranks.size > 1:
        why = f"is for one process, not {ranks.size}: a step waits for no other's gradient"
        faults.append(("step_in_backward", why))
    elif config.grad_accum < ranks.size:
        fault = f"is {config.grad_accum}: {ranks.size} ranks share the passes of a step"
        faults.append(("grad_accum", f"{fault}, wanted at least as many"))
    if corpus.validation is None:
        usual, names = TrainConfig(), ("patience", "keep_best", "val_windows", "val_every")
        needing = [n for n in names if getattr(config, n) not in (0, getattr(usual, n))]
        faults += [(name, "wants text that is held out, and none is") for name in needing]
    if (held := corpus.parts[-1].ctx) != ctx:
        faults.append(("ctx", f"is {ctx}, but the windows held out have {held} tokens"))
    if faults:
        raise ConfigError(faults)
    for part in corpus.parts:
        for block in part.blocks():
            model.check_tokens(block.tokens.reshape(-1))


def check_alike(ranks: Ranks, run: Mapping[str, Any], model: Model) -> None:
    """Raises PyggmlError if a rank makes another run than the first, or computes it otherwise.

    run: what makes a run what it is, see `pyggml.lora.trainer.identity`. All ranks call this.
    """
    if ranks.size == 1:
        return
    cards = ", ".join(b.about for b in model.devices.beside_host)
    computed = asdict(RunArithmetic.by(model)) | {"device": cards or "cpu"}
    told = ranks.texts(json.dumps([run, {"computed": computed}]))
    of_first = json.loads(told[0])
    for rank, text in enumerate(told):
        pairs = zip(json.loads(text), of_first, strict=True)
        faults = [fault for mine, first in pairs for fault in differences(mine, first)]
        if faults:
            raise PyggmlError(faults, f"rank {rank} and rank 0 must be alike: ")
