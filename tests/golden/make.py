"""Golden values of small models, from PyTorch's automatic differentiation in float64.

An implementation of LLaMA, CoLA and both forms of LaX that is independent of the Rust code except
for the names of parameters and the generator of weights (README.md).

    python tests/golden/make.py

writes one JSON file per case beside this script.
"""

import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

LINEARS = ["q", "k", "v", "o", "gate", "up", "down"]


# Weights come from a counter-based generator, so that the files need not hold them.


def mix(z):
    """The finalizer of SplitMix64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def normal(seed, name, count):
    """The first `count` standard normal values of the stream `name`."""
    fnv = 0xCBF29CE484222325
    for byte in name.encode():
        fnv = (fnv ^ byte) * 0x100000001B3 % 2**64
    with np.errstate(over="ignore"):
        state = mix(mix(np.array([seed], np.uint64)) ^ np.uint64(fnv))
        n = np.arange(1, count + count % 2 + 1, dtype=np.uint64)
        bits = mix(state + n * np.uint64(0x9E3779B97F4A7C15))
    uniform = ((bits >> np.uint64(11)).astype(np.float64) / 2.0**53).reshape(-1, 2)
    radius = np.sqrt(-2.0 * np.log(1.0 - uniform[:, 0]))
    angle = 2.0 * np.pi * uniform[:, 1]
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return pairs.reshape(-1)[:count]


class Weights(dict):
    """Parameters by name: initial values plus noise, so that no gate is an identity and no scale is 1."""

    def __init__(self, seed, noise):
        super().__init__()
        self.seed, self.noise = seed, noise

    def make(self, name, shape, initial):
        count = math.prod(shape)
        if isinstance(initial, float):
            initial = (initial * normal(self.seed, name, count)).reshape(shape)
        value = initial + self.noise * normal(self.seed, name + " noise", count).reshape(shape)
        self[name] = torch.tensor(value, dtype=torch.float64, requires_grad=True)
        return self[name]


# The model.


class DenseLinear:
    def __init__(self, weights, name, d_in, d_out, std):
        self.w = weights.make(name, (d_in, d_out), std)

    def __call__(self, x, crossing_latent):
        return x @ self.w, None


class ColaLinear:
    """y = phi(x A) B; with the identity as phi a plain factorised layer."""

    def __init__(self, weights, name, d_in, d_out, spec):
        self.name, self.rank = name, spec["rank"]
        std = self.rank ** (-1 / 4) * ((d_in + d_out) ** (-1 / 2)) ** (1 / 2)
        self.a = weights.make(f"{name}.a", (d_in, self.rank), std)
        self.b = weights.make(f"{name}.b", (self.rank, d_out), std)
        self.phi = {"silu": F.silu, "identity": lambda h: h}[spec["activation"]]

    def __call__(self, x, crossing_latent):
        h = self.phi(x @ self.a)
        return h @ self.b, h


class DlrLinear(ColaLinear):
    """y = B z + alpha/sqrt(K) Expand_K(z), after `layers.py` of DLR's release; B is trained, alpha is fixed."""

    def __init__(self, weights, name, d_in, d_out, spec, alpha):
        super().__init__(weights, name, d_in, d_out, spec)
        self.width, self.repeats = d_out, math.ceil(d_out / self.rank)
        self.scale = alpha / math.sqrt(self.repeats)

    def __call__(self, x, crossing_latent):
        h = self.phi(x @ self.a)
        return h @ self.b + self.scale * h.repeat_interleave(self.repeats, dim=-1)[..., :self.width], h

    @torch.no_grad()
    def fold(self):
        columns = torch.arange(self.width)
        self.b[columns // self.repeats, columns] += self.scale


class PaperLaxLinear(ColaLinear):
    """y = B (h + Gate(h_before)): the latent crosses before the gated latent is added to it."""

    def __init__(self, weights, name, d_in, d_out, spec, rank_before):
        super().__init__(weights, name, d_in, d_out, spec)
        self.gate = make_gate(weights, name, spec["crossing"]["gate"], rank_before, self.rank)

    def __call__(self, x, crossing_latent):
        h = self.phi(x @ self.a)
        return (h + self.gate(crossing_latent)) @ self.b, h


class ReleasedLaxLinear(PaperLaxLinear):
    """y = B phi(LayerNorm(A x + Gate(z_before))): the input of B crosses."""

    def __init__(self, weights, name, d_in, d_out, spec, rank_before):
        super().__init__(weights, name, d_in, d_out, spec, rank_before)
        self.scale = weights.make(f"{name}.latent_norm.scale", (1, self.rank), np.ones((1, self.rank)))
        self.bias = weights.make(f"{name}.latent_norm.bias", (1, self.rank), np.zeros((1, self.rank)))

    def __call__(self, x, crossing_latent):
        latent = x @ self.a + self.gate(crossing_latent)
        latent = F.layer_norm(latent, (self.rank,), self.scale[0], self.bias[0], eps=1e-6)
        z = self.phi(latent)
        return z @ self.b, z


def make_gate(weights, name, gate, rank_before, rank):
    if gate == "identity":
        return lambda h: h
    if gate in ("dense", "affine"):
        g = weights.make(f"{name}.gate", (rank_before, rank), np.eye(rank_before, rank))
        if gate == "dense":
            return lambda h: h @ g
        bias = weights.make(f"{name}.gate.bias", (1, rank), np.zeros((1, rank)))
        return lambda h: h @ g + bias[0]
    a, b = gate["tensor"]["a"], gate["tensor"]["b"]
    u = weights.make(f"{name}.gate.u", (a, a), np.eye(a))
    v = weights.make(f"{name}.gate.v", (b, b), np.eye(b))
    return lambda h: torch.einsum("...ij,ik,jl->...kl", h.unflatten(-1, (a, b)), u, v).flatten(-2)


def make_linear(weights, name, d_in, d_out, spec, spec_before, dense_std, residual):
    if spec == "dense":
        return DenseLinear(weights, name, d_in, d_out, dense_std)
    if residual is not None:
        return DlrLinear(weights, name, d_in, d_out, spec, residual)
    crossing = spec.get("crossing") if spec_before is not None else None
    if crossing is None or crossing == "none":
        return ColaLinear(weights, name, d_in, d_out, spec)
    kind = {"paper": PaperLaxLinear, "released": ReleasedLaxLinear}[crossing["form"]]
    return kind(weights, name, d_in, d_out, spec, spec_before["rank"])


class RmsNorm:
    def __init__(self, weights, name, width, epsilon):
        self.scale, self.epsilon = weights.make(name, (1, width), np.ones((1, width))), epsilon

    def __call__(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.scale[0]


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def scaled(frequencies, theta, length, kind, options):
    """Frequencies and attention factor of a scaled RoPE, after `modeling_rope_utils` of transformers."""
    if kind == "linear":
        return frequencies / options["factor"], 1.0
    if kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        original, low, high = options["original_length"], options["low_freq_factor"], options["high_freq_factor"]
        smooth = (original / wavelengths - low) / (high - low)
        interpolated = (1 - smooth) * frequencies / options["factor"] + smooth * frequencies
        result = torch.where(wavelengths > original / low, frequencies / options["factor"], frequencies)
        between = (wavelengths <= original / low) & (wavelengths >= original / high)
        return torch.where(between, interpolated, result), 1.0
    if kind == "yarn":
        dim = 2 * len(frequencies)
        bound = lambda rotations: (
            dim * math.log(options["original_length"] / (rotations * 2 * math.pi)) / (2 * math.log(theta))
        )
        low = max(math.floor(bound(options["beta_fast"])), 0)
        high = min(math.ceil(bound(options["beta_slow"])), dim - 1)
        assert low != high
        ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
        return frequencies / options["factor"] * ramp + frequencies * (1 - ramp), options["attention_factor"]
    assert kind == "long_rope"
    divisors = options["long" if length > options["original_length"] else "short"]
    return frequencies / torch.tensor(divisors, dtype=torch.float64), options["attention_factor"]


def rotary(x, config):
    """Rotary position embedding of the first features of x, [sequences, heads, length, head_dim]."""
    length, head_dim = x.shape[-2:]
    dim, theta = config.get("rotary_dim", head_dim), config["rope_theta"]
    frequencies, factor = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim), 1.0
    for kind, options in config.get("rope_scaling", {}).items():
        frequencies, factor = scaled(frequencies, theta, length, kind, options)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    first, rest = x[..., :dim], x[..., dim:]
    rotated = first * angles.cos() * factor + rotate_half(first) * angles.sin() * factor
    return torch.cat((rotated, rest), dim=-1)


class Block:
    def __init__(self, weights, index, config):
        spec = config["blocks"][index]
        spec_before = config["blocks"][index - 1] if index > 0 else {}
        hidden, head_dim = config["hidden"], config["head_dim"]
        query, key, d_ff = config["heads"] * head_dim, config["kv_heads"] * head_dim, config["d_ff"]
        widths = dict(q=(hidden, query), k=(hidden, key), v=(hidden, key), o=(query, hidden),
                      gate=(hidden, d_ff), up=(hidden, d_ff), down=(d_ff, hidden))
        self.linears = {
            name: make_linear(weights, f"layer {index} {name}", *widths[name], spec[name],
                              spec_before.get(name), config.get("initial_std", 0.02), config.get("latent_residual"))
            for name in LINEARS
        }
        self.norm1 = RmsNorm(weights, f"layer {index} norm1", hidden, config["norm_epsilon"])
        self.norm2 = RmsNorm(weights, f"layer {index} norm2", hidden, config["norm_epsilon"])
        self.swiglu, self.config = spec["product"] == "swiglu", config
        self.rotary = spec.get("positions") != "none"
        self.window = spec.get("attention", {}).get("sliding_window", math.inf)
        biases = "qkv" if spec.get("qkv_bias") else ""
        self.biases = {
            name: weights.make(f"layer {index} {name}.bias", (1, widths[name][1]), np.zeros((1, widths[name][1])))
            for name in biases
        }
        norms = "qk" if spec.get("qk_norm") else ""
        self.head_norms = {
            name: RmsNorm(weights, f"layer {index} {name}.norm", head_dim, config["norm_epsilon"]) for name in norms
        }

    def __call__(self, x, crossing_latents):
        """The hidden state, and the latents that cross to the next block, by linear."""
        sent = {}

        def linear(name, x):
            y, sent[name] = self.linears[name](x, crossing_latents.get(name))
            return y + self.biases[name][0] if name in self.biases else y

        n = self.norm1(x)
        heads = lambda y: y.unflatten(-1, (-1, self.config["head_dim"])).transpose(1, 2)
        q, k, v = (heads(linear(name, n)) for name in "qkv")
        if self.head_norms:
            q, k = self.head_norms["q"](q), self.head_norms["k"](k)
        if self.rotary:
            q, k = (rotary(y, self.config) for y in (q, k))
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], dim=1) for y in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.config["head_dim"])
        positions = torch.arange(scores.shape[-1])
        distance = positions[:, None] - positions[None, :]
        hidden = (distance < 0) | (distance >= self.window)
        attended = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
        x = x + linear("o", attended.transpose(1, 2).flatten(-2))

        n = self.norm2(x)
        gate, up = linear("gate", n), linear("up", n)
        product = (F.silu(gate) if self.swiglu else gate) * up
        return x + linear("down", product), sent


class Model:
    def __init__(self, config, weights):
        hidden, vocab, std = config["hidden"], config["vocab"], config.get("initial_std", 0.02)
        self.padding = config.get("padding_token")
        table = std * normal(weights.seed, "embedding", vocab * hidden).reshape(vocab, hidden)
        if self.padding is not None:
            table[self.padding] = 0.0
        self.embedding = weights.make("embedding", (vocab, hidden), table)
        self.blocks = [Block(weights, index, config) for index in range(len(config["blocks"]))]
        self.final_norm = RmsNorm(weights, "final_norm", hidden, config["norm_epsilon"])
        self.head = None if config["tied"] else weights.make("head", (hidden, vocab), std)

    def logits(self, tokens):
        """Logits of tokens [sequences, length]."""
        x = F.embedding(tokens, self.embedding, padding_idx=self.padding)
        crossing_latents = {}
        for block in self.blocks:
            x, crossing_latents = block(x, crossing_latents)
        return self.final_norm(x) @ (self.embedding.T if self.head is None else self.head)

    def loss(self, microbatches):
        logits = torch.cat([self.logits(tokens).flatten(0, 1) for tokens, _ in microbatches])
        targets = torch.cat([targets.flatten() for _, targets in microbatches])
        return F.cross_entropy(logits, targets)


# Training.


def learning_rate(step, peak, warm_up, total, final_fraction=0.1):
    """Learning rate of a step, counted from 1: linear warm-up, then cosine decay."""
    if step < warm_up:
        return peak * step / warm_up
    progress = (step - warm_up) / (total - warm_up)
    return peak * (final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress)))


def train(model, weights, microbatches, options, steps, hidden):
    loro, state = options.get("loro"), {}
    vectors = ("norm1", "norm2", "final_norm", "latent_norm.scale", ".bias", ".norm")
    groups = [
        dict(params=[w for n, w in weights.items() if not n.endswith(vectors)], weight_decay=options.get("weight_decay", 0.1)),
        dict(params=[w for n, w in weights.items() if n.endswith(vectors)], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    losses, norms = [], []
    for step in range(1, steps + 1):
        rate = learning_rate(step, options["peak_learning_rate"], options["warm_up_steps"],
                             options["total_steps"])
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = model.loss(microbatches)
        loss.backward()
        norm = torch.sqrt(sum(w.grad.pow(2).sum() for w in weights.values()))
        for w in weights.values():
            w.grad *= min(1.0, options["clip_norm"] / norm.item())
        if loro:
            loro_step(weights, state, step, rate, hidden, loro)
        else:
            optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms


def normalised(state, w, betas, epsilon):
    """AdamW's moments with the gradient of `w`: the direction m/(sqrt(v) + epsilon), and sqrt(1 - beta2^t)/(1 - beta1^t)."""
    m, v, t = state.get(w, (torch.zeros_like(w), torch.zeros_like(w), 0))
    m, v, t = betas[0] * m + (1 - betas[0]) * w.grad, betas[1] * v + (1 - betas[1]) * w.grad**2, t + 1
    state[w] = (m, v, t)
    return m / (v.sqrt() + epsilon), math.sqrt(1 - betas[1]**t) / (1 - betas[0]**t)


def riemannian(m, n, d_m, d_n, rate):
    """One step of W = m n^T along the projected gradient, retracted to the rank of the factors."""
    rank = m.shape[1]
    (u, r_m), (v, r_n) = torch.linalg.qr(m), torch.linalg.qr(n)
    right = torch.linalg.solve_triangular(r_n, d_m, upper=True, left=False)
    left = torch.linalg.solve_triangular(r_m, d_n, upper=True, left=False)
    q1, k1 = torch.linalg.qr(left - v @ (v.T @ left))
    q2, k2 = torch.linalg.qr(right - u @ (u.T @ right))
    s = torch.zeros(2 * rank, 2 * rank, dtype=m.dtype)
    s[:rank, :rank] = r_m @ r_n.T - rate * left.T @ v
    s[:rank, rank:], s[rank:, :rank] = -rate * k1.T, -rate * k2
    p, sigma, t = torch.linalg.svd(s)
    root = sigma[:rank].sqrt()
    return torch.cat([u, q2], dim=1) @ p[:, :rank] * root, torch.cat([v, q1], dim=1) @ t.T[:, :rank] * root


@torch.no_grad()
def loro_step(weights, state, step, rate, hidden, loro):
    """The update of `loro_optim.py` in LORO's release: an exact step after every `exact_every` steps, and zero moments."""
    betas, epsilon = (0.9, 0.95), 1e-8
    factors = [name[:-2] for name in weights if name.endswith(".a")]
    for name, w in weights.items():
        if name[-2:] not in (".a", ".b"):
            direction, correction = normalised(state, w, betas, epsilon)
            w -= rate * correction * direction
    for name in factors:
        a, b = weights[name + ".a"], weights[name + ".b"]
        (d_a, correction), (d_b, _) = (normalised(state, w, betas, epsilon) for w in (a, b))
        if step % loro["exact_every"] == 0:
            m, n = riemannian(b.T, a, d_b.T, d_a, rate * correction)
            a.copy_(n)
            b.copy_(m.T)
        else:
            scale = loro["rate_scale"] or a.shape[1] / hidden
            a -= rate * correction * scale * d_a
            b -= rate * correction * scale * d_b
    if step % loro["refresh_every"] == 0:
        state.clear()


# The cases.


def pair(rank, activation, crossing=None):
    spec = dict(rank=rank, activation=activation)
    return spec if crossing is None else dict(spec, crossing=crossing)


def uniform(spec, product):
    return dict({name: spec for name in LINEARS}, product=product)


def lax(form, gate, ranks, product="plain", activation="silu"):
    """Blocks of these ranks, with latent crossings from block 1 on."""
    crossing = dict(form=form, gate=gate)
    first = uniform(pair(ranks[0], activation), product)
    return [first] + [uniform(pair(rank, activation, crossing), product) for rank in ranks[1:]]


def mixed_forms():
    """Crossings between different forms, a chain that breaks, and linears with the identity as phi."""
    blocks = lax("paper", "dense", [4, 6, 4, 6])
    blocks[2] = uniform(pair(4, "silu", dict(form="released", gate="dense")), "swiglu")
    blocks[1]["q"] = pair(6, "silu", dict(form="released", gate="dense"))
    blocks[2]["q"] = pair(6, "identity", dict(form="paper", gate="identity"))
    blocks[1]["down"], blocks[2]["down"] = "dense", pair(5, "silu")
    blocks[3]["down"] = pair(5, "identity", dict(form="released", gate="identity"))
    blocks[3]["o"] = pair(4, "silu")
    return blocks


def cases():
    base = dict(hidden=12, vocab=13, heads=4, kv_heads=2, head_dim=4, d_ff=10, norm_epsilon=1e-6,
                rope_theta=10000.0, tied=False)
    cola = [uniform(pair(rank, "silu"), "plain") for rank in (4, 6)]
    cola[1]["v"], cola[1]["up"] = "dense", pair(3, "silu")
    svd = [uniform(pair(rank, "identity"), "swiglu") for rank in (3, 5)]
    svd[0]["k"], svd[1]["o"] = pair(7, "identity"), pair(1, "identity")
    pairs = [uniform(pair(rank, "identity"), "swiglu") for rank in (3, 8)]
    mixed = [uniform("dense", "swiglu"), dict(uniform(pair(5, "identity"), "swiglu"), v="dense", up=pair(2, "identity"))]
    tensor = dict(tensor=dict(a=2, b=3))
    rope = dict(base, head_dim=8, rope_theta=50.0, blocks=[uniform("dense", "swiglu")] * 2)
    return {
        "llama": dict(base, blocks=[uniform("dense", "swiglu")] * 2),
        "cola": dict(base, tied=True, kv_heads=4, blocks=cola),
        "svd": dict(base, hidden=9, kv_heads=1, norm_epsilon=1e-5, rope_theta=500.0, blocks=svd),
        "lax-paper-identity": dict(base, blocks=lax("paper", "identity", [5, 5, 5])),
        "lax-paper-dense": dict(base, blocks=lax("paper", "dense", [4, 6, 3])),
        "lax-paper-tensor": dict(base, blocks=lax("paper", tensor, [6, 6, 6], "swiglu", "identity")),
        "lax-released-identity": dict(base, tied=True, blocks=lax("released", "identity", [5, 5, 5])),
        "lax-released-dense": dict(base, blocks=lax("released", "dense", [4, 6, 3])),
        "lax-released-tensor": dict(base, blocks=lax("released", tensor, [6, 6, 6])),
        "lax-mixed": dict(base, blocks=mixed_forms()),
        "padding": dict(base, padding_token=2, initial_std=0.05, blocks=cola),
        "padding-tied": dict(base, tied=True, padding_token=2, blocks=cola),
        "rope-partial": dict(rope, rotary_dim=4, rope_scaling=dict(linear=dict(factor=4.0))),
        "rope-llama3": dict(rope, rope_scaling=dict(llama3=dict(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=64))),
        "rope-yarn": dict(rope, rope_scaling=dict(yarn=dict(
            factor=4.0, beta_fast=3.0, beta_slow=0.5, attention_factor=1.125, original_length=64))),
        "rope-none": dict(base, blocks=[uniform("dense", "swiglu"), dict(uniform("dense", "swiglu"), positions="none")]),
        "bias-dense": dict(base, blocks=[dict(uniform("dense", "swiglu"), qkv_bias=True), uniform("dense", "swiglu")]),
        "bias-pairs": dict(base, blocks=[dict(block, qkv_bias=True) for block in cola]),
        "qk-norm-dense": dict(base, blocks=[dict(uniform("dense", "swiglu"), qk_norm=True), uniform("dense", "swiglu")]),
        "qk-norm-pairs": dict(base, blocks=[dict(block, qk_norm=True, qkv_bias=True) for block in cola]),
        # One of the two microbatches is longer than `original_length`.
        "rope-long": dict(rope, rotary_dim=6, rope_scaling=dict(long_rope=dict(
            short=[1.0, 1.5, 3.0], long=[1.25, 4.0, 16.0], attention_factor=1.25, original_length=5))),
        "lax-paper-affine": dict(base, blocks=lax("paper", "affine", [4, 6, 3])),
        "lax-released-affine": dict(base, blocks=lax("released", "affine", [4, 6, 3])),
        "window-dense": dict(base, blocks=[
            dict(uniform("dense", "swiglu"), attention=dict(sliding_window=3)), uniform("dense", "swiglu")]),
        # A window that is shorter than the sequences of one of the two microbatches.
        "window-pairs": dict(base, blocks=[dict(block, attention=dict(sliding_window=6)) for block in cola]),
        "loro": dict(base, blocks=pairs, optimizer=dict(exact_every=3, refresh_every=3, rate_scale=None)),
        "loro-scale": dict(base, blocks=mixed, optimizer=dict(exact_every=4, refresh_every=2, rate_scale=0.5)),
        "dlr": dict(base, latent_residual=0.75, blocks=cola),
    }


# Fields of a block that are not linears.
OWN_FIELDS = ("product", "positions", "attention", "qkv_bias", "qk_norm")


def model_file(name, config):
    """The same model as a narrows-model/1 file, with every block written in full."""
    def with_crossing(spec):
        return spec if spec == "dense" else dict(spec, crossing=spec.get("crossing", "none"))

    blocks = {
        str(index): {
            key: value if key in OWN_FIELDS else with_crossing(value) for key, value in block.items()
        }
        for index, block in enumerate(config["blocks"])
    }
    shapes = {key: value for key, value in config.items() if key != "blocks"}
    shapes["max_sequence_length"] = 16
    layers = dict(count=len(blocks), default={}, overrides=blocks)
    return dict(format="narrows-model/1", name=name, **shapes, blocks=layers)


# Prefixes of the gradients that are written in full; of all others only the norm is written.
FULL = ("embedding", "final_norm", "layer 0 k", "layer 1 norm2", "layer 1 q", "layer 2 down")


def golden(name, config, seed):
    loro = config.pop("optimizer", None)
    weights = Weights(seed, 0.1)
    model = Model(config, weights)
    tokens = (np.abs(normal(seed, "tokens", 40)) * 1000).astype(np.int64) % config["vocab"]
    tokens = torch.tensor(tokens)
    microbatches, used = [], 0
    for sequences, length in ((2, 5), (1, 7)):
        row = tokens[used:used + sequences * (length + 1)].view(sequences, length + 1)
        microbatches.append((row[:, :-1], row[:, 1:]))
        used += row.numel()
    padding = config.get("padding_token")
    assert padding is None or any(padding in inputs for inputs, _ in microbatches)

    logits = model.logits(microbatches[0][0])
    loss = model.loss(microbatches)
    loss.backward()
    gradients = {n: w.grad.clone() for n, w in weights.items()}
    options = dict(peak_learning_rate=0.003, warm_up_steps=3, total_steps=10, clip_norm=1.3)
    if loro is not None:
        options["loro"] = loro
    if config.get("latent_residual") is not None:
        options["weight_decay"] = 0.0
    losses, norms = train(model, weights, microbatches, options, 10, config["hidden"])
    if config.get("latent_residual") is not None:
        for linear in (linear for block in model.blocks for linear in block.linears.values()):
            if isinstance(linear, DlrLinear):
                linear.fold()
    return dict(
        model=model_file(name, config),
        seed=seed,
        noise=weights.noise,
        microbatches=[
            dict(sequences=t.shape[0], length=t.shape[1], tokens=t.flatten().tolist(),
                 targets=y.flatten().tolist())
            for t, y in microbatches
        ],
        logits=logits.flatten(0, 1).tolist(),
        loss=loss.item(),
        gradient_norms={n: g.norm().item() for n, g in gradients.items()},
        gradients={n: g.tolist() for n, g in gradients.items() if n.startswith(FULL)},
        optimizer=options,
        losses=losses,
        step_gradient_norms=norms,
        final_weight_norms={n: w.norm().item() for n, w in weights.items()},
    )


def main():
    folder = Path(__file__).parent
    for seed, (name, config) in enumerate(cases().items(), start=1):
        values = golden(name, config, seed)
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
        (folder / f"{name}.json").write_text("{\n" + lines + "\n}\n")
        first, last = values["losses"][0], values["losses"][-1]
        norms = values["step_gradient_norms"]
        print(f"{name:24} loss {first:.4f} -> {last:.4f}, gradient norm {norms[0]:.3f} -> {norms[-1]:.3f}")


if __name__ == "__main__":
    main()
