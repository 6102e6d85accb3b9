"""kill -9 of the client, at a random moment of its life."""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import anyio
import torch

import dtorch
from dtorch import Replicate, Shard

from ..conftest import MARKER, started_here
from .leftovers import files, mappers, memory_files, until_gone
from .model import Model
from .parts import Violation

__all__ = ["Trials"]

ROOT = Path(__file__).resolve().parents[2]
# Seconds after the client's death that anything of it may be left.
_BOUND = 2.0
# Seconds that a client has to get to where it is to be shot.
_STARTS = 50.0

Ready = Callable[[], None]


def _mesh() -> dtorch.DeviceMesh:
    return dtorch.init_device_mesh("cpu", (2,))


def _starting(ready: Ready) -> None:
    ready()
    dtorch.ones(4, device_mesh=_mesh()).sum().item()
    signal.pause()


def _issuing(ready: Ready) -> None:
    x = dtorch.ones(64, device_mesh=_mesh())
    x.tolist()
    ready()
    while True:
        x = x + 1


def _in_a_collective(ready: Ready) -> None:
    x = dtorch.ones(1 << 18, device_mesh=_mesh(), placements=[Shard(0)])
    x.redistribute(placements=[Replicate()]).sum().item()
    ready()
    while True:
        x.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(0)]).sum().item()


def _training(ready: Ready) -> None:
    model = Model("tp", _mesh())
    model.step().item()
    ready()
    while True:
        model.step().item()


def _moving_values(ready: Ready) -> None:
    """Uploads and results that lie in the arena."""
    mesh, value = _mesh(), torch.ones(1 << 19)
    there = dtorch.distribute_tensor(value, mesh, [Shard(0)])
    kept = [there.to_torch()]
    ready()
    while True:
        kept = [*kept[-3:], dtorch.distribute_tensor(kept[-1], mesh, [Shard(0)]).to_torch()]


def _awaiting(ready: Ready) -> None:
    mesh = _mesh()

    def slow(rank: int) -> torch.Tensor:
        time.sleep(0.02 * rank)
        return torch.ones(2)

    async def one() -> None:
        while True:
            await dtorch.from_local(slow, mesh, [Shard(0)], shape=(4,))

    async def main() -> None:
        await dtorch.ones(2, device_mesh=mesh)
        ready()
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(one)

    anyio.run(main)


def _shutting_down(ready: Ready) -> None:
    x = dtorch.ones(1 << 16, device_mesh=_mesh(), placements=[Shard(0)])
    x.sum().item()
    for _ in range(200):
        x = x + 1
    ready()
    dtorch.shutdown()


PHASES = [_starting, _issuing, _in_a_collective, _training, _moving_values, _awaiting, _shutting_down]
# Latest moment of the kill, in seconds after the client has got there.
_LATEST = {_starting: 1.5, _shutting_down: 0.05}


class Trials:
    """Clients that are forked from this process, which has imported torch and has no pool: each takes a second less.
    One in ten is an interpreter of its own, and shot at any moment from its first instruction on."""

    def __init__(self) -> None:
        dtorch.shutdown()

    def trial(self, seed: int) -> float:
        lots = random.Random(seed)
        phase = lots.choice(PHASES)
        fresh = lots.random() < 0.1
        delay = lots.random() * (3.0 if fresh else _LATEST.get(phase, 0.2))
        collectives = "gloo" if lots.random() < 0.25 else "shm"
        # Its own place for files: other programs use /tmp too, and what they have there comes and goes.
        self._before = files()
        home = tempfile.mkdtemp(prefix="soak-")
        try:
            return self._shoot(phase, delay, collectives, home, fresh)
        except Violation as violation:
            violation.add_note(f"{phase.__name__}, {collectives}, shot after {delay:.3f} s{', fresh' * fresh}")
            raise
        finally:
            shutil.rmtree(home, ignore_errors=True)

    def _shoot(self, phase: Callable[[Ready], None], delay: float, collectives: str, home: str, fresh: bool) -> float:
        read, write = os.pipe()
        try:
            if fresh:
                # Found by the marker of this process, as whatever it starts.
                marker = os.getpid()
                pid = _run(phase, collectives, home).pid
            else:
                pid = marker = _fork(phase, collectives, home, write)
                if not select.select([read], [], [], _STARTS)[0]:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    raise Violation(f"the client has not got there within {_STARTS:g} s")
            time.sleep(delay)
            memory = memory_files(pid)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        finally:
            os.close(read)
            os.close(write)
        took, left = until_gone(lambda: started_here(marker), _BOUND)
        if left:
            raise Violation(f"still running {took:.1f} s after the client's death:\n" + "\n".join(map(str, left)))
        if still := mappers(memory):
            raise Violation(f"processes {still} still map memory of the pool")
        if found := sorted(p.name for p in Path(home).rglob("*")):
            raise Violation(f"files were left in TMPDIR, HOME or the working directory: {found}")
        _, more = until_gone(lambda: files() - self._before, _BOUND)
        if more:
            raise Violation(f"files were left: {more}")
        return took

    def close(self) -> Iterator[str]:
        if left := started_here(os.getpid()):
            yield f"still running: {left}"


def _environ(home: str, collectives: str) -> dict[str, str]:
    return {"TMPDIR": home, "HOME": home, "XDG_CACHE_HOME": home, "DTORCH_COLLECTIVES": collectives}


def _fork(phase: Callable[[Ready], None], collectives: str, home: str, write: int) -> int:
    """The pid of a client that runs `phase`, and writes to `write` when it has got there."""
    pid = os.fork()
    if pid:
        return pid
    _be_client(phase, collectives, home, write)


def _be_client(phase: Callable[[Ready], None], collectives: str, home: str, write: int) -> NoReturn:
    try:
        os.environ.update(_environ(home, collectives))
        os.environ[MARKER] = str(os.getpid())
        tempfile.tempdir = None
        os.chdir(home)
        dtorch.configure(collectives=collectives)
        phase(lambda: void(os.write(write, b"!")))
        signal.pause()
    finally:
        os._exit(1)  # never into the worker's own code


def void(_: Any) -> None:
    """Nothing, of something."""


def _run(phase: Callable[[Ready], None], collectives: str, home: str) -> subprocess.Popen[bytes]:
    code = (
        "import sys, warnings; warnings.simplefilter('ignore'); "
        f"from {__name__} import {phase.__name__} as phase; phase(lambda: None)"
    )
    environ = {**os.environ, **_environ(home, collectives), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environ, cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    with contextlib.suppress(AttributeError):
        process.returncode = 0  # it is waited for by its pid
    return process
