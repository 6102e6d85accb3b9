"""All that dtorch promises of a GPU, checked on one of them within eight minutes.

    python tests/device/check.py [--json FILE] [--only NAME …] [--budget SECONDS]

Prints a line per check and a table at the end, writes the same as JSON, and exits with 1 if a check failed. Needs one
GPU and a torch built for it; the reference is plain torch on the same GPU, in a process of its own (plain.py).

`--rehearse` runs it without a GPU, on the late stand-in of tests/process/delayed_device.py: that shows that the checks
themselves run, and leaves out what only a GPU has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dtorch
from dtorch import gpus
from dtorch.mesh import SIMULATE
from dtorch.runtime.client import Client, client
from dtorch.runtime.shared import EXECUTOR_DONE, executor_line

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import programs  # noqa: E402
import there  # noqa: E402

Check = Callable[[], str]
CHECKS: dict[str, Check] = {}
GPU_ONLY: set[str] = set()
R, S = dtorch.Replicate(), dtorch.Shard

rehearsal = False


def check(name: str, *, gpu_only: bool = False) -> Callable[[Check], Check]:
    """A function that returns what it found, or raises."""

    def register(function: Check) -> Check:
        CHECKS[name] = function
        if gpu_only:
            GPU_ONLY.add(name)
        return function

    return register


def mesh() -> dtorch.DeviceMesh:
    return dtorch.DeviceMesh("cuda", [0])


def place(t: torch.Tensor) -> Any:
    return dtorch.Tensor(t, mesh())


def run_there(function: Callable[[int], torch.Tensor], shape: tuple[int, ...] = (1,)) -> torch.Tensor:
    """What `function` gives on the executor of the GPU."""
    return dtorch.from_local(function, mesh(), [R], shape=shape, dtype=torch.float64).to_torch()


_reference: dict[str, Any] = {}


def reference() -> dict[str, Any]:
    """What plain torch computes on the same device."""
    if not _reference:
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/plain.pt"
            device = "cpu" if rehearsal else "cuda:0"
            subprocess.run([sys.executable, str(HERE / "plain.py"), device, path], check=True, timeout=120)
            _reference.update(torch.load(path, weights_only=True))
    return _reference


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    tolerance = 2e-2 if a.element_size() == 2 else 1e-4
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)


# -- values -----------------------------------------------------------------------------------------------------------


@check("start")
def start() -> str:
    began = time.monotonic()
    assert place(torch.ones(3)).sum().item() == 3
    took = time.monotonic() - began
    assert not torch.cuda.is_initialized(), "the client has initialised CUDA"
    if not rehearsal:
        for pid in (client().pool.warden_pid, "self"):
            # CUDA opens this one, NVML does not.
            opened = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
            assert "/dev/nvidia-uvm" not in opened, f"process {pid} has initialised CUDA"
    return f"first value after {took:.1f} s; neither client nor warden has initialised CUDA"


@check("operators")
def operators() -> str:
    with dtorch.device_mesh(mesh()):
        got = programs.run_ops(place, lambda t: t.to_torch())
    wrong = []
    for name, want in reference()["ops"].items():
        have = got[name]
        if isinstance(have, str) or isinstance(want, str):
            if type(have) is not type(want):
                wrong.append(f"{name}: {have if isinstance(have, str) else f'only torch raised {want}'}")
        elif not close(have, want):
            wrong.append(f"{name}: {have.dtype} {tuple(have.shape)} differs from {want.dtype} {tuple(want.shape)}")
    assert not wrong, "; ".join(wrong)
    return f"{len(got)} as plain torch on the GPU"


@check("training")
def training() -> str:
    with dtorch.device_mesh(mesh()):
        got = programs.train(dtorch.distributed.tensor.distribute_module(programs.model(), mesh()), place)
    want = reference()["losses"]
    worst = max(abs(a - b) for a, b in zip(got, want, strict=True))
    assert worst < 1e-3, f"losses part by {worst}: {got} beside {want}"
    assert got[-1] < got[0] - 0.2, f"the loss does not fall: {got}"
    return f"20 steps of AdamW; losses within {worst:.1e} of plain torch"


@check("random numbers")
def random_numbers() -> str:
    dtorch.manual_seed(5)
    got = dtorch.rand(1000, device_mesh=mesh()).to_torch()
    assert torch.equal(got, reference()["random"]), "not what plain torch draws from the same seed"
    return "plain torch's bits"


@check("values there and back")
def there_and_back() -> str:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64):
        for t in (torch.randn(5, 7), torch.randn(7, 5).t(), torch.randn(()), torch.randn(0, 3), torch.randn(300, 1001)):
            plain = (t * 5).to(dtype)
            assert torch.equal(place(plain).to_torch(), plain), f"{dtype} {tuple(plain.shape)}"
            assert torch.equal(place(plain).t().contiguous().to_torch() if plain.ndim == 2 else plain, plain.t())
    rates = []
    for size in (1 << 20, 64 << 20, 128 << 20):
        t = place(torch.randn(size // 4))
        t.to_torch()
        began = time.perf_counter()
        for _ in range(3):
            value = t.to_torch()
            del value
        rates.append(f"{size >> 20} MB at {3 * size / (time.perf_counter() - began) / 1e9:.1f} GB/s")
    return "to the client: " + ", ".join(rates)


@check("values by way of buffers")
def staged() -> str:
    dtorch.shutdown()
    before = dtorch.configure()
    dtorch.configure(pinned_bytes=0)
    try:
        for t in (torch.randn(300, 1001), torch.randn(7, 5).t(), torch.randn(16 << 20)):
            assert torch.equal((place(t) + 0).to_torch(), t)
    finally:
        dtorch.configure(pinned_bytes=before.pinned_bytes)
        dtorch.shutdown()
    return "right where the arena is not pinned"


@check("uploads")
def uploads() -> str:
    total = place(torch.zeros(1 << 18))
    began = time.perf_counter()
    for i in range(1000):
        total = total + place(torch.full((1 << 18,), float(i % 100)))
    assert total.to_torch()[:: 1 << 14].eq(10 * sum(range(100))).all(), "an upload was overwritten before its copy"
    c = client()
    c.values.reclaim()
    left = len(c.values._in_upload)
    assert left <= 1, f"{left} blocks were never given back"
    return f"1,000 of 1 MB, {1000 * (1 << 20) / (time.perf_counter() - began) / 1e9:.1f} GB/s; all blocks came back"


# -- not waiting ------------------------------------------------------------------------------------------------------


@check("awaits while the GPU is busy")
def awaits() -> str:
    size = 512 if rehearsal else 8192
    a = place(torch.randn(size, size))
    (a @ a)[0, 0].item()
    c = client()
    done = executor_line(c.accelerators) + EXECUTOR_DONE

    async def main() -> tuple[float, float, float]:
        beats: list[float] = []

        async def heart() -> None:
            while True:
                before = time.perf_counter()
                await asyncio.sleep(0.001)
                beats.append(time.perf_counter() - before)

        task = asyncio.create_task(heart())
        began = time.perf_counter()
        b = a
        for _ in range(60):
            b = b @ a * 1e-3
        future = b[0, 0].to_torch_async()
        for _ in range(200):
            b = b + 0.0
        issued = c.writer.issued
        c.flush()
        while c.control[done] < issued and not future.is_ready():  # noqa: ASYNC110  a word of another process
            await asyncio.sleep(0.001)
        enqueued = time.perf_counter() - began
        await future
        finished = time.perf_counter() - began
        task.cancel()
        return enqueued, finished, statistics.quantiles(beats, n=100)[-1] if len(beats) > 2 else 0.0

    enqueued, finished, lag = asyncio.run(main())
    if not rehearsal:
        assert enqueued < finished / 2, f"behind a fetch, commands waited for it: {enqueued:.3f} of {finished:.3f} s"
    return (
        f"all was enqueued after {enqueued * 1e3:.0f} ms, the GPU had it after {finished * 1e3:.0f}; "
        f"heartbeat p99 {lag * 1e3:.1f} ms"
    )


# -- several ranks ----------------------------------------------------------------------------------------------------


@check("simulated ranks")
def simulated() -> str:
    dtorch.shutdown()
    dtorch.configure(same_device=True)
    os.environ[SIMULATE] = "1"
    try:
        grid = dtorch.init_device_mesh("cuda", (2, 4))
        g = torch.Generator().manual_seed(0)
        x, w1, w2 = (torch.randn(8, 12, generator=g) for _ in range(3))
        dx = dtorch.distribute_tensor(x, grid, [S(0), R])
        d1 = dtorch.distribute_tensor(w1, grid, [R, S(0)]).requires_grad_()
        d2 = dtorch.distribute_tensor(w2.t().contiguous(), grid, [R, S(1)]).requires_grad_()
        hidden = torch.nn.functional.gelu(torch.nn.functional.linear(dx, d1))
        out = torch.nn.functional.linear(hidden, d2.t().redistribute(placements=[R, S(0)]).t())
        out.redistribute(placements=[R, R]).square().sum().backward()
        p1, p2 = w1.clone().requires_grad_(), w2.t().contiguous().requires_grad_()
        plain = torch.nn.functional.linear(torch.nn.functional.gelu(torch.nn.functional.linear(x, p1)), p2)
        plain.square().sum().backward()
        assert close(out.to_torch(), plain.detach())
        assert close(d1.grad.to_torch(), p1.grad) and close(d2.grad.to_torch(), p2.grad)
        dtorch.manual_seed(5)
        drawn = dtorch.rand(8, 125, device_mesh=grid, placements=[S(0), S(1)]).to_torch()
        assert torch.equal(drawn.flatten(), reference()["random"]), "random numbers depend on the mesh"
        assert {*client().writer.readers} <= {0, client().accelerators}, "ranks have executors of their own"
    finally:
        del os.environ[SIMULATE]
        dtorch.configure(same_device=False)
        dtorch.shutdown()
    return "a (2, 4) mesh in one executor: forward, gradients, random numbers"


@check("between CPU and GPU")
def between() -> str:
    value = torch.randn(1 << 20)
    sent = dtorch.Tensor(value).to(mesh())
    back = (sent * 2).to("cpu")
    assert sent.device.type == "cuda" and back.device.type == "cpu"
    assert torch.equal((back + 1).to_torch(), value * 2 + 1)
    return "a tensor of the CPU's executor there and back"


@check("NCCL with one rank", gpu_only=True)
def nccl() -> str:
    right, busy, took = run_there(there.nccl, (3,)).tolist()
    assert right, "wrong values"
    assert busy, "the GPU was done before the collective was enqueued: the check shows nothing"
    assert took < 0.05, f"enqueueing took {took:.3f} s: it waits for the GPU"
    return f"values right; enqueued in {took * 1e6:.0f} µs behind a busy stream"


# -- the long run -----------------------------------------------------------------------------------------------------


@check("memory stays flat")
def flat() -> str:
    a, ones = place(torch.randn(256, 256)), place(torch.ones(256, 256))

    def spell(n: int) -> list[float]:
        b = a
        for i in range(n):
            b = b * 0.5 + ones
            if i % 500 == 0:
                (b + place(torch.ones(256, 256))).to_torch()
        b.to_torch()
        del b
        client().flush()  # what died is told in batches
        return run_there(there.memory, (2,)).tolist()

    spell(3000)
    before = spell(3000)
    count = 2000 if rehearsal else 30_000
    after = spell(count)
    grown, resident = after[0] - before[0], after[1] - before[1]
    assert grown <= 1 << 20, f"{grown:,.0f} bytes more on the GPU"
    assert resident <= 16 << 20, f"{resident:,.0f} bytes more in the executor"
    return f"after {2 * count:,} ops: {grown:,.0f} bytes more on the GPU, {resident / 1e6:.1f} MB in the executor"


@check("overhead")
def overhead() -> str:
    a = place(torch.randn(8, 8))
    plain = reference()

    def chain(n: int) -> tuple[float, float]:
        began = time.perf_counter()
        b = a
        for _ in range(n):
            b = b + a
        issued = time.perf_counter() - began
        b.to_torch()
        return issued / n * 1e6, (time.perf_counter() - began) / n * 1e6

    chain(1000)
    runs = [chain(5000) for _ in range(5)]
    issue, whole = (statistics.median(column) for column in zip(*runs, strict=True))
    waits: list[float] = []
    for _ in range(200):
        began = time.perf_counter()
        (a + a).to_torch()
        waits.append(time.perf_counter() - began)
    return (
        f"a + b: issue {issue:.1f} µs (plain torch {plain['issue']:.1f}), issue to value {whole:.1f} µs/op "
        f"(plain {plain['chain']:.1f}, ratio {whole / plain['chain']:.2f}); "
        f"to_torch p50 {statistics.median(waits) * 1e6:.0f} µs"
    )


# -- failures ---------------------------------------------------------------------------------------------------------


@check("out of memory", gpu_only=True)
def out_of_memory() -> str:
    huge = dtorch.empty(1 << 46, device_mesh=mesh())
    try:
        huge[:1].to_torch()
    except torch.OutOfMemoryError as error:
        text = str(error).splitlines()[0]
    else:
        raise AssertionError("256 TiB were allocated")
    assert place(torch.ones(2)).sum().item() == 2, "nothing runs after it"
    return f"raised where asked for, and the executor goes on: {text[:60]}"


@check("device-side assertion", gpu_only=True)
def assertion() -> str:
    table = place(torch.randn(4, 4))
    began = time.monotonic()
    try:
        torch.nn.functional.embedding(place(torch.tensor([1 << 20])), table).to_torch()
    except dtorch.errors.ExecutorDiedError as error:
        text = str(error)
    else:
        raise AssertionError("an index out of range went unnoticed")
    took = time.monotonic() - began
    assert "assert" in text, f"the reason is not told: {text}"
    dtorch.restart()
    assert place(torch.ones(2)).sum().item() == 2, "no fresh pool"
    return f"the executor's end was told after {took:.1f} s, with its reason; restart() goes on"


# -- the run ----------------------------------------------------------------------------------------------------------


def rehearse() -> None:
    """Late stand-ins in the place of GPUs."""
    global rehearsal
    rehearsal = True
    for module in ("dtorch.mesh", "dtorch.runtime.pool_client"):
        sys.modules[module].gpu_count = lambda: 1  # type: ignore[attr-defined]

    def options_of(self: Client, executor: int) -> dict[str, Any]:
        found: dict[str, Any] = {"accelerators": self.accelerators}
        if executor >= self.accelerators:
            device = "tests.process.delayed_device:Delayed"
            found |= {"device": device, "delay": 0.001, "pinned": self.config.pinned_bytes, "threads": 1}
        return found

    Client._options_of = options_of  # type: ignore[method-assign]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", default="device-check.json", help="where the results go")
    parser.add_argument("--only", nargs="*", choices=CHECKS, metavar="NAME", help="run these checks alone")
    parser.add_argument("--budget", type=float, default=450, help="seconds after which no check is started")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, on a stand-in")
    args = parser.parse_args()
    if args.rehearse:
        rehearse()
    elif not gpus.count():
        why = "torch was built without CUDA" if torch.version.cuda is None else "no GPU is visible"
        print(f"skipped: nothing was checked, because {why} (torch {torch.__version__})")
        return 0
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    for name, function in CHECKS.items():
        if args.only and name not in args.only:
            continue
        before = time.monotonic()
        if args.rehearse and name in GPU_ONLY:
            outcome, found = "left out", "needs a GPU"
        elif before - began > args.budget:
            outcome, found = "left out", f"the budget of {args.budget:g} s is used up"
        else:
            try:
                outcome, found = "ok", function()
            except Exception as error:
                outcome, found = "FAILED", f"{type(error).__name__}: {error}"
                traceback.print_exc()
                dtorch.shutdown()
        rows.append({"check": name, "outcome": outcome, "seconds": time.monotonic() - before, "found": found})
        print(f"{outcome:8} {name}: {found}", flush=True)
    dtorch.shutdown()
    report = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rehearsal": args.rehearse,
        "seconds": time.monotonic() - began,
        "checks": rows,
    }
    Path(args.json).write_text(json.dumps(report, indent=2) + "\n")
    print(f"\n{'check':32} {'outcome':9} {'s':>6}")
    for row in rows:
        print(f"{row['check']:32} {row['outcome']:9} {row['seconds']:6.1f}")
    print(f"\n{report['seconds']:.0f} s in all; torch {torch.__version__}; written to {args.json}")
    return int(any(row["outcome"] == "FAILED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
