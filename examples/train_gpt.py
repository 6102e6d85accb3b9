"""Train a byte-level GPT. One device, data-parallel, tensor-parallel, or both: one argument, the same model.

    python examples/train_gpt.py                     # one device
    python examples/train_gpt.py --dp 2              # batches cut in two, gradients arrive reduced
    python examples/train_gpt.py --tp 2              # every weight matrix cut in two
    python examples/train_gpt.py --dp 2 --tp 2       # both

A plain script: no launcher, no rank, no `if __name__ == "__main__"`; and a model in plain PyTorch (gpt.py). It reads
the Python standard library's own source files, real text on every machine; `--data FILE` takes any other. With one
seed, all meshes draw the same loss curve, dropout and all.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from collections import deque
from pathlib import Path

import torch
import torch.nn.functional as F
from gpt import GPT, PLAN, batches, read_text, save

import dtorch
from dtorch import Replicate, Shard
from dtorch.distributed.tensor.parallel import parallelize_module


class Progress:
    """One line that redraws itself on a terminal, and ten lines in all elsewhere."""

    def __init__(self, steps: int, tokens_per_step: int) -> None:
        self.steps, self.tokens_per_step = steps, tokens_per_step
        self.start = time.perf_counter()
        self.live = sys.stdout.isatty()

    def show(self, step: int, loss: float) -> None:
        last = step == self.steps
        if not (self.live or last or step % max(self.steps // 10, 1) == 0):
            return
        rate = step * self.tokens_per_step / (time.perf_counter() - self.start)
        done = 30 * step // self.steps
        line = (
            f"{'█' * done}{'·' * (30 - done)} step {step}/{self.steps}  loss {loss:.3f} nats/byte  {rate:,.0f} tokens/s"
        )
        print(f"\r{line}" if self.live else line, end="\n" if last or not self.live else "", flush=True)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first twentieth, then a cosine down to a tenth of `peak`."""
    warmup = max(steps // 20, 1)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))


def train(model: GPT, mesh: dtorch.DeviceMesh, text: torch.Tensor, args: argparse.Namespace) -> list[float]:
    """Train for `args.steps` steps; the loss of each, in nats per byte."""
    optimizer = dtorch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    stream = batches(text, args.batch, args.context, args.seed)
    progress = Progress(args.steps, args.batch * args.context)
    losses: list[float] = []
    # Issued but not yet read: the client stays two steps ahead of the executors and never waits for the newest.
    pending: deque[dtorch.TensorFuture] = deque()

    def read_oldest() -> None:
        losses.append(pending.popleft().get().item())
        progress.show(len(losses), losses[-1])

    for step in range(args.steps):
        x, y = (dtorch.distribute_tensor(t, mesh, [Shard(0), Replicate()]) for t in next(stream))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        pending.append(loss.to_torch_async())
        if len(pending) > 2:
            read_oldest()
    while pending:
        read_oldest()
    return losses


def sample(model: GPT, mesh: dtorch.DeviceMesh, prompt: torch.Tensor, length: int, seed: int) -> bytes:
    """`length` bytes that the model writes after `prompt`, int64[context]."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens, context = prompt.tolist(), len(prompt)
    with dtorch.no_grad():
        for _ in range(length):
            window = torch.tensor([tokens[-context:]])
            logits = model(dtorch.distribute_tensor(window, mesh, [Replicate(), Replicate()]))[0, -1].to_torch()
            chances = torch.softmax(logits.double() / 0.8, dim=-1)
            tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(tokens[context:])


def plot(losses: list[float], path: str, title: str) -> None:
    """Save the loss curve as a PNG where matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no loss curve saved: matplotlib is not installed")
        return
    pyplot = importlib.import_module("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(losses)
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=title)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    print(f"loss curve saved to {path}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT with dtorch.")
    parser.add_argument("--data", metavar="FILE", help="text to learn (default: the standard library's sources)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dp", type=int, default=1, help="ranks that share each batch")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each weight")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--sample", type=int, default=300, metavar="BYTES", help="length of the sample at the end")
    parser.add_argument(
        "--plot", default="train_gpt.png", metavar="PNG", help="where the loss curve goes ('' for nowhere)"
    )
    parser.add_argument("--save", metavar="FILE", help="write a checkpoint there; serve_generate.py takes it")
    parser.add_argument("--losses", metavar="FILE", help="write every loss there, one a line, in full precision")
    return parser.parse_args()


args = arguments()
text = read_text(args.data)
if len(text) <= args.context + 1:
    sys.exit(
        f"train_gpt: the text has {len(text)} bytes, and --context {args.context} needs more than {args.context + 1}"
    )
mesh = dtorch.init_device_mesh(args.device, (args.dp, args.tp), mesh_dim_names=["dp", "tp"])
dtorch.manual_seed(args.seed)
dtorch.set_default_dtype(getattr(dtorch, args.dtype))
with dtorch.device_mesh(mesh):
    model = GPT(args.layers, args.width, args.heads, args.context, args.dropout)
parallelize_module(model, mesh["tp"], PLAN)
print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(text):,} bytes of text, {mesh}")

losses = train(model, mesh, text, args)
if args.losses:
    Path(args.losses).write_text("".join(f"{loss!r}\n" for loss in losses))
if args.save:
    save(model, args.save)
if args.plot:
    plot(losses, args.plot, f"dp={args.dp} tp={args.tp} {args.dtype}")
if args.sample:
    written = sample(model, mesh, text[: args.context], args.sample, args.seed)
    print(f"--- what it writes after {args.context} bytes of the text:\n{written.decode(errors='replace')}")
