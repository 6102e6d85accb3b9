"""How much a pool holds, on either side: values, plans, slots, blocks, descriptors, memory."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path

import torch

import dtorch
from dtorch import Shard
from dtorch.runtime.client import client
from dtorch.runtime.plans import known

from .leftovers import descriptors

__all__ = ["Sizes", "memory", "sizes_of_client", "sizes_of_executors"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one process holds. `slots`, `blocks` and `pending` are the client's alone."""

    values: int
    plans: int
    descriptors: int
    slots: int = 0
    blocks: int = 0
    pending: int = 0


def memory(pid: int) -> int:
    """Bytes of a process: its own, and its share of those that it has with others of its pool. Files do not count: the
    share of a library grows whenever another program that had it open ends."""
    lines = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line[1]) * 1024 for line in lines if line[0] in ("Pss_Anon:", "Pss_Shmem:"))


def _count_here(rank: int) -> torch.Tensor:
    """Runs on an executor: values in its store, and plans."""
    modules = __import__("sys").modules
    kind = modules["dtorch.executor.interpreter"].Interpreter
    found = modules.setdefault("dtorch_soak_interpreter", None)
    if found is None:
        found = modules["dtorch_soak_interpreter"] = next(o for o in gc.get_objects() if isinstance(o, kind))
    return torch.tensor([len(found.store), len(found.plans)])


def sizes_of_executors(mesh: dtorch.DeviceMesh) -> list[Sizes]:
    """Of every executor of `mesh`, which has one rank on each."""
    gc.collect()
    client().flush()
    counts = dtorch.from_local(_count_here, mesh, [Shard(0)], shape=(2 * mesh.nranks,), dtype=torch.int64)
    pids = client().pool.pids
    return [
        Sizes(int(counts.to_local(rank)[0]), int(counts.to_local(rank)[1]), descriptors(pids[rank]))
        for rank in range(mesh.nranks)
    ]


def sizes_of_client() -> Sizes:
    """Of this process."""
    gc.collect()
    c = client()
    v = c.values
    v.reclaim()
    c.slots.sweep()
    return Sizes(
        values=len(v._in_upload),
        plans=sum(len(op.plans) for op in known()) + sum(map(len, (v._uploads, v._piecewise, v._fetches))),
        descriptors=descriptors(os.getpid()),
        slots=c.slots.in_use(),
        blocks=c.arena.stats().blocks,
        pending=c.waiting.count,
    )
