"""Collectives between executors of one host: shared memory beside gloo, the same work in one run.

Each row is one redistribution as executors run it (`executor.redistribution.run`) beside torch's gloo process group
doing the same collective: inputs are kept, results are fresh tensors, as in torch's functional collectives. With
``--warm`` gloo works in place, or into memory that is already there. The time is that of the slowest rank. The two
take turns, several times, and the medians are printed with their ratio. Run: ``python benchmarks/collectives.py``.
"""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

from dtorch.executor.collectives import Comm
from dtorch.executor.redistribution import run
from dtorch.mesh import init_device_mesh
from dtorch.placement import Partial, Replicate, Shard
from dtorch.program import SLOT_BYTES
from dtorch.sharding.redistribute import plan_redistribute
from dtorch.spec import TensorSpec

MOVES = {
    "all_reduce": (Partial(), Replicate()),
    "all_gather": (Shard(0), Replicate()),
    "reduce_scatter": (Partial(), Shard(0)),
    "all_to_all": (Shard(0), Shard(1)),
}
SIZES = {"16 B": 16, "64 KB": 64 << 10, "64 MB": 64 << 20}


def gloo(kind: str, pg: dist.ProcessGroupGloo, x: torch.Tensor, n: int, warm: bool) -> Callable[[], object]:
    """The collective `kind` as gloo does it, on flat tensors; `warm`: into the same memory every time."""
    shape = {"all_gather": (n, x.numel()), "reduce_scatter": (x.numel() // n,)}.get(kind, (x.numel(),))
    kept = torch.empty(shape)
    splits = [x.numel() // n] * n

    def call() -> object:
        out = kept if warm else torch.empty(shape)
        if kind == "all_reduce":
            return pg.allreduce([x if warm else out.copy_(x)]).wait()
        if kind == "all_gather":
            return pg.allgather([list(out)], [x]).wait()
        if kind == "reduce_scatter":
            return pg.reduce_scatter([out], [list(x.chunk(n))]).wait()
        return pg.alltoall_base(out, x, splits, splits).wait()

    return call


def spec_of(kind: str, nbytes: int, n: int) -> tuple[TensorSpec, TensorSpec]:
    """`nbytes` is what each rank puts in, as collectives are usually measured; for all_gather, what it ends up with."""
    mesh = init_device_mesh("cpu", n)
    elements = nbytes // 4
    rows = n if kind != "all_to_all" else max(n, min(elements, 1 << 10))
    total = elements * n if kind == "all_to_all" else max(elements, n)
    shape = (rows, max(1, total // rows))
    if kind == "all_to_all" and shape[1] < n:
        shape = (n, n)
    source, target = MOVES[kind]
    src = TensorSpec.of(shape, None, torch.float32, mesh, (source,))
    return src, src.with_placements((target,))


def timed(f: Callable[[], object], repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        f()
    return (time.perf_counter() - start) / repeat


def rank_main(me: int, n: int, fd: int, slot: int, where: str, plans: dict, turns: int, warm: bool, pipe: int) -> None:
    """Measure as executor `me` and write {(kind, size): [(gloo, shm), …]} to `pipe`."""
    torch.set_num_threads(1)
    control = memoryview(bytearray(512)).cast("Q")
    comm = Comm(SimpleNamespace(control=control, collective_fd=fd, max_executors=8), me, "shm", slot)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=60)
    pg = dist.ProcessGroupGloo(dist.FileStore(os.path.join(where, "store"), n), me, n, options)
    group = comm.group(tuple(range(n)), 0)
    found = {}
    with torch.inference_mode():
        for (kind, size), (src, programs) in plans.items():
            local = torch.ones(src.local_shape(me))
            nbytes = SIZES[size]
            repeat = 1 if nbytes > 1 << 20 else 50
            flat = local.view(-1).clone()
            theirs = gloo(kind, pg, flat, n, warm)

            def ours(program=programs[me], local=local):
                outs, failure = run(program, [local], comm)
                assert not failure
                return outs

            theirs(), ours()
            times = []
            for _ in range(turns):
                group.barrier()
                a = timed(theirs, repeat)
                flat.fill_(1)
                group.barrier()
                times.append((a, timed(ours, repeat)))
            found[kind, size] = times
    with os.fdopen(pipe, "wb") as f:
        pickle.dump(found, f)


def measure(
    n: int, kinds: list[str], sizes: list[str], slot: int, turns: int, warm: bool
) -> dict[tuple[str, str], tuple[float, ...]]:
    """{(kind, size): (gloo seconds, shm seconds)}, medians over turns of the slowest rank."""
    plans = {}
    for kind in kinds:
        for size in sizes:
            src, dst = spec_of(kind, SIZES[size], n)
            plan = plan_redistribute(src, dst, lambda mesh, r: mesh.ids[r], lambda members: 0, slot)
            plans[kind, size] = (src, plan.programs)
    fd = os.memfd_create("collective")
    where = tempfile.mkdtemp()
    children = []
    try:
        for me in range(n):
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    rank_main(me, n, fd, slot, where, plans, turns, warm, writing)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            os.close(writing)
            children.append((pid, reading))
        results = []
        for pid, reading in children:
            with os.fdopen(reading, "rb") as f:
                data = f.read()
            os.waitpid(pid, 0)
            if not data:
                raise SystemExit("a rank failed; see above")
            results.append(pickle.loads(data))
    finally:
        shutil.rmtree(where, ignore_errors=True)
        os.close(fd)
    medians = {}
    for key in plans:
        turns_of = zip(*[r[key] for r in results], strict=True)
        slowest = [(max(a for a, _ in t), max(b for _, b in t)) for t in turns_of]
        medians[key] = tuple(statistics.median(column) for column in zip(*slowest, strict=True))
    return medians


def shown(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds > 1e-3 else f"{seconds * 1e6:.1f} µs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kinds", nargs="+", default=list(MOVES), choices=list(MOVES))
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--slot", type=int, default=SLOT_BYTES)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--warm", action="store_true", help="gloo in place")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, load {load:.1f}, torch {torch.__version__}, slots of {args.slot >> 10} KiB")
    print(f"{'collective':15} {'size':>6} {'ranks':>5} {'gloo':>10} {'shm':>10} {'ratio':>7}")
    for n in args.ranks:
        for (kind, size), (a, b) in measure(n, args.kinds, args.sizes, args.slot, args.turns, args.warm).items():
            print(f"{kind:15} {size:>6} {n:>5} {shown(a):>10} {shown(b):>10} {a / b:>6.1f}x")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
