"""Shared memory that something has written over: the client is told, and neither hangs nor takes it for a value.

What cannot be told from what the client wrote itself is trusted: see docs/decisions.md. tests/soak tries words at
random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import dtorch
from dtorch import Replicate, Shard, init_device_mesh
from dtorch.runtime.client import client
from dtorch.runtime.command import CONTROL
from dtorch.runtime.reply import _REPLY_DATA, _REPLY_WRITE

from .stopping import stopped


@pytest.fixture
def x() -> Iterator[dtorch.Tensor]:
    """float32[4], Shard(0) on a pool that is about to be ruined."""
    t = dtorch.ones(4, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
    assert _sum(t).get(20).item() == 8
    yield t
    dtorch.restart()
    assert dtorch.ones(4).sum().item() == 4


def _sum(t: dtorch.Tensor) -> Any:
    return (t + t).redistribute(placements=[Replicate()]).sum().to_torch_async()


def _records(start: int) -> list[int]:
    """Places in the ring of the commands issued from `start` on."""
    writer = client().writer
    places = []
    while start < writer.head:
        places.append(start & writer.mask)
        start += writer.ring[start & writer.mask] >> 32
    return places


@pytest.mark.parametrize(
    "head",
    [
        lambda head: 0,
        lambda head: head & 0xFFFFFFFF,  # a length of nothing
        lambda head: head | 1 << 50,  # beyond what was written
        lambda head: (head & 0xFFFFFFFF) | 2 << 32,  # into the middle of itself
    ],
)
def test_commands_that_are_none_end_the_executor(x: dtorch.Tensor, head: Callable[[int], int]) -> None:
    with stopped():
        start = client().writer.head
        future = _sum(x)
        ring = client().writer.ring
        ring[_records(start)[0]] = head(ring[_records(start)[0]])
    with pytest.raises(dtorch.ExecutorDiedError, match="the command ring holds what is no record"):
        future.get(20)


def test_definitions_that_cannot_be_read_end_the_executor(x: dtorch.Tensor) -> None:
    with stopped():
        start = client().writer.head
        future = _sum(x.view(2, 2))
        ring = client().writer.ring
        for p in _records(start):
            if ring[p] & 0xFFFFFFFF == CONTROL:
                ring[p + 2] = 0
    with pytest.raises(dtorch.ExecutorDiedError, match="a message of the client cannot be read"):
        future.get(20)


def test_answers_that_are_none_are_refused(x: dtorch.Tensor) -> None:
    c = client()
    with stopped():
        future = x.to_torch_async()
        for slot, generation in c.slots._generations.items():
            for e in (0, 1):
                c.control[c.state.slot_word(slot, e)] = generation + 1 << 2 | 1  # of its next use
        with pytest.raises(dtorch.PoolError, match="something has written over the memory"):
            future.get(20)
    with pytest.raises(dtorch.PoolError, match="something has written over the memory"):
        x.sum().item()


@pytest.mark.parametrize("written", [1, 5, 1 << 40])
def test_replies_that_are_none_end_the_pool(x: dtorch.Tensor, written: int) -> None:
    reader = client().pool.replies()[1]
    words = reader._words
    with stopped():
        future = x.to_torch_async()
        at = words[_REPLY_WRITE]
        words[_REPLY_DATA + at % reader._capacity] = 25
        words[_REPLY_WRITE] = at + written
    future.wait(20)
    with pytest.raises(dtorch.PoolError, match="what executor 1 says cannot be read"):
        client().look()  # as every wait does that sleeps
        x.sum().item()


def test_a_warden_that_says_what_cannot_be_read(x: dtorch.Tensor) -> None:
    pool = client().pool
    assert pool._warden is not None
    kept = pool._warden.messages
    pool._warden.messages = lambda: iter([{"event": "forked", "executors": 5}])  # type: ignore[method-assign]
    with pytest.raises(dtorch.PoolError, match="what the warden of the executors says cannot be read"):
        x.sum().item()
    pool._warden.messages = kept  # type: ignore[method-assign]
