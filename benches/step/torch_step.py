"""Training steps of CoLA in PyTorch, one for every line of standard input: a learning rate.

First it says how many parameters there are, and the version. Then, for every line read, it makes one step and says the
seconds by the clock, the seconds of processor time, and the loss. The only batch is that of `--tokens`, or, with
`--start`, of the ids behind the weights.

In float32 everything is. In bfloat16 weights, activations and gradients are, without autocast; AdamW keeps a master of
each weight and the moments in float32, as this runtime does.
"""

import argparse
import pathlib
import sys
import time

import torch
from torch import nn

from cola import Cola, InOrder, OfCheckpoint
from sizes import SIZES

# Of a token file: the length of its header, and where that says how wide a token is and how many there are.
HEADER_BYTES, WIDTH_AT, COUNT_AT = 256, 12, 24


def asked():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["eager", "compile"])
    parser.add_argument("--model", choices=list(SIZES), default="cola-60m")
    parser.add_argument("--sequences", type=int, required=True, help="of a step")
    parser.add_argument("--length", type=int, required=True, help="tokens of a sequence")
    parser.add_argument("--micro-batch", type=int, help="sequences at a time [default: all]")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, help="of processors")
    weights = parser.add_mutually_exclusive_group(required=True)
    weights.add_argument("--start", help="a file of all weights, f32 in order, and the token ids, i32")
    weights.add_argument("--checkpoint", help="a checkpoint of `narrows run`")
    parser.add_argument("--tokens", help="a token file of `narrows`, beside --checkpoint")
    return parser.parse_args()


def token_ids(path):
    data = bytearray(pathlib.Path(path).read_bytes())
    width, count = (int.from_bytes(data[at : at + size], "little") for at, size in ((WIDTH_AT, 4), (COUNT_AT, 8)))
    dtype = {2: torch.uint16, 4: torch.int32}[width]
    return torch.frombuffer(data, dtype=dtype, count=count, offset=HEADER_BYTES).long()


def begin(args, model):
    """Loads the weights, and returns the token ids."""
    if args.checkpoint:
        weights = OfCheckpoint(args.checkpoint)
        model.load(weights)
        if weights.left:
            raise ValueError(f"the checkpoint has what {args.model} has not: {sorted(weights.left)[:3]}")
        return token_ids(args.tokens)
    start = bytearray(pathlib.Path(args.start).read_bytes())
    weights = InOrder(start)
    model.load(weights)
    return torch.frombuffer(start, dtype=torch.int32, offset=weights.bytes).long()


class Masters:
    """The float32 weights that an optimizer moves, of a model that computes in another format."""

    def __init__(self, model, device, dtype):
        full = [p.detach().to(device, copy=True) for p in model.parameters()]
        model.to(device, dtype)
        self.computed = list(model.parameters())
        # In float32 they are the model's own.
        self.same = dtype == torch.float32
        self.weights = self.computed if self.same else [nn.Parameter(p) for p in full]

    def take_gradients(self):
        """Adds those of a microbatch."""
        if self.same:
            return
        found = [p.grad for p in self.computed]
        if self.weights[0].grad is None:
            for weight, gradient in zip(self.weights, found):
                weight.grad = gradient.float()
        else:
            torch._foreach_add_([w.grad for w in self.weights], found)
        for p in self.computed:
            p.grad = None

    @torch.no_grad()
    def give_weights(self):
        if not self.same:
            torch._foreach_copy_(self.computed, self.weights)


def main():
    args = asked()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.device == "cuda":
        # Flash attention or an error.
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_math_sdp(args.dtype == "float32")
    model = Cola(SIZES[args.model], args.length)
    ids = begin(args, model)
    masters = Masters(model, args.device, getattr(torch, args.dtype))
    matrices = [p for p in masters.weights if p.dim() > 1]
    scales = [p for p in masters.weights if p.dim() <= 1]
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=scales, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)
    count = args.sequences * args.length
    if ids.numel() <= count:
        raise ValueError(f"{ids.numel()} token ids are too few for {args.sequences} sequences of {args.length}")
    tokens, targets = (ids[at : at + count].view(args.sequences, args.length).to(args.device) for at in (0, 1))
    micro_batch = args.micro_batch or args.sequences
    parts = list(zip(tokens.split(micro_batch), targets.split(micro_batch)))
    loss_of = torch.compile(model, dynamic=False) if args.mode == "compile" else model

    def step(rate):
        whole = 0.0
        for part in parts:
            loss = loss_of(*part) * (len(part[0]) / args.sequences)
            loss.backward()
            masters.take_gradients()
            whole = whole + loss.detach()
        nn.utils.clip_grad_norm_(masters.weights, 1.0, foreach=True)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        masters.give_weights()
        # On a GPU this waits for all that was queued, the last copies included.
        return whole.item()

    print(sum(p.numel() for p in masters.weights), torch.__version__, flush=True)
    for line in sys.stdin:
        clock, processor = time.perf_counter(), time.process_time()
        loss = step(float(line))
        print(time.perf_counter() - clock, time.process_time() - processor, loss, flush=True)
    if args.device == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated()} bytes", file=sys.stderr)


main()
