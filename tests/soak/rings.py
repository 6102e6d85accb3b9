"""Words of the shared memory overwritten at random: the client is told, or has the right value; it never hangs.

What is trusted by design is left alone here (docs/decisions.md): numbers and refs that other values have, and words
that only say how far somebody has come.
"""

from __future__ import annotations

import contextlib
import random
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import dtorch
from dtorch import Replicate, Shard
from dtorch.runtime.client import client
from dtorch.runtime.command import CONTROL
from dtorch.runtime.reply import _REPLY_DATA, _REPLY_WRITE

from ..process.stopping import stopped
from .parts import Violation

__all__ = ["Trials"]

# Seconds after which whoever waits hangs.
_HANGS = 20.0
# What executors can have: a length made of noise is refused, not served.
_ADDRESS_SPACE = 8 << 30


class Trials:
    """One pool, which is started anew whenever it has ended."""

    def __init__(self) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
        dtorch.configure(arena_bytes=64 << 20, collective_bytes=64 << 20, ring_bytes=1 << 20)
        self._shapes = iter(range(10, 1 << 30))

    def trial(self, seed: int) -> float:
        lots = random.Random(seed)
        mesh = dtorch.init_device_mesh("cpu", (2,))
        kind = lots.choice([_status_words, _reply_ring, _headers, _refs, _definitions, _warden])
        x = dtorch.arange(8, dtype=torch.float64, device_mesh=mesh, placements=[Shard(0)])
        _right(x.sum().item(), 28)
        try:
            took = kind(lots, mesh, x, next(self._shapes))
            self._afterwards(mesh)
        except Exception as error:
            error.add_note(kind.__name__)
            dtorch.shutdown()
            raise
        return took

    def _afterwards(self, mesh: dtorch.DeviceMesh) -> None:
        """The pool goes on, or has said that it has ended: a fresh one does."""
        try:
            ones = dtorch.ones(6, device_mesh=mesh, placements=[Shard(0)])
            got = ones.sum().redistribute(placements=[Replicate()]).to_torch_async().get(_HANGS).item()
        except TimeoutError:
            raise Violation("the pool neither goes on nor says that it has ended") from None
        except dtorch.DtorchError:
            dtorch.restart()
            got = dtorch.ones(6, device_mesh=mesh, placements=[Shard(0)]).sum().item()
        _right(got, 6)

    def close(self) -> Iterator[str]:
        dtorch.shutdown()
        yield from ()


def _right(got: Any, wanted: Any) -> None:
    if got != wanted:
        raise Violation(f"{got}, where {wanted} was due")


def _told_or(wanted: float, use: Callable[[], torch.Tensor]) -> float:
    """Seconds until `use` gave what is `wanted`, or raised one of dtorch's errors."""
    began = time.monotonic()
    try:
        got = use().sum().item()
    except TimeoutError:
        raise Violation(f"nothing was told within {_HANGS:g} s") from None
    except dtorch.DtorchError:
        return time.monotonic() - began
    _right(got, wanted)
    return time.monotonic() - began


def _noise(lots: random.Random) -> int:
    """A word: anything, a small number, or nothing."""
    return lots.choice([lots.getrandbits(64), lots.getrandbits(40) | 1 << 39, 0])


def _status_words(lots: random.Random, mesh: dtorch.DeviceMesh, x: dtorch.Tensor, n: int) -> float:
    """Answers to values that nobody has computed yet."""
    c = client()
    with stopped():
        future = (x * 2).to_torch_async()
        for slot, generation in c.slots._generations.items():
            for e in (0, 1):
                # A state that is none, or a later use of the slot.
                word = (generation << 2) + lots.choice([3, 4, 5, 1 << 20, 1 << 60])
                c.control[c.state.slot_word(slot, e)] = word
        return _told_or(56, lambda: future.get(_HANGS))


def _reply_ring(lots: random.Random, mesh: dtorch.DeviceMesh, x: dtorch.Tensor, n: int) -> float:
    """What an executor is said to have said."""
    reader = lots.choice(list(client().pool.replies().values()))
    words = reader._words
    with stopped():
        future = (x * 2).to_torch_async()
        at = words[_REPLY_WRITE]
        for i in range(lots.randint(1, 8)):
            words[_REPLY_DATA + (at + i) % reader._capacity] = _noise(lots)
        words[_REPLY_WRITE] = at + lots.choice([1, 2, 8, reader._capacity + 1, lots.getrandbits(63)])
        client().look()
    return _told_or(56, lambda: future.get(_HANGS))


def _issued(x: dtorch.Tensor, values: int) -> tuple[list[int], Any]:
    """Issue a few operators; (places of their records in the ring, a future of (x + … + x).redistribute)."""
    c = client()
    start = c.writer.head
    y = x
    for _ in range(values):
        y = y + x
    future = y.redistribute(placements=[Replicate()]).to_torch_async()
    places, at = [], start
    while at < c.writer.head:
        places.append(at & c.writer.mask)
        at += c.writer.ring[at & c.writer.mask] >> 32
    return places, future


def _headers(lots: random.Random, mesh: dtorch.DeviceMesh, x: dtorch.Tensor, n: int) -> float:
    """Lengths and plans of commands."""
    _issued(x, 3)[1].get(_HANGS)  # plans are there
    with stopped():
        places, future = _issued(x, 3)
        for p in lots.sample(places, lots.randint(1, len(places))):
            head = client().writer.ring[p]
            client().writer.ring[p] = lots.choice(
                [0, head & 0xFFFFFFFF, head ^ 1 << lots.randrange(32, 64), lots.getrandbits(64) | 1 << 31]
            )
    return _told_or(28 * 4, lambda: future.get(_HANGS))


def _refs(lots: random.Random, mesh: dtorch.DeviceMesh, x: dtorch.Tensor, n: int) -> float:
    """Names of values that nobody has."""
    _issued(x, 3)[1].get(_HANGS)
    with stopped():
        places, future = _issued(x, 3)
        ring = client().writer.ring
        for p in lots.sample(places, 2):
            if ring[p] & 0xFFFFFFFF > CONTROL and ring[p] >> 32 > 1:
                ring[p + lots.randrange(1, min(3, ring[p] >> 32))] = lots.getrandbits(63) | 1 << 62
    return _told_or(28 * 4, lambda: future.get(_HANGS))


def _definitions(lots: random.Random, mesh: dtorch.DeviceMesh, x: dtorch.Tensor, n: int) -> float:
    """Definitions of plans, pickled."""
    with stopped():
        fresh = dtorch.ones(n, device_mesh=mesh, placements=[Shard(0)])
        places, future = _issued(fresh, 2)
        ring, raw = client().writer.ring, client().state.ring_bytes
        controls = [p for p in places if ring[p] & 0xFFFFFFFF == CONTROL]
        for p in lots.sample(controls, lots.randint(1, len(controls))):
            start, length = 8 * (p + 2), ring[p + 1]
            at = lots.randrange(0, max(1, length - 16))
            raw[start + at : start + at + 16] = lots.randbytes(16)
    return _told_or(n * 3, lambda: future.get(_HANGS))


def _warden(lots: random.Random, mesh: dtorch.DeviceMesh, x: dtorch.Tensor, n: int) -> float:
    """What the warden is told."""
    warden = client().pool._warden
    assert warden is not None
    noise = [lots.randbytes(lots.randint(1, 2000)), b"5", b"[]", b'{"op": "fork"}', b'{"op": 1}', b"{" * 5000]
    for _ in range(lots.randint(1, 3)):
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            warden.sock.send(lots.choice(noise))
    return _told_or(56, lambda: (x * 2).to_torch_async().get(_HANGS))
