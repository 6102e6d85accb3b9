"""Train the GPT of train_gpt.py while evaluation, checkpoints and live metrics run beside it, in one process.

    python examples/train_async.py                              # one device; prints where the metrics are
    python examples/train_async.py --dp 2 --port 9100           # batches cut in two; curl localhost:9100/metrics
    python examples/train_async.py --steps 2000 --resume gpt.pt # go on where a checkpoint stopped
    python examples/train_async.py --backend trio

Five tasks share one event loop and no thread computes: issuing a step takes the loop a few milliseconds, and whoever
wants a value awaits it. What is issued runs in the order of issue. So an evaluation, or a copy of every weight for a
checkpoint, needs no lock: it is issued between two steps, and sees the weights as they were there, however long the
values take to come.
"""

from __future__ import annotations

import os
import signal
import sys


def stopped_early(*_: object) -> None:
    """Ctrl-C before the first step ends the program here and now: an exception during an import may be lost."""
    os.write(2, b"train_async: stopped before the first step; nothing was saved\n")
    os._exit(128 + signal.SIGINT)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, stopped_early)

import argparse
import itertools
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import anyio.abc
import torch
import torch.nn.functional as F
from gpt import GPT, PLAN, batches, read_text

import dtorch
from dtorch import Replicate, Shard
from dtorch.distributed.tensor.parallel import parallelize_module


class Run:
    """One training run: the model, and how far it is.

    Attributes:
        step: steps issued, counted from the beginning; `first` where this run began.
        losses: of the steps that are done, in nats per byte.
        evaluations: step -> loss on the text that is held back.
        checkpoints: how many were written; `saved` is the step of the newest.
        stopped: the signal that stopped it before its end.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        text = read_text(args.data)
        held_back = len(text) // 10
        if held_back <= args.context + 1:
            sys.exit(f"train_async: a tenth of the text has {held_back} bytes, and --context {args.context} needs more")
        self.args, self.text, self.unseen = args, text[:-held_back], text[-held_back:]
        self.mesh = dtorch.init_device_mesh(args.device, (args.dp, args.tp), mesh_dim_names=["dp", "tp"])
        self.step = self.first = dtorch.load(args.resume, into={"step": 0})["step"] if args.resume else 0
        if self.step >= args.steps:
            sys.exit(f"train_async: {args.resume} is at step {self.step}; --steps {args.steps} is not beyond it")
        self.losses: list[float] = []
        self.evaluations: dict[int, float] = {}
        self.checkpoints = 0
        self.saved: int | None = None
        self.stopped: signal.Signals | None = None
        self.start = time.perf_counter()
        self._moved = anyio.Event()

        dtorch.manual_seed(args.seed)
        with dtorch.device_mesh(self.mesh):
            self.model = GPT(args.layers, args.width, args.heads, args.context, args.dropout)
        parallelize_module(self.model, self.mesh["tp"], PLAN)
        self.optimizer = dtorch.optim.AdamW(self.model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
        if args.resume:
            dtorch.load(args.resume, into={"model": self.model, "optimizer": self.optimizer})

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Nats per byte, a scalar."""
        return F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())

    def advance(self) -> None:
        """One more step has been issued."""
        self.step += 1
        self._moved.set()
        self._moved = anyio.Event()

    async def reached(self, step: int) -> int:
        """Wait until `step` steps have been issued; how many have."""
        while self.step < min(step, self.args.steps):
            await self._moved.wait()
        return self.step

    @property
    def tokens_per_second(self) -> float:
        return len(self.losses) * self.args.batch * self.args.context / (time.perf_counter() - self.start)


async def train(run: Run) -> None:
    """Issue step after step, never more than two ahead of the newest loss that has arrived."""
    args = run.args
    stream = batches(run.text, args.batch, args.context, args.seed + run.first)
    stream = itertools.islice(stream, args.steps - run.first)
    pending: deque[dtorch.TensorFuture] = deque()
    # Drawing a batch and copying it to the executors happens in a worker thread, while the loop issues a step.
    async for x, y in dtorch.aio.prefetch(stream, run.mesh, [Shard(0), Replicate()], depth=2):
        for group in run.optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (run.step + 1) / 20)
        loss = run.loss(x, y)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        pending.append(loss.to_torch_async())
        run.advance()
        if len(pending) > 2:
            run.losses.append((await pending.popleft()).item())
    for future in pending:
        run.losses.append((await future).item())


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode, without gradients. No await inside: other tasks would run in it."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


async def evaluate(run: Run) -> None:
    """Every so many steps, and at the end: the loss on text that training never sees."""
    args, at = run.args, run.first
    # The same batches each time, uploaded once.
    unseen = itertools.islice(batches(run.unseen, args.batch, args.context, seed=1), args.eval_batches)
    held = [batch async for batch in dtorch.aio.prefetch(unseen, run.mesh, [Shard(0), Replicate()])]
    while at < args.steps:
        at = await run.reached(at + args.eval_every)
        with evaluating(run.model):
            losses = [run.loss(x, y) for x, y in held]
        values = await dtorch.aio.gather(*losses)
        run.evaluations[at] = sum(v.item() for v in values) / len(values)


async def checkpoint(run: Run) -> None:
    """Every so many steps, and at the end: all that is needed to go on. A FILE.pt is one that plain torch loads, a name
    without an ending a directory of safetensors, to which each executor writes its own part."""
    args, at = run.args, run.first
    while at < args.steps:
        at = await run.reached(at + args.checkpoint_every)
        state = {"config": run.model.config, "model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
        # Asked for between two steps; the executors write it while training goes on. Once begun, it is ended.
        with anyio.CancelScope(shield=True):
            await dtorch.aio.save({**state, "step": at}, args.checkpoint)
        run.checkpoints += 1
        run.saved = at


def metrics(run: Run) -> str:
    """How far the run is, as Prometheus reads it."""
    values = {
        "train_steps_total": len(run.losses),
        "train_loss_nats": run.losses[-1] if run.losses else math.nan,
        "train_tokens_per_second": run.tokens_per_second,
        "evaluation_loss_nats": next(reversed(run.evaluations.values()), math.nan),
        "evaluations_total": len(run.evaluations),
        "checkpoints_total": run.checkpoints,
        "dtorch_commands_in_flight": dtorch.aio.in_flight(),
    }
    return "".join(f"{name} {value:.6g}\n" for name, value in values.items())


async def serve_metrics(run: Run, *, task_status: anyio.abc.TaskStatus[int]) -> None:
    """Answer `GET /metrics` over HTTP; tells the port once it listens."""

    async def answer(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            with anyio.move_on_after(5):
                request = b""
                while b"\r\n\r\n" not in request and len(request) < 1 << 16:
                    request += await stream.receive()
                found = request.startswith(b"GET /metrics")
                body = (metrics(run) if found else "see /metrics\n").encode()
                status = "200 OK" if found else "404 Not Found"
                head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\n"
                head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                try:
                    await stream.send(head.encode() + body)
                except (anyio.BrokenResourceError, anyio.EndOfStream):
                    pass  # they have left

    async with await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=run.args.port) as listener:
        task_status.started(listener.extra(anyio.abc.SocketAttribute.local_port))
        await listener.serve(answer)


async def show_progress(run: Run) -> None:
    """One line that redraws itself on a terminal, and ten lines in all elsewhere."""
    live, steps, first = sys.stdout.isatty(), run.args.steps, run.first
    shown = first
    while shown < steps:
        await anyio.sleep(0.1)
        done = first + len(run.losses)
        if done == shown or not (live or done == steps or done - shown >= max((steps - first) // 10, 1)):
            continue
        shown = done
        bar = 30 * done // steps
        unseen = next(reversed(run.evaluations.values()), math.nan)
        line = f"{'█' * bar}{'·' * (30 - bar)} step {done}/{steps}  loss {run.losses[-1]:.3f}  unseen {unseen:.3f}"
        line += f" nats/byte  {run.tokens_per_second:,.0f} tokens/s"
        print(f"\r{line}" if live else line, end="" if live and done < steps else "\n", flush=True)


async def stop_on_signal(run: Run, scope: anyio.CancelScope) -> None:
    """Cancel `scope` at Ctrl-C or SIGTERM. A file that is being written by then is still written to its end."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for run.stopped in signals:
            scope.cancel()


async def main(run: Run) -> None:
    async with anyio.create_task_group() as watch:
        watch.start_soon(stop_on_signal, run, watch.cancel_scope)
        await train_and_serve(run)
        watch.cancel_scope.cancel()


async def train_and_serve(run: Run) -> None:
    # Every await is one that lets the other tasks run: a call that would stop the loop is an error here.
    async with dtorch.aio.open(mesh=run.mesh, strict=True), anyio.create_task_group() as beside:
        port = await beside.start(serve_metrics, run)
        print(f"metrics at http://127.0.0.1:{port}/metrics", flush=True)
        async with anyio.create_task_group() as tasks:
            for task in (train, evaluate, checkpoint, show_progress):
                tasks.start_soon(task, run)
        beside.cancel_scope.cancel()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT; evaluate, save and report meanwhile.")
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
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--eval-batches", type=int, default=4)
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--checkpoint", default="train_async.pt", metavar="PATH", help="where checkpoints go")
    parser.add_argument("--resume", metavar="PATH", help="a checkpoint to go on from")
    parser.add_argument("--port", type=int, default=0, help="of the metrics (default: any that is free)")
    parser.add_argument("--backend", default="asyncio", choices=["asyncio", "trio"])
    return parser.parse_args()


if __name__ == "__main__":
    args = arguments()
    run = Run(args)
    print(f"{sum(p.numel() for p in run.model.parameters()):,} parameters, {len(run.text):,} bytes of text, {run.mesh}")
    anyio.run(main, run, backend=args.backend)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # all is done, but for one line
    if run.stopped is not None:
        saved = "nothing was saved"
        if run.saved is not None:
            saved = f"saved up to step {run.saved} in {args.checkpoint}: --resume {args.checkpoint} goes on from there"
        print("\n" if sys.stdout.isatty() else "", end="", flush=True)
        print(f"train_async: stopped by {run.stopped.name} at step {run.step}/{args.steps}; {saved}", flush=True)
        sys.exit(128 + run.stopped)
    first, last = run.losses[0], sum(run.losses[-5:]) / len(run.losses[-5:])
    print(
        f"loss {first:.4f} → {last:.4f}, on unseen text {run.evaluations[args.steps]:.6f} nats/byte; "
        f"{len(run.evaluations)} evaluations, {run.checkpoints} checkpoints, the last in {args.checkpoint}"
    )
