"""The least that a client in pure Python can cost: the yardstick of dispatch.py and throughput.py.

One operator (`add`), one plan cache, one forked executor, one ring in shared memory, and nothing else: no placements,
no errors, no memory bounds, no threads but one, no waiting but spinning. What dtorch costs above this is the product.

    python benchmarks/floor.py      # writes "<µs per issued op> <op/s from issue to value>" for each line it reads
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
import sys
import time
from collections import deque

import torch

RING_BYTES = 1 << 22
HEADER_BYTES = 4096
WORDS = RING_BYTES // 4
# Indexes into the header, in 8-byte words: each on a cache line of its own.
WRITTEN, READ, DONE = 0, 8, 24
ADD, FENCE, FREE, EXIT = 1, 2, 3, 9
OPS = 10_000
PR_SET_PDEATHSIG = 1

memory = os.memfd_create("floor")
os.ftruncate(memory, RING_BYTES + HEADER_BYTES)
wake = os.eventfd(0)
header = memoryview(mmap.mmap(memory, RING_BYTES + HEADER_BYTES)).cast("B")
indexes, ring = header.cast("Q"), header[HEADER_BYTES:].cast("I")


def execute() -> None:
    """The executor: read, run, report."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    store = {1: torch.randn(8, 8), 2: torch.randn(8, 8)}
    read = spins = 0
    while True:
        written = indexes[WRITTEN]
        if written == read:
            spins += 1
            if spins > 200:
                os.eventfd_read(wake)
                spins = 0
            continue
        spins = 0
        while read < written:
            at = read % WORDS
            plan = ring[at]
            if plan == ADD:
                store[ring[at + 3]] = torch.add(store[ring[at + 1]], store[ring[at + 2]])
            elif plan == FREE:
                store.pop(ring[at + 1], None)
            elif plan == FENCE:
                indexes[DONE] = ring[at + 1]
            else:
                os._exit(0)
            read += 4
        indexes[READ] = read


class Spec:
    __slots__ = ("dtype", "shape", "stride")


class Ref:
    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        dropped.append(self.number)


class Client:
    """What is issued and not yet published, and the cache of plans."""

    def __init__(self) -> None:
        self.pending: list[bytes] = []
        self.plans: dict[tuple[object, ...], tuple[int, Spec]] = {}
        self.last_ref = 10
        self.written = 0

    def publish(self) -> None:
        words = memoryview(b"".join(self.pending)).cast("I")
        self.pending.clear()
        while self.written + len(words) - indexes[READ] > WORDS:
            pass
        at = self.written % WORDS
        before_end = min(len(words), WORDS - at)
        ring[at : at + before_end] = words[:before_end]
        ring[: len(words) - before_end] = words[before_end:]
        self.written += len(words)
        indexes[WRITTEN] = self.written
        os.eventfd_write(wake, 1)


dropped: deque[int] = deque()
client = Client()
pack = struct.Struct("<4I").pack
make = torch.Tensor._make_wrapper_subclass
CPU = torch.device("cpu")


class Proxy(torch.Tensor):
    __slots__ = ("_ref", "_spec")
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        key, numbers = [func], []
        for a in args:
            if type(a) is Proxy:
                key.append(a._spec)
                numbers.append(a._ref.number)
            else:
                key.append(a)
        key = tuple(key)
        plan = client.plans.get(key)
        if plan is None:
            plan = client.plans[key] = (ADD, args[0]._spec)
        operator, spec = plan
        client.last_ref += 1
        out = wrap(client.last_ref, spec)
        pending = client.pending
        pending.append(pack(operator, numbers[0], numbers[1], client.last_ref))
        while dropped:
            pending.append(pack(FREE, dropped.popleft(), 0, 0))
        if len(pending) >= 64:
            client.publish()
        return out


def wrap(number: int, spec: Spec) -> Proxy:
    out = make(Proxy, spec.shape, spec.stride, 0, None, spec.dtype, torch.strided, CPU)
    out._spec = spec
    out._ref = Ref(number)
    return out


def measure(x: Proxy, y: Proxy, fence: int) -> tuple[float, float]:
    """(µs per issued op, op/s from issue to value) of `OPS` dependent additions."""
    start = time.perf_counter()
    z = x
    for _ in range(OPS):
        z = z + y
    issued = time.perf_counter() - start
    client.pending.append(pack(FENCE, fence, 0, 0))
    client.publish()
    while indexes[DONE] != fence:
        os.sched_yield()
    return issued / OPS * 1e6, OPS / (time.perf_counter() - start)


def main() -> None:
    if os.fork() == 0:
        execute()
    spec = Spec()
    spec.shape, spec.stride, spec.dtype = torch.Size((8, 8)), (8, 1), torch.float32
    x, y = wrap(1, spec), wrap(2, spec)
    try:
        for fence, _ in enumerate(sys.stdin, start=1):
            print(*measure(x, y, fence), flush=True)
    finally:
        client.pending.append(pack(EXIT, 0, 0, 0))
        client.publish()


main()
