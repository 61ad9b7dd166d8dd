"""Training steps of CoLA in PyTorch: one for every line of standard input, which holds its learning rate.

The first line of output is the number of parameters and the version of torch. Then each step prints its wall-clock
seconds, its CPU seconds and its loss. All steps use the same batch: that of `--tokens` or, with `--start`, the ids that
follow the weights in the file.

With float32 everything is in float32. With bfloat16, weights, activations and gradients are in bfloat16, without
autocast, and AdamW keeps float32 master weights and moments, as Narrows does.
"""

import argparse
import pathlib
import sys
import time

import torch
from torch import nn

from cola import BufferReader, CheckpointReader, Cola
from sizes import SIZES

# Token files (docs/token-files.md): length of the header, and offsets of the bytes per token and of the token count.
HEADER_BYTES, WIDTH_OFFSET, COUNT_OFFSET = 256, 12, 24


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["eager", "compile", "compile-cudnn"])
    parser.add_argument("--model", choices=list(SIZES), default="cola-60m")
    parser.add_argument("--sequences", type=int, required=True, help="sequences of a step")
    parser.add_argument("--length", type=int, required=True, help="tokens of a sequence")
    parser.add_argument("--micro-batch", type=int, help="sequences of a microbatch [default: all]")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, help="CPU threads")
    weights = parser.add_mutually_exclusive_group(required=True)
    weights.add_argument("--start", help="a file of all weights, f32 in order, and then the token ids, i32")
    weights.add_argument("--checkpoint", help="a checkpoint of `narrows run`; requires --tokens")
    parser.add_argument("--tokens", help="a token file of `narrows data`")
    return parser.parse_args()


def token_ids(path):
    data = bytearray(pathlib.Path(path).read_bytes())
    fields = ((WIDTH_OFFSET, 4), (COUNT_OFFSET, 8))
    width, count = (int.from_bytes(data[offset : offset + size], "little") for offset, size in fields)
    dtype = {2: torch.uint16, 4: torch.int32}[width]
    return torch.frombuffer(data, dtype=dtype, count=count, offset=HEADER_BYTES).long()


def load(args, model):
    """Loads the weights and returns the token ids."""
    if args.checkpoint:
        weights = CheckpointReader(args.checkpoint)
        model.load(weights)
        if weights.unread:
            raise ValueError(f"the checkpoint has tensors that {args.model} lacks: {sorted(weights.unread)[:3]}")
        return token_ids(args.tokens)
    start = bytearray(pathlib.Path(args.start).read_bytes())
    weights = BufferReader(start)
    model.load(weights)
    return torch.frombuffer(start, dtype=torch.int32, offset=weights.offset).long()


class MasterWeights:
    """The float32 weights that the optimizer updates; in float32 they are the model's parameters."""

    def __init__(self, model, device, dtype):
        masters = [p.detach().to(device, copy=True) for p in model.parameters()]
        model.to(device, dtype)
        self.model_weights = list(model.parameters())
        self.shared = dtype == torch.float32
        self.weights = self.model_weights if self.shared else [nn.Parameter(p) for p in masters]

    def accumulate_gradients(self):
        """Adds the gradients of a microbatch to those of the master weights."""
        if self.shared:
            return
        gradients = [p.grad for p in self.model_weights]
        if self.weights[0].grad is None:
            for weight, gradient in zip(self.weights, gradients):
                weight.grad = gradient.float()
        else:
            torch._foreach_add_([w.grad for w in self.weights], gradients)
        for p in self.model_weights:
            p.grad = None

    @torch.no_grad()
    def update_model(self):
        """Casts the master weights into the model."""
        if not self.shared:
            torch._foreach_copy_(self.model_weights, self.weights)


def main():
    args = parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.device == "cuda":
        # Leaves one kernel of attention, so that a fallback is an error; float32 needs the math kernel.
        with_cudnn = args.mode == "compile-cudnn"
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_flash_sdp(not with_cudnn)
        torch.backends.cuda.enable_cudnn_sdp(with_cudnn)
        torch.backends.cuda.enable_math_sdp(args.dtype == "float32")
    model = Cola(SIZES[args.model], args.length)
    ids = load(args, model)
    masters = MasterWeights(model, args.device, getattr(torch, args.dtype))
    matrices = [p for p in masters.weights if p.dim() > 1]
    scales = [p for p in masters.weights if p.dim() <= 1]
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=scales, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)
    count = args.sequences * args.length
    if ids.numel() <= count:
        raise ValueError(f"{ids.numel()} token ids are too few for {args.sequences} sequences of {args.length}")
    shape = (args.sequences, args.length)
    tokens, targets = (ids[start : start + count].view(shape).to(args.device) for start in (0, 1))
    micro_batch = args.micro_batch or args.sequences
    microbatches = list(zip(tokens.split(micro_batch), targets.split(micro_batch)))
    mean_loss = torch.compile(model, dynamic=False) if args.mode.startswith("compile") else model

    def step(learning_rate):
        step_loss = 0.0
        for microbatch in microbatches:
            loss = mean_loss(*microbatch) * (len(microbatch[0]) / args.sequences)
            loss.backward()
            masters.accumulate_gradients()
            step_loss = step_loss + loss.detach()
        nn.utils.clip_grad_norm_(masters.weights, 1.0, foreach=True)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        masters.update_model()
        # On a GPU this waits for everything in the stream, the last copies included.
        return step_loss.item()

    print(sum(p.numel() for p in masters.weights), torch.__version__, flush=True)
    for line in sys.stdin:
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        loss = step(float(line))
        print(time.perf_counter() - wall_start, time.process_time() - cpu_start, loss, flush=True)
    if args.device == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated()} bytes", file=sys.stderr)


main()
