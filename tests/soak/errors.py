"""Errors on one rank, before and in the middle of collectives: peers go on, and the next step is right."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.runtime.client import client, current_client

from .leftovers import descriptors
from .model import Model, loss_of_step
from .parts import Violation
from .sizes import sizes_of_executors

__all__ = ["Trials"]

WORLD = 2
# Trials that one pool lasts for, so that both kinds of collectives have their turns.
_TURN = 25
_TIMEOUT = 20.0

MOVES: list[tuple[list[Any], list[Any]]] = [
    ([Shard(0)], [Replicate()]),
    ([Shard(0)], [Shard(1)]),
    ([Partial()], [Replicate()]),
    ([Partial()], [Shard(0)]),
    ([Partial("max")], [Replicate()]),
]


class Once(Exception):
    """What an executor raises on purpose."""


def _arm(rank: int, wanted: int, how: str) -> torch.Tensor:
    """Runs on executors: the next exchange of rank `wanted` raises in its middle."""
    modules = sys.modules
    redistribution, shm = modules["dtorch.executor.redistribution"], modules["dtorch.executor.shm_collectives"]
    holder, name = {"allocation": (redistribution, "_empty"), "view": (shm.Group, "view")}[how]
    kept = getattr(holder, name)

    def fail_once(*args: Any) -> Any:
        setattr(holder, name, kept)
        raise MemoryError(f"no memory for {how}")

    if rank == wanted:
        sys.__dict__["dtorch_soak_kept"] = (holder, name, kept)
        setattr(holder, name, fail_once)
    return torch.zeros(1)


def _disarm(rank: int) -> torch.Tensor:
    """Runs on executors: takes back what `_arm` has done and no exchange has met."""
    if (kept := sys.__dict__.pop("dtorch_soak_kept", None)) is not None:
        setattr(*kept)
    return torch.zeros(1)


class Trials:
    """One pool after another, shared memory and gloo by turns."""

    def __init__(self) -> None:
        self._sizes: dict[str, list[tuple[int, ...]]] = {}
        self._first: tuple[int, ...] = ()

    def trial(self, seed: int) -> float:
        lots = random.Random(seed)
        collectives = "gloo" if seed // _TURN % 2 else "shm"
        found = current_client()
        if found is None or found.config.collectives != collectives:
            dtorch.shutdown()
            dtorch.configure(collectives=collectives)
        mesh = dtorch.init_device_mesh("cpu", (WORLD,))
        rank = lots.randrange(WORLD)
        kind = lots.choice([_operator, _function, _in_the_middle, _in_backward, _in_a_step])
        wrong: list[str] = []
        dtorch.ones(1, device_mesh=mesh).sum().item()  # the executors are there
        began = time.monotonic()
        try:
            kind(lots, mesh, rank, wrong)
            _next_step(mesh, lots, wrong)
        except Exception as error:
            error.add_note(f"{kind.__name__}, {collectives}, rank {rank}")
            raise
        took = time.monotonic() - began
        if wrong:
            raise Violation(f"{kind.__name__}, {collectives}, rank {rank}:\n" + "\n".join(wrong))
        dtorch.clear_errors()
        self._look(seed, mesh)
        return took

    def _look(self, seed: int, mesh: dtorch.DeviceMesh) -> None:
        """Once a pool has seen every kind of trial, it holds no more after later ones."""
        if seed % _TURN == _TURN // 2:
            self._first = _held(mesh)
        elif seed % _TURN == _TURN - 1 and self._first:
            last, first, self._first = _held(mesh), self._first, ()
            if any(b > a + 4 for a, b in zip(first, last, strict=True)):
                raise Violation(
                    f"values, plans and descriptors of the executors, and of the client: {first}, then {last}"
                )

    def close(self) -> Iterator[str]:
        # Told here of what nobody asked for: that is not what is tried.
        c = client()
        c.drain()
        c.failures._asked |= set(c.failures._reports)
        dtorch.shutdown()
        yield from ()


def _held(mesh: dtorch.DeviceMesh) -> tuple[int, ...]:
    stores = [n for sizes in sizes_of_executors(mesh) for n in (sizes.values,)]
    fds = [descriptors(pid) for pid in (os.getpid(), *client().pool.pids.values())]
    return (*stores, *fds)


def _failed_rows(mesh: dtorch.DeviceMesh, rank: int) -> dtorch.Tensor:
    """float32[4, 4], Shard(0), of which `rank` alone could not make its half."""
    rows = torch.zeros(4, dtype=torch.int64)
    rows[2 * rank] = 99
    weight = dtorch.ones(8, 4, device_mesh=mesh)
    return torch.nn.functional.embedding(dtorch.distribute_tensor(rows, mesh, [Shard(0)]), weight)


def _must_raise(use: Callable[[], Any], kind: type[Exception], rank: int, wrong: list[str]) -> None:
    try:
        got = use()
    except kind as error:
        if not isinstance(error, dtorch.RemoteError) or error.rank != rank:
            wrong.append(f"{error!r} is of rank {getattr(error, 'rank', '?')}")
    except Exception as error:
        wrong.append(f"{error!r}, where {kind.__name__} was due")
    else:
        wrong.append(f"{got}, where {kind.__name__} was due")


def _laid(value: torch.Tensor, mesh: dtorch.DeviceMesh, placement: Any) -> dtorch.Tensor:
    if not isinstance(placement, Partial):
        return dtorch.distribute_tensor(value, mesh, [placement])
    pieces = [value, torch.zeros_like(value) if placement.reduce_op == "sum" else value - 1]
    return dtorch.DTensor.from_local(pieces, mesh, [placement], shape=tuple(value.shape))


def _operator(lots: random.Random, mesh: dtorch.DeviceMesh, rank: int, wrong: list[str]) -> None:
    """An operator raises on one rank, and its result moves, again and again."""
    bad = _failed_rows(mesh, rank)
    source, target = lots.choice(MOVES)
    if isinstance(source[0], Partial):
        bad = bad.sum(0) if source[0].reduce_op == "sum" else bad.amax(0)
    for _ in range(lots.randint(1, 3)):
        moved = bad.redistribute(placements=target)
        for r in range(WORLD):
            _must_raise(lambda m=moved, r=r: m.to_local(r), IndexError, rank, wrong)


def _function(lots: random.Random, mesh: dtorch.DeviceMesh, rank: int, wrong: list[str]) -> None:
    """A function of the user's raises on one rank."""

    def make(r: int) -> torch.Tensor:
        if r == rank:
            raise Once("on purpose")
        return torch.ones(2, 2)

    made = dtorch.from_local(make, mesh, [Shard(0)], shape=(4, 2), dtype=torch.float32)
    for placements in lots.sample([[Replicate()], [Shard(1)], [Shard(0)]], 2):
        moved = (made * 2).redistribute(placements=placements)
        future = moved.to_torch_async()
        _must_raise(lambda f=future: f.get(_TIMEOUT), Once, rank, wrong)


def _in_the_middle(lots: random.Random, mesh: dtorch.DeviceMesh, rank: int, wrong: list[str]) -> None:
    """The exchange itself fails on one rank; its input is there."""
    how = lots.choice(["allocation", "view"])
    value = torch.arange(20.0 * lots.randint(1, 60)).view(-1, 4)
    source, target = lots.choice(MOVES)
    x = _laid(value, mesh, source[0])
    dtorch.from_local(lambda r: _arm(r, rank, how), mesh, [Shard(0)], shape=(WORLD,)).to_torch()
    # A fast path does not come by there: then the value is right.
    moved = x.redistribute(placements=target)
    got: list[Any] = []
    for r in range(WORLD):
        try:
            got.append(moved.to_local(r))
        except MemoryError as error:
            got.append(error)
    # A peer has its value where the failure came after the last arrival.
    if any(isinstance(g, MemoryError) for g in got):
        if not isinstance(got[rank], dtorch.RemoteError):
            wrong.append(f"the ranks of an exchange that failed on rank {rank} hold {got}")
    elif not moved.to_torch().equal(value):
        wrong.append(f"{moved.to_torch()} for {value}")
    dtorch.from_local(_disarm, mesh, [Shard(0)], shape=(WORLD,)).to_torch()
    if not x.redistribute(placements=target).to_torch().equal(value):
        wrong.append("the same move after it")


def _in_backward(lots: random.Random, mesh: dtorch.DeviceMesh, rank: int, wrong: list[str]) -> None:
    """Gradients that move together, one of which has failed on one rank."""
    weights = [torch.nn.Parameter(dtorch.ones(4, device_mesh=mesh)) for _ in range(lots.randint(1, 4))]
    x = dtorch.ones(4, 4, device_mesh=mesh, placements=[Shard(0)])
    bad, which = _failed_rows(mesh, rank), lots.randrange(len(weights))
    terms = [((bad if i == which else x) * w).sum() for i, w in enumerate(weights)]
    total: Any = sum(terms[1:], terms[0])
    total.redistribute(placements=[Replicate()]).backward()
    _must_raise(lambda: weights[which].grad.to_torch(), IndexError, rank, wrong)  # type: ignore[union-attr]
    for w in weights:
        w.grad = None
        (x * w).sum().redistribute(placements=[Replicate()]).backward()
        if w.grad.tolist() != [4, 4, 4, 4]:  # type: ignore[union-attr]
            wrong.append(f"the next gradient is {w.grad}")


def _in_a_step(lots: random.Random, mesh: dtorch.DeviceMesh, rank: int, wrong: list[str]) -> None:
    """A bad batch in training: the step is not done, and the model stands after clear_errors()."""
    with dtorch.device_mesh(mesh):
        model = torch.nn.Sequential(torch.nn.Embedding(16, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(rows: list[int]) -> torch.Tensor:
        optimizer.zero_grad()
        x = dtorch.distribute_tensor(torch.tensor(rows), mesh, [Shard(0)])
        loss = model(x).square().mean().redistribute(placements=[Replicate()])
        loss.backward()
        optimizer.step()
        return loss.detach()

    first = step([1, 2, 3, 4]).item()
    before = [p.to_torch() for p in model.parameters()]
    rows = [1, 2, 3, 4]
    rows[2 * rank + lots.randrange(2)] = 99
    bad = step(rows)
    behind = step([1, 2, 3, 4]) if lots.random() < 0.5 else bad
    for loss in (bad, behind):
        _must_raise(loss.item, IndexError, rank, wrong)
    dtorch.clear_errors()
    for p, old in zip(model.parameters(), before, strict=True):
        if not all(p.to_local(r).equal(old) for r in range(WORLD)):
            wrong.append("a parameter is not what it was before the bad batch")
    if not step([1, 2, 3, 4]).item() < first:
        wrong.append("training does not go on")


def _next_step(mesh: dtorch.DeviceMesh, lots: random.Random, wrong: list[str]) -> None:
    """A training step, and a move of each kind, with every rank's values."""
    model = Model(lots.choice(["dp", "tp"]), mesh)
    for step in range(2):
        loss = model.step()
        got = [loss.to_local(r).item() for r in range(WORLD)]
        if any(abs(g - loss_of_step(step)) > 1e-9 for g in got):
            wrong.append(f"the losses of the next step {step} are {got}, and plain torch has {loss_of_step(step)}")
    value = torch.arange(16.0).view(4, 4)
    source, target = lots.choice(MOVES)
    moved = _laid(value, mesh, source[0]).redistribute(placements=target)
    for r in range(WORLD):
        if isinstance(target[0], Replicate) and not moved.to_local(r).equal(value):
            wrong.append(f"the next {source} to {target} left {moved.to_local(r)} on rank {r}")
    if not moved.to_torch().equal(value):
        wrong.append(f"the next {source} to {target} is {moved.to_torch()}")
