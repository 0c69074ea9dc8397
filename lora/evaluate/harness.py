"""A model for lm-evaluation-harness, under the name "pyggml": an extra, `pyggml[harness]`.

    lm_eval.simple_evaluate(model=HarnessModel(model), tasks=["hellaswag"])
    python -m pyggml.lora.evaluate.harness run --model pyggml --model_args \\
        pretrained=model.gguf,lora=adapter.gguf --tasks hellaswag

The second line is `lm_eval` itself, which knows no models but its own until this file is imported.
Tokens, cuts and prompts are those of its models of transformers.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from pyggml import threads as all_threads
from pyggml.chat import MODEL, ChatTemplate, find_template
from pyggml.errors import ConfigError
from pyggml.generation import Sampling
from pyggml.lora.evaluate.passes import Continuation, predict
from pyggml.lora.evaluate.scorer import Predictions
from pyggml.lora.evaluate.written import AnswerWriter
from pyggml.model import Model, load

_ANSWER = 256  # tokens of an answer where a task names no number, as in the harness
_CUTS: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # of tokens that may be sampled
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
Request = tuple[tuple[str, str], list[int], list[int]]  # texts, tokens read, tokens scored


@register_model("pyggml")
class HarnessModel(TemplateLM):  # type: ignore[misc] # the harness has no types
    """A model, or its file with adapters: `pretrained=base.gguf,lora=a.gguf+b.gguf`.

    run_on       the device, as `pyggml.load` has it
    max_length   the most tokens that are read; None: the model's context

    batch_size, max_batch_size and device are given by the harness, the last as cuda:0 unless it is
    told another, and count for nothing: passes are filled as they fit.
    """

    def __init__(
        self,
        pretrained: str | Model,
        lora: str | None = None,
        compute: str = "auto",
        run_on: str = "cpu",
        threads: int = 0,
        max_length: int | None = None,
        chat_template: str = MODEL,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        adapters = lora.split("+") if lora else None
        if isinstance(pretrained, str):
            pretrained = load(pretrained, adapters, compute, device=run_on)
            all_threads.set(threads)
        self.model, self._template_name = pretrained, chat_template
        most = self.model.config.n_ctx
        if max_length is not None and not 2 <= max_length <= most:
            raise ConfigError([("max_length", f"is {max_length}, wanted 2 to the model's {most}")])
        self.max_length = max_length or most

    # -- tokens ---------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        t = self.model.tokenizer
        ends = (t.eos_id, t.eot_id)
        return next((one for one in ends if one is not None), 0)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that follows nothing."""
        bos = self.model.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **how: Any
    ) -> list[int]:
        """With BOS where the tokenizer adds one and the text has none, unless it shall not."""
        t = self.model.tokenizer
        ids = list(t.encode(string, add_special=False, parse_special=True))
        bos = t.bos_id if t.add_bos and add_special_tokens is not False else None
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    # -- what is asked --------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **how: Any
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether it is the likeliest."""
        answers = [(float(-p.losses.sum()), bool(p.right.all())) for p in self._predict(requests)]
        for (texts, *_), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _predict(self, requests: Sequence[Request]) -> list[Predictions]:
        most, continuations = self.max_length + 1, list[Continuation]()
        for _, context, scored in requests:
            ids = (*context, *scored)[-most:]
            continuations.append(Continuation(ids, max(len(ids) - len(scored), 1)))
        self._warn_of_cuts(sum(len(context) + len(own) > most for _, context, own in requests))
        return predict(self.model, continuations)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text, in windows of the longest context."""
        sums = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [(("", text), *make_disjoint_window(window)) for window in windows]
            sums.append(sum(float(-p.losses.sum()) for p in self._predict(pairs)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), sums[-1])
        return sums

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """The likeliest text after each prompt, or a sampled one where the task says so."""
        arguments = [request.args for request in requests]
        tasks = [(self.tok_encode(prompt), how, self._n_answer(how)) for prompt, how in arguments]
        self._warn_of_cuts(sum(len(ids) + n > self.max_length for ids, _, n in tasks))
        tasks = [(ids[n - self.max_length :], how, n) for ids, how, n in tasks]
        writer = AnswerWriter(self.model, max((len(ids) + n for ids, _, n in tasks), default=1))
        texts = list[str]()
        for each, (ids, how, n) in zip(arguments, tasks, strict=True):
            texts.append(writer.write(tuple(ids), _sampling(how), n))
            self.cache_hook.add_partial("generate_until", each, texts[-1])
        return texts

    def _n_answer(self, how: dict[str, Any]) -> int:
        """The most tokens of an answer."""
        n = next((int(how[name]) for name in _LENGTHS if name in how), _ANSWER)
        return min(n, self.max_length - 1)

    def _warn_of_cuts(self, n: int) -> None:
        if n:
            warnings.warn(f"{n:,} requests are longer than the context of {self.max_length:,} "
                          "tokens: their beginnings are left out", stacklevel=3)  # fmt: skip

    # -- chats ----------------------------------------------------------------------------------

    @cached_property
    def _template(self) -> ChatTemplate:
        return find_template(self.model.tokenizer, self._template_name)

    @property
    def tokenizer_name(self) -> str:
        return f"{self.model.file.path.name} {self._template_name}".replace("/", "_")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._template.source if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Without add_generation_prompt the last message is the assistant's, to be gone on with."""
        *before, last = chat_history
        if add_generation_prompt:
            return self._template.render(chat_history, add_generation_prompt=True)
        return self._template.render(before, add_generation_prompt=True) + last["content"]


def _sampling(how: dict[str, Any]) -> Sampling:
    """That of a task's generation_kwargs: greedy, or of all tokens but those that they cut off."""
    if idle := sorted(how.keys() - {"until", "do_sample", "temperature", *_LENGTHS, *_CUTS}):
        warnings.warn(f"generation_kwargs {', '.join(idle)}: have no effect here", stacklevel=3)
    until = how.get("until") or []
    stop = tuple(filter(None, [until] if isinstance(until, str) else until))
    temperature = float(how.get("temperature") or 0.0)
    if not how.get("do_sample", temperature > 0) or temperature == 0:
        return Sampling(temperature=0.0, stop=stop)
    cuts = {name: how.get(name, off) for name, off in _CUTS.items()}
    return Sampling(temperature=temperature, stop=stop, **cuts)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
