"""kill -9 of a random executor, at a random moment of training and of serving."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import torch

import dtorch
from dtorch import Replicate, Shard, aio
from dtorch.runtime.client import client, current_client

from ..conftest import started_here
from ..process.loops import on
from .leftovers import descriptors, until_gone
from .model import Model, loss_of_step
from .parts import Violation

__all__ = ["Trials"]

WORLD = 2
KINDS = ("sync dp", "sync tp", "async dp", "async tp", "serving")
# Latest moment of the kill, in seconds after the executors were there: dozens of steps.
_LATEST = 0.4
# Seconds after which whoever has not been told of a death hangs. (The bound of the part is tighter.)
_HANGS = 20.0
# Seconds after a restart until nothing of the old pool is left: what is inside a kernel is killed after one.
_LEFTOVERS = 3.0
# Descriptors that a process may hold more of than after its first deaths.
_FDS = 6


class Kill:
    """A thread that shoots one executor, once, and what those who were hit say."""

    def __init__(self, lots: random.Random, policy: str) -> None:
        self.policy = policy
        self.victim = lots.randrange(WORLD)
        self.delay = lots.random() * _LATEST
        self.pid = 0
        self.at = math.inf
        self.last = 0.0
        self.wrong: list[str] = []
        self.told = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._shoot)

    def __enter__(self) -> Kill:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _shoot(self) -> None:
        while (found := current_client()) is None or self.victim not in found.pool.pids:
            time.sleep(0.001)
        self.pid = found.pool.pids[self.victim]
        time.sleep(self.delay)
        self.at = time.monotonic()
        os.kill(self.pid, signal.SIGKILL)

    def tell(self, who: str, error: BaseException) -> None:
        """One who waited was told `error`."""
        now = time.monotonic()
        with self._lock:
            self.told += 1
            if self.policy == "restart" and isinstance(error, dtorch.TensorLostError):
                return  # nothing of it was pending: it has met the pool that took the dead one's place
            self.last = max(self.last, now)
            fits = isinstance(error, dtorch.ExecutorDiedError) and f"executor {self.victim} " in str(error)
            if not fits or f"pid {self.pid}" not in str(error) or "SIGKILL" not in str(error):
                self.wrong.append(f"{who} was told {error!r}")

    def expect(self, who: str, holds: bool, what: object) -> None:
        """What `who` was given must be right."""
        if not holds:
            with self._lock:
                self.wrong.append(f"{who} got {what}")

    @contextlib.contextmanager
    def hits(self, who: str) -> Iterator[None]:
        """Inside, everything goes well until the executor is dead."""
        try:
            yield
        except Exception as error:
            self.tell(who, error)


class Trials:
    """Pools of two executors that die one after the other."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}

    def trial(self, seed: int) -> float:
        try:
            return self._trial(random.Random(seed))
        except Exception:
            dtorch.shutdown()  # the next trial starts afresh
            raise

    def _trial(self, lots: random.Random) -> float:
        kind, collectives = lots.choice(KINDS), "gloo" if lots.random() < 0.25 else "shm"
        found = current_client()
        if found is not None and found.config.collectives != collectives:
            dtorch.shutdown()
        # Under "restart" nobody calls dtorch.restart(): the next use is enough.
        policy = "restart" if lots.random() < 0.2 else "raise"
        dtorch.configure(collectives=collectives, on_executor_death=policy, max_restarts=1_000_000)
        mesh = dtorch.init_device_mesh("cpu", (WORLD,))
        old = dtorch.ones(4, device_mesh=mesh)
        kill = Kill(lots, policy)
        if kind.startswith("sync"):
            _train(kill, kind[-2:], mesh)
        elif kind == "serving":
            on(lots.choice(["asyncio", "uvloop", "trio"]), lambda: _serve(kill, mesh))
        else:
            on(lots.choice(["asyncio", "uvloop", "trio"]), lambda: _train_async(kill, kind[-2:], mesh))
        for use in (old.to_torch, lambda: (old + 1).to_torch(), lambda: (old * 2).to_torch()):
            _must_raise(kill, "a use before the restart", use, (dtorch.ExecutorDiedError, dtorch.TensorLostError))
        self._restart(kill, kind, collectives, old)
        if kill.wrong:
            raise Violation(f"{kind}, {collectives}, {policy}, executor {kill.victim}:\n" + "\n".join(kill.wrong))
        return max(0.0, kill.last - kill.at)

    def _restart(self, kill: Kill, kind: str, collectives: str, old: dtorch.Tensor) -> None:
        if kill.policy == "raise":
            dtorch.restart()
        mesh = dtorch.init_device_mesh("cpu", (WORLD,))
        for use in (old.to_torch, lambda: (dtorch.ones(4, device_mesh=mesh) + old).to_torch()):
            _must_raise(kill, "a use after the restart", use, (dtorch.TensorLostError,))
        model = Model("dp" if kind.endswith("dp") else "tp", mesh)
        for step in range(3):
            _check_loss(kill, step, model.step().item())
        del model
        took, left = until_gone(_others, _LEFTOVERS)
        kill.expect("the restart", not left, f"{left} besides the new pool's processes after {took:.1f} s")
        gc.collect()
        most = self._held.setdefault(collectives, descriptors()) + _FDS
        _, over = until_gone(lambda: [descriptors()] if descriptors() > most else [], _LEFTOVERS)
        kill.expect("this process", not over, f"{over} descriptors, and {self._held} after its first deaths")

    def close(self) -> Iterator[str]:
        dtorch.shutdown()
        _, left = until_gone(lambda: started_here(os.getpid()), 2.0)
        if left:
            yield f"still running after dtorch.shutdown(): {left}"


def _others() -> list[str]:
    """Processes of pools that have ended."""
    own = {client().pool.warden_pid, *client().pool.pids.values()}
    return [line for line in started_here(os.getpid()) if int(line.split()[0]) not in own]


def _must_raise(kill: Kill, who: str, use: Callable[[], Any], kinds: tuple[type[Exception], ...]) -> None:
    try:
        use()
    except kinds:
        return
    except Exception as error:
        kill.expect(who, False, repr(error))
        return
    kill.expect(who, False, "a value")


def _check_loss(kill: Kill, step: int, loss: float) -> None:
    wanted = loss_of_step(step)
    kill.expect(f"step {step}", math.isclose(loss, wanted, rel_tol=1e-9), f"loss {loss}, and plain torch has {wanted}")


def _train(kill: Kill, kind: str, mesh: dtorch.DeviceMesh) -> None:
    """A loop that trains, and two threads that ask for values meanwhile."""
    threads = [threading.Thread(target=_ask, args=(kill, mesh, k)) for k in range(2)]
    for thread in threads:
        thread.start()
    with kill:
        with kill.hits("the training loop"):
            model = Model(kind, mesh)
            for step in itertools.count():
                loss = model.step()
                if step % 3 == 0:
                    _check_loss(kill, step, loss.item())
    for thread in threads:
        thread.join(_HANGS)
        kill.expect("a thread", not thread.is_alive(), "nothing")
    kill.expect("the waiters", kill.told == 3, f"{kill.told} errors where 3 waited")


def _ask(kill: Kill, mesh: dtorch.DeviceMesh, k: int) -> None:
    with kill.hits(f"thread {k}"):
        mine = dtorch.arange(10, dtype=torch.float64, device_mesh=mesh, placements=[Shard(0)])
        for n in itertools.count(1):
            pending = [(mine * n).sum().redistribute(placements=[Replicate()]).to_torch_async() for _ in range(4)]
            for future in pending:
                value = future.get().item()
                kill.expect(f"thread {k}", value == 45 * n, f"{value} for 45 * {n}")


async def _train_async(kill: Kill, kind: str, mesh: dtorch.DeviceMesh) -> None:
    """A task that trains, and eight that await values meanwhile."""

    async def train() -> None:
        with kill.hits("the training task"):
            model = Model(kind, mesh)
            for step in itertools.count():
                loss = model.step()
                if step % 3 == 0:
                    _check_loss(kill, step, (await loss).item())

    async def ask(k: int) -> None:
        with kill.hits(f"task {k}"):
            mine = dtorch.arange(10, dtype=torch.float64, device_mesh=mesh, placements=[Shard(0)])
            for n in itertools.count(1):
                sums = [(mine * n).sum().redistribute(placements=[Replicate()]) for _ in range(2)]
                got = await aio.gather(*sums) if k % 2 else [await s for s in sums]
                kill.expect(f"task {k}", all(g.item() == 45 * n for g in got), f"{got} for 45 * {n}")

    await _all(kill, [train, *(lambda k=k: ask(k) for k in range(8))])


async def _serve(kill: Kill, mesh: dtorch.DeviceMesh) -> None:
    """Sixteen callers of a batched function."""
    weight = torch.arange(12, dtype=torch.float64).view(3, 4)
    there = dtorch.distribute_tensor(weight, mesh, [Shard(1)])

    @aio.batched(max_size=8)
    def scores(x: torch.Tensor) -> dtorch.Tensor:
        return (dtorch.distribute_tensor(x, mesh, [Replicate()]) @ there).redistribute(placements=[Replicate()])

    async def call(k: int) -> None:
        with kill.hits(f"caller {k}"):
            for n in itertools.count():
                x = torch.full((1 + (n + k) % 3, 3), float(n % 50 + k), dtype=torch.float64)
                got = await scores(x)
                kill.expect(f"caller {k}", torch.equal(got, x @ weight), got)

    await _all(kill, [lambda k=k: call(k) for k in range(16)])


async def _all(kill: Kill, tasks: list[Callable[[], Any]]) -> None:
    with kill, anyio.move_on_after(_LATEST + _HANGS) as scope:
        async with anyio.create_task_group() as group:
            for task in tasks:
                group.start_soon(task)
    kill.expect("the tasks", not scope.cancelled_caught, "nothing")
    kill.expect("the tasks", kill.told == len(tasks), f"{kill.told} errors where {len(tasks)} waited")
