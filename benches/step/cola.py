"""CoLA in PyTorch, optimised within plain PyTorch: fused attention and cross-entropy, and one GEMM for factors A that
share an input. Weights come from Narrows: from a buffer in its order of parameters, or from a checkpoint by name."""

import json
import mmap
import pathlib

import torch
import torch.nn.functional as F
from torch import nn


class FactorPairs(nn.Module):
    """Low-rank linears B(SiLU(A x)) that share an input: their factors A are one GEMM."""

    def __init__(self, rank, d_in, *d_outs):
        super().__init__()
        self.rank = rank
        self.a = nn.Linear(d_in, rank * len(d_outs), bias=False)
        self.b = nn.ModuleList(nn.Linear(rank, d_out, bias=False) for d_out in d_outs)

    def forward(self, x):
        latents = F.silu(self.a(x)).split(self.rank, dim=-1)
        return [b(latent) for b, latent in zip(self.b, latents)]

    def load(self, read, *names):
        d_in = self.a.in_features
        factors = [
            (read(f"{name}.cola_a", d_in, self.rank), read(f"{name}.cola_b", self.rank, linear.out_features))
            for name, linear in zip(names, self.b)
        ]
        self.a.weight.copy_(torch.cat([a for a, _ in factors], dim=1).T)
        for linear, (_, b) in zip(self.b, factors):
            linear.weight.copy_(b.T)


def apply_rope(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Block(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        hidden, d_ff, rank = sizes.hidden, sizes.d_ff, sizes.rank
        self.heads, self.gate_silu = sizes.heads, sizes.gate_silu
        self.norm1 = nn.RMSNorm(hidden, eps=1e-6)
        self.norm2 = nn.RMSNorm(hidden, eps=1e-6)
        self.qkv = FactorPairs(rank, hidden, hidden, hidden, hidden)
        self.o = FactorPairs(rank, hidden, hidden)
        self.gate_up = FactorPairs(rank, hidden, d_ff, d_ff)
        self.down = FactorPairs(rank, d_ff, hidden)

    def forward(self, x, cos, sin):
        sequences, length, hidden = x.shape
        shape = (sequences, length, self.heads, hidden // self.heads)
        q, k, v = (y.view(shape).transpose(1, 2) for y in self.qkv(self.norm1(x)))
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(x.shape))[0]
        gate, up = self.gate_up(self.norm2(x))
        return x + self.down((F.silu(gate) if self.gate_silu else gate) * up)[0]


class Cola(nn.Module):
    def __init__(self, sizes, length):
        super().__init__()
        self.sizes = sizes
        hidden, head_dim = sizes.hidden, sizes.hidden // sizes.heads
        self.embedding = nn.Embedding(sizes.vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.head = None if sizes.tied else nn.Linear(hidden, sizes.vocabulary, bias=False)
        frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(length), torch.cat((frequencies, frequencies)))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    @torch.no_grad()
    def load(self, read):
        """Loads all weights: `read(name, *shape)` returns one by its name in a checkpoint and its shape in Narrows."""
        hidden, vocabulary = self.sizes.hidden, self.sizes.vocabulary
        self.embedding.weight.copy_(read("model.embed_tokens.weight", vocabulary, hidden))
        for index, block in enumerate(self.blocks):
            layer, attention, mlp = (f"model.layers.{index}{part}" for part in ("", ".self_attn", ".mlp"))
            block.norm1.weight.copy_(read(f"{layer}.input_layernorm.weight", hidden))
            block.qkv.load(read, *(f"{attention}.{name}_proj" for name in "qkv"))
            block.o.load(read, f"{attention}.o_proj")
            block.norm2.weight.copy_(read(f"{layer}.post_attention_layernorm.weight", hidden))
            block.gate_up.load(read, f"{mlp}.gate_proj", f"{mlp}.up_proj")
            block.down.load(read, f"{mlp}.down_proj")
        self.norm.weight.copy_(read("model.norm.weight", hidden))
        if self.head is not None:
            self.head.weight.copy_(read("lm_head.weight", hidden, vocabulary).T)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        head = self.embedding if self.head is None else self.head
        logits = F.linear(self.norm(x), head.weight)
        # In bf16 a log-softmax would have 8 significant bits.
        return F.cross_entropy(logits.float().view(-1, self.sizes.vocabulary), targets.view(-1))


class BufferReader:
    """Reads f32 weights that follow each other in a buffer, in the order of the calls."""

    def __init__(self, buffer):
        self.buffer, self.offset = buffer, 0

    def __call__(self, _name, *shape):
        count = torch.Size(shape).numel()
        elements = torch.frombuffer(self.buffer, dtype=torch.float32, count=count, offset=self.offset)
        self.offset += 4 * count
        return elements.view(shape)


class CheckpointReader:
    """Reads the weights of a checkpoint of `narrows run`: f32 safetensors."""

    def __init__(self, folder):
        with open(pathlib.Path(folder) / "model.safetensors", "rb") as file:
            # Copy-on-write, because torch requires writable buffers.
            self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        length = int.from_bytes(self.buffer[:8], "little")
        self.data_start, self.header = 8 + length, json.loads(self.buffer[8 : 8 + length])
        self.unread = set(self.header) - {"__metadata__"}

    def __call__(self, name, *shape):
        entry = self.header[name]
        self.unread.discard(name)
        # Checkpoints hold the head as [vocabulary, hidden].
        transposed = name == "lm_head.weight"
        stored = list(reversed(shape)) if transposed else list(shape)
        if entry["dtype"] != "F32" or entry["shape"] != stored:
            raise ValueError(f"{name} is {entry['dtype']} {entry['shape']} in the checkpoint, expected F32 {stored}")
        start, _ = entry["data_offsets"]
        count = torch.Size(stored).numel()
        elements = torch.frombuffer(self.buffer, dtype=torch.float32, count=count, offset=self.data_start + start)
        elements = elements.view(stored)
        return elements.T if transposed else elements
