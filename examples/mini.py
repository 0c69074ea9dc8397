"""All of pyggml in one file of NumPy: a quantised model learns a text through LoRA, and writes.

usage: python examples/mini.py [MODEL.gguf TEXT.txt]        (default: model and text of the demo)

It opens a GGUF file, builds a graph while it computes, walks that graph back for the gradients of A
and B, and takes steps of AdamW. Nothing of pyggml is imported; each part says where its fast twin
lives, and a test holds it to that twin. T counts tokens, n numbers of a row.
"""

import sys
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

# -- a file: metadata and tensors. Fast twin: pyggml/gguf ------------------------------------------
NUMBERS, STRING, ARRAY = "BbHhIif?--Qqd", 8, 9  # by the file's number of a kind: NumPy's letter


class Gguf:
    """metadata: name → value. tensors: name → Weight, whose bytes are mapped from the disk."""

    def __init__(self, path):
        self.bytes, self.at = np.memmap(path, np.uint8, mode="r"), 0
        if self.take(1, "<u4")[0] != 0x46554747 or self.take(1, "<u4")[0] not in (2, 3):
            sys.exit(f"{path}: no GGUF file of version 2 or 3")
        n_tensors, n_keys = self.take(2, "<u8")
        self.metadata = {self.value(STRING): self.value(self.value(4)) for _ in range(n_keys)}
        abouts = []
        for _ in range(n_tensors):
            name, n_axes = self.value(STRING), self.value(4)
            abouts.append((name, self.take(n_axes, "<u8")[::-1], self.value(4), self.value(10)))
        data = self.bytes[self.at + -self.at % self.metadata.get("general.alignment", 32) :]
        self.tensors = {name: Weight(shape, kind, data[at:]) for name, shape, kind, at in abouts}

    def take(self, n, dtype):
        first, self.at = self.at, self.at + int(n) * np.dtype(dtype).itemsize
        return self.bytes[first : self.at].view(dtype)

    def value(self, kind):
        if kind == STRING:
            return self.take(self.value(10), "u1").tobytes().decode()
        if kind != ARRAY:
            return self.take(1, NUMBERS[kind])[0].item()
        inner, n = self.value(4), self.value(10)
        if inner in (STRING, ARRAY):
            return [self.value(inner) for _ in range(n)]
        return self.take(n, NUMBERS[inner])


# -- weight types: blocks of bytes → numbers. Fast twin: pyggml/quants -----------------------------
def half(blocks, at):  # the float16 of each block that begins at a byte, as (blocks, 1)
    return blocks[:, at : at + 2].copy().view("<f2").astype("f4")


def q4_k(blocks):
    """w = d · s · q − dmin · m: eight groups of 32 have 6 bits for s and for m, 4 for each q."""
    low, middle, high = (blocks[:, i : i + 4] for i in (4, 8, 12))
    s = np.hstack([low & 63, (high & 15) | (low >> 6 << 4)])
    m = np.hstack([middle & 63, (high >> 4) | (middle >> 6 << 4)])
    q = blocks[:, 16:].reshape(-1, 4, 1, 32)
    q = np.concatenate([q & 15, q >> 4], axis=2).reshape(-1, 8, 32)
    return (half(blocks, 0) * s)[..., None] * q - (half(blocks, 2) * m)[..., None]


def q6_k(blocks):
    """w = d · s · (q − 32): sixteen groups of 16 have a signed byte s; q is 4 bits and 2 bits."""
    low, high = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    q = np.concatenate([low & 15, low >> 4], axis=2) | high << 4
    s = half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return s[..., None] * (q.astype(np.int8).reshape(-1, 16, 16) - 32)


# By ggml's number of a type: the numbers of a block, its bytes, and what unpacks (blocks, bytes).
F32, F16 = (1, 4, lambda b: b.view("<f4")), (1, 2, lambda b: b.view("<f2").astype("f4"))
Q8_0 = (32, 34, lambda b: half(b, 0) * b[:, 2:].view(np.int8))  # w = d · q
TYPES = {0: F32, 1: F16, 8: Q8_0, 12: (256, 144, q4_k), 14: (256, 210, q6_k)}


class Weight:
    """A frozen array, which stays packed: it is unpacked for each product, and forgotten."""

    def __init__(self, shape, kind, data):
        if kind not in TYPES:
            sys.exit(f"a tensor has ggml's type {kind}; wanted F32, F16, Q8_0, Q4_K or Q6_K")
        size, n_bytes, self.unpack = TYPES[kind]
        self.shape = tuple(map(int, shape))
        self.blocks = data[: int(np.prod(shape)) // size * n_bytes].reshape(-1, n_bytes)

    def numbers(self):
        return self.unpack(np.asarray(self.blocks)).reshape(self.shape)


# -- a graph that grows as it computes, its walk back, ops. Fast twins: pyggml/graph, backward, ops
def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Tensor:
    """An array, the tensors it was made of, and the rule that takes its gradient to theirs."""

    def __init__(self, data, sources=(), rule=lambda dy: ()):
        self.data, self.sources, self.rule, self.grad = data, sources, rule, None

    def backward(self):
        """d(self)/d(t) as t.grad of every tensor t that self was made of, the last ones first."""
        order = {}  # each tensor behind its sources

        def visit(t):
            for source in t.sources if t not in order else ():
                visit(source)
            order.setdefault(t)

        visit(self)
        self.grad = np.float32(1)
        for t in reversed(order):
            for source, g in zip(t.sources, t.rule(t.grad), strict=True):
                source.grad = g if source.grad is None else source.grad + g

    def __add__(self, other):
        return Tensor(self.data + other.data, (self, other), lambda dy: (dy, dy))

    def __mul__(self, s):
        return Tensor(self.data * s, (self,), lambda dy: (dy * s,))

    def reshape(self, *to):
        return Tensor(self.data.reshape(to), (self,), lambda dy: (dy.reshape(self.data.shape),))

    def product(self, w):
        """x (T, k) · wᵀ (k, n), w frozen or trained. Fast twin: pyggml/kernels/gemm, in tiles."""
        x = self.data
        if isinstance(w, Weight):
            return Tensor(x @ w.numbers().T, (self,), lambda dy: (dy @ w.numbers(),))
        return Tensor(x @ w.data.T, (self, w), lambda dy: (dy @ w.data, dy.T @ x))

    def rms_norm(self, w, eps):
        """w · x / √(mean x² + ε) over the last axis, w (n,) frozen."""
        x, mean = self.data, lambda a: a.mean(-1, keepdims=True)
        r = 1 / np.sqrt(mean(x**2) + eps)
        return Tensor(x * r * w, (self,), lambda dy: (r * (dy * w - x * r**2 * mean(dy * w * x)),))

    def rope(self, turns, interleaved):
        """Pairs of numbers of x (T, heads, n) as complex numbers, times turns (T, 1, n / 2) on the
        unit circle. A pair is 2i, 2i + 1, or i, i + n / 2. The gradient turns back."""

        def turn(a, turns):
            n, axis = a.shape[-1] // 2, -1 if interleaved else -2
            pair = (a[..., ::2], a[..., 1::2]) if interleaved else (a[..., :n], a[..., n:])
            z = (pair[0] + 1j * pair[1]) * turns
            return np.stack([z.real, z.imag], axis).reshape(a.shape)

        return Tensor(turn(self.data, turns), (self,), lambda dy: (turn(dy, turns.conj()),))

    def attention(self, k, v):
        """softmax(q kᵀ / √d, no token sees a later one) v, q (T, heads, d); some heads share one of
        k and v. Fast twin: pyggml/kernels/attention, which never makes (T, T)."""
        q, (t, n, d) = self.data, self.data.shape
        keys, values = (np.repeat(x.data, n // x.data.shape[1], axis=1) for x in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, keys) * np.float32(d**-0.5)
        p = softmax(np.where(np.tri(t, dtype=bool), scores, np.float32(-np.inf)))

        def rule(dy):
            dp = np.einsum("ihd,jhd->hij", dy, values)
            ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * np.float32(d**-0.5)
            dk, dv = np.einsum("hij,ihd->jhd", ds, q), np.einsum("hij,ihd->jhd", p, dy)
            shared = (g.reshape(*k.data.shape[:2], -1, d).sum(2) for g in (dk, dv))
            return np.einsum("hij,jhd->ihd", ds, keys), *shared

        return Tensor(np.einsum("hij,jhd->ihd", p, values), (self, k, v), rule)

    def swiglu(self, up):
        """silu(x) · up; silu(x) = x · σ(x), whose slope is σ(x) · (1 + x · (1 − σ(x)))."""
        x, u, s = self.data, up.data, 1 / (1 + np.exp(-self.data))
        slope = s * (1 + x * (1 - s))
        return Tensor(x * s * u, (self, up), lambda dy: (dy * u * slope, dy * x * s))

    def cross_entropy(self, targets):
        """Mean −ln p of targets (T,). Fast twin: pyggml/ops/loss, which never has all logits."""
        p, rows, n = softmax(self.data), np.arange(len(targets)), np.float32(len(targets))
        loss, g = -np.log(p[rows, targets]).mean(), p / n
        g[rows, targets] -= 1 / n
        return Tensor(loss, (self,), lambda dy: (dy * g,))


# -- a decoder, and its updates of low rank. Fast twins: pyggml/models, pyggml/lora/adapter --------
LINEAR = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


class Model:
    """Llama's and Qwen's shape: blocks of attention and of a gated feed-forward network."""

    def __init__(self, file):
        m, self.weights, self.pairs = file.metadata, file.tensors, {}
        if (arch := m["general.architecture"]) not in ("llama", "qwen2", "qwen3"):
            sys.exit(f"the architecture is {arch}; wanted llama, qwen2 or qwen3")
        self.n_layer, n = m[f"{arch}.block_count"], m[f"{arch}.attention.head_count"]
        self.heads = {"q": n} | dict.fromkeys("kv", m.get(f"{arch}.attention.head_count_kv", n))
        self.eps = np.float32(m[f"{arch}.attention.layer_norm_rms_epsilon"])
        self.base, self.interleaved = m.get(f"{arch}.rope.freq_base", 1e4), arch == "llama"

    def attach(self, rank, alpha, seed=0):
        """A (rank, k), drawn, and B (n, rank), zeros, of every linear module; returns them all."""
        rng, self.factor = np.random.default_rng(seed), np.float32(alpha / rank)
        for name, w in self.weights.items():
            if name.endswith(".weight") and name.split(".")[-2] in LINEAR:
                (n, k), most = w.shape, w.shape[1] ** -0.5
                a = rng.uniform(-most, most, (rank, k)).astype("f4")
                self.pairs[name] = Tensor(a), Tensor(np.zeros((n, rank), "f4"))
        return [t for pair in self.pairs.values() for t in pair]

    def linear(self, name, x):
        """W x + bias + α / rank · B (A x)."""
        y = x.product(self.weights[f"{name}.weight"])
        if f"{name}.bias" in self.weights:
            y = y + Tensor(self.weights[f"{name}.bias"].numbers())
        if f"{name}.weight" in self.pairs:
            a, b = self.pairs[f"{name}.weight"]
            y = y + (x.product(a) * self.factor).product(b)
        return y

    def norm(self, name, x):
        w = self.weights.get(f"{name}.weight")  # of heads, Qwen3 alone has one
        return x if w is None else x.rms_norm(w.numbers(), self.eps)

    def logits(self, ids):
        """(T, n_vocab) of T ids."""
        x, n = Tensor(self.weights["token_embd.weight"].numbers()[ids]), len(ids)
        for at in (f"blk.{i}." for i in range(self.n_layer)):
            h = self.norm(f"{at}attn_norm", x)
            q, k, v = (self.linear(f"{at}attn_{y}", h).reshape(n, self.heads[y], -1) for y in "qkv")
            q, k = self.norm(f"{at}attn_q_norm", q), self.norm(f"{at}attn_k_norm", k)
            q, k = (y.rope(self.turns(n, y.data.shape[-1]), self.interleaved) for y in (q, k))
            x = x + self.linear(f"{at}attn_output", q.attention(k, v).reshape(n, -1))
            h = self.norm(f"{at}ffn_norm", x)
            gate, up = (self.linear(f"{at}ffn_{y}", h) for y in ("gate", "up"))
            x = x + self.linear(f"{at}ffn_down", gate.swiglu(up))
        head = self.weights.get("output.weight", self.weights["token_embd.weight"])  # often one
        return self.norm("output_norm", x).product(head)

    def write(self, ids, n):
        """ids and the n likeliest tokens after them. Fast twin: pyggml/generation, with a cache."""
        for _ in range(n):
            ids = np.append(ids, self.logits(ids).data[-1].argmax())
        return ids

    def turns(self, n_tokens, n):
        """e^(i · position · base^(−2j / n)), (T, 1, n / 2); Llama 3 divides by factors besides."""
        speed, name = self.base ** (-np.arange(0, n, 2) / n), "rope_freqs.weight"
        speed = speed / self.weights[name].numbers() if name in self.weights else speed
        return np.exp(1j * np.outer(np.arange(n_tokens), speed)).astype("c8")[:, None]


# -- a run. Fast twins: pyggml/lora/optim, pyggml/lora/trainer -------------------------------------
def adamw(parameters, moments, i, lr, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.01):
    """Step i, from 1 (Loshchilov, Hutter 2019); g is clipped to length 1. moments: of g and g²."""
    length = np.sqrt(sum((p.grad.astype("f8") ** 2).sum() for p in parameters))
    for p, (m, v) in zip(parameters, moments, strict=True):
        g, p.grad = p.grad / np.float32(max(length, 1)), None
        m += (1 - beta1) * (g - m)
        v += (1 - beta2) * (g * g - v)
        p.data -= lr * (m / (1 - beta1**i) / (np.sqrt(v / (1 - beta2**i)) + eps) + decay * p.data)


def train(model, parameters, ids, n_steps, ctx, lr):
    """The loss of each step, on windows of ctx tokens of a text, one after the other."""
    moments = [(np.zeros_like(p.data), np.zeros_like(p.data)) for p in parameters]
    for i in range(n_steps):
        window = ids[i * ctx % max(len(ids) - ctx, 1) :][: ctx + 1]
        loss = model.logits(window[:-1]).cross_entropy(window[1:])
        loss.backward()
        adamw(parameters, moments, i + 1, lr)
        yield float(loss.data)


# -- text. Fast twin: pyggml/tokenizer -------------------------------------------------------------
def tokenizer(file):
    """BPE on bytes, cut into words as Qwen 2 does, of the file's own vocabulary."""
    if (kind := file.metadata["tokenizer.ggml.model"]) != "gpt2":
        sys.exit(f"the vocabulary is of the kind {kind}; wanted gpt2, BPE on bytes")
    ids = {token: i for i, token in enumerate(file.metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in file.metadata["tokenizer.ggml.merges"]]
    word = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    words = Regex(word + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    cut = [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(False, True, False)]
    text = Tokenizer(models.BPE(ids, merges))
    text.pre_tokenizer, text.decoder = pre_tokenizers.Sequence(cut), decoders.ByteLevel()
    return text


if __name__ == "__main__":
    demo = Path(__file__).parents[1] / "cli/demo"
    path, text = sys.argv[1:] or (demo / "base.gguf", demo / "shakespeare.txt")
    model, words = Model(file := Gguf(path)), tokenizer(file)
    ids = np.array(words.encode(Path(text).read_text("utf-8")).ids)
    print(words.decode(model.write(ids[:16], 24)), "\n")
    for loss in train(model, model.attach(rank=8, alpha=16), ids, n_steps=40, ctx=128, lr=1e-3):
        print(f"loss {loss:.4f}")
    print("\n" + words.decode(model.write(ids[:16], 24)))
