"""Training steps of CoLA-60M in PyTorch on processors, one a line of standard input.

    python torch_step.py {eager,compile} THREADS SEQUENCES LENGTH START

START holds the weights to begin from, f32, in the order of `Cola.load`, and after them the token ids,
i32. First it says how many parameters there are; then, for every line read, it makes one step and says
the seconds by the clock, the seconds of processor time, and the loss. Written for speed within plain
PyTorch: fused attention, cross entropy and AdamW, and what shares an input is one product.
"""

import math
import pathlib
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

LAYERS, HIDDEN, D_FF, HEADS, RANK, VOCABULARY = 8, 512, 1376, 8, 128, 32_000
HEAD_DIM = HIDDEN // HEADS


class Pairs(nn.Module):
    """Low-rank linears B(SiLU(A x)) of one input, whose A are one product."""

    def __init__(self, d_in, *d_outs):
        super().__init__()
        self.a = nn.Linear(d_in, RANK * len(d_outs), bias=False)
        self.b = nn.ModuleList(nn.Linear(RANK, d_out, bias=False) for d_out in d_outs)

    def forward(self, x):
        latents = F.silu(self.a(x)).split(RANK, dim=-1)
        return [b(latent) for b, latent in zip(self.b, latents)]


def rotated(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.norm2 = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.qkv = Pairs(HIDDEN, HIDDEN, HIDDEN, HIDDEN)
        self.o = Pairs(HIDDEN, HIDDEN)
        self.gate_up = Pairs(HIDDEN, D_FF, D_FF)
        self.down = Pairs(D_FF, HIDDEN)

    def forward(self, x, cos, sin):
        sequences, length, _ = x.shape
        heads = [y.view(sequences, length, HEADS, HEAD_DIM).transpose(1, 2) for y in self.qkv(self.norm1(x))]
        q, k, v = rotated(heads[0], cos, sin), rotated(heads[1], cos, sin), heads[2]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(x.shape))[0]
        gate, up = self.gate_up(self.norm2(x))
        return x + self.down(F.silu(gate) * up)[0]


class Cola(nn.Module):
    def __init__(self, length):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        frequencies = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.outer(torch.arange(length), torch.cat((frequencies, frequencies)))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    @torch.no_grad()
    def load(self, numbers):
        """Takes its weights from the beginning of `numbers`, and returns how many it took."""
        taken = 0

        def take(*shape):
            nonlocal taken
            first, taken = taken, taken + math.prod(shape)
            return numbers[first:taken].view(shape)

        def take_pairs(pairs, d_in, *d_outs):
            factors = [(take(d_in, RANK), take(RANK, d_out)) for d_out in d_outs]
            pairs.a.weight.copy_(torch.cat([a for a, _ in factors], dim=1).T)
            for linear, (_, b) in zip(pairs.b, factors):
                linear.weight.copy_(b.T)

        self.embedding.weight.copy_(take(VOCABULARY, HIDDEN))
        for block in self.blocks:
            block.norm1.weight.copy_(take(HIDDEN))
            take_pairs(block.qkv, HIDDEN, HIDDEN, HIDDEN, HIDDEN)
            take_pairs(block.o, HIDDEN, HIDDEN)
            block.norm2.weight.copy_(take(HIDDEN))
            take_pairs(block.gate_up, HIDDEN, D_FF, D_FF)
            take_pairs(block.down, D_FF, HIDDEN)
        self.norm.weight.copy_(take(HIDDEN))
        self.head.weight.copy_(take(HIDDEN, VOCABULARY).T)
        return taken

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


def main():
    mode, threads, sequences, length = sys.argv[1], *map(int, sys.argv[2:5])
    torch.set_num_threads(threads)
    start = bytearray(pathlib.Path(sys.argv[5]).read_bytes())
    model = Cola(length)
    weights = model.load(torch.frombuffer(start, dtype=torch.float32))
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.dim() > 1]
    scales = [p for p in parameters if p.dim() <= 1]
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=scales, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)
    ids = torch.frombuffer(start, dtype=torch.int32, offset=4 * weights).long()
    tokens, targets = (ids[at : at + sequences * length].view(sequences, length) for at in (0, 1))
    loss_of = torch.compile(model) if mode == "compile" else model

    def step():
        loss = loss_of(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    print(sum(p.numel() for p in parameters), torch.__version__, flush=True)
    for _ in sys.stdin:
        clock, processor = time.perf_counter(), time.process_time()
        loss = step()
        print(time.perf_counter() - clock, time.process_time() - processor, loss, flush=True)


main()
