"""Functions that run on the executor of a GPU, for tests/device/check.py."""

from __future__ import annotations

import os
import time

import torch

from dtorch.executor.collectives import NcclGroup


def memory(rank: int) -> torch.Tensor:
    """Bytes that torch has allocated on the GPU, and bytes resident in the process."""
    with open("/proc/self/statm") as f:
        resident = int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    on_gpu = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
    return torch.tensor([on_gpu, resident], dtype=torch.float64, device="cpu")


def nccl(rank: int) -> torch.Tensor:
    """A communicator of one rank: whether its values are right, whether the GPU was still busy when a collective had
    been enqueued behind work, and how many seconds enqueueing took."""
    group = NcclGroup(os.memfd_create("group"), 0, (0,), 0, lambda: 0)
    x = torch.arange(1000.0, device="cuda")
    out, ordered = torch.empty_like(x), torch.empty(1000, dtype=torch.bfloat16, device="cuda")
    with torch.device("cuda"):
        assert group.all_reduce([x], out, [(0, 0)], "sum", 1) == 0
        assert group.all_reduce([x.bfloat16()], ordered, [(0, 0)], "sum", 2) == 0
    a = torch.randn(4096, 4096, device="cuda")
    torch.cuda.current_stream().synchronize()
    for _ in range(100):
        a = a @ a * 1e-2
    began = time.perf_counter()
    group.all_reduce([x], out, [(0, 0)], "sum", 1)
    took = time.perf_counter() - began
    busy = not torch.cuda.current_stream().query()
    right = torch.equal(out, x) and torch.equal(ordered, (x.bfloat16().float() / 2).bfloat16())
    return torch.tensor([right, busy, took], dtype=torch.float64, device="cpu")
