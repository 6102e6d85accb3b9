"""Programs that use dtorch, run as processes of their own, and what they leave behind: nothing, two seconds later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .scripts import ROOT

__all__ = ["TWO", "USE", "Client", "Ended", "run", "running"]

USE = """
import torch, dtorch
mesh = dtorch.init_device_mesh("cpu", (2,))
x = dtorch.ones(4, device_mesh=mesh, placements=[dtorch.Shard(0)])
print((x + 1).sum().item(), flush=True)
"""
"""Two executors, an add and an all_reduce; prints 8.0."""

TWO = """
import os, signal, subprocess, sys, threading, time
import torch, dtorch
from dtorch.runtime.client import client
mesh = dtorch.init_device_mesh("cpu", (2,))
def value(k=1.0):
    return (dtorch.ones(4, device_mesh=mesh, placements=[dtorch.Shard(0)]) * k).sum().item()
def stuck(seconds=30.0):
    # float32[4], Shard(0), that takes its executors so long.
    def slow(rank):
        time.sleep(seconds)
        return torch.ones(2)
    return dtorch.from_local(slow, mesh, [dtorch.Shard(0)], shape=(4,))
value()
client().pool.ensure(2)
def pids():
    return [client().pool.warden_pid, *client().pool.pids.values()]
"""
"""What tests of what befalls a running pool begin with."""


@dataclass(slots=True)
class Ended:
    """A program that has ended.

    Attributes:
        status: as subprocess gives it.
        out, err: what it wrote.
        left: what it started and was still there two seconds after its end: "pid name" each.
    """

    status: int
    out: str
    err: str
    left: list[str]


@dataclass(slots=True)
class Client:
    """A program that runs."""

    process: subprocess.Popen[str]
    marker: str

    def line(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def descendants(self) -> list[str]:
        """What it started and is still alive, orphans included, itself not: "pid name" each."""
        found: list[str] = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                marked = self.marker.encode() in (process / "environ").read_bytes().split(b"\0")
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                name = (process / "comm").read_text().strip()
            except OSError:
                continue
            if marked and state not in "ZX" and int(process.name) != self.process.pid:
                found.append(f"{process.name} {name}")
        return found

    def gone(self, within: float = 2.0) -> list[str]:
        """What is still there of its descendants after so many seconds."""
        deadline = time.monotonic() + within
        # Looked for twice: one that ended while the first look passed may have forked another behind it.
        while (left := self.descendants() or self.descendants()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return left

    def end(self, timeout: float = 60.0) -> Ended:
        """Wait until it has ended, and up to two seconds for what it started."""
        out, err = self.process.communicate(timeout=timeout)
        return Ended(self.process.returncode, out or "", err or "", self.gone())


@contextmanager
def running(
    code: str = "",
    *,
    command: Sequence[str | Path] = (),
    env: dict[str, str | None] | None = None,
    **options: Any,
) -> Iterator[Client]:
    """A program in a session of its own: `code`, or `command`. A variable that is None in `env` is not set. Whatever is
    left of it in the end is killed."""
    marker = f"DTORCH_TEST_CLIENT={uuid.uuid4()}"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "DTORCH_TEST_CLIENT": marker.partition("=")[2], **(env or {})}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True, **options}
    process = subprocess.Popen(
        [str(part) for part in command] or [sys.executable, "-c", textwrap.dedent(code)],
        text=True,
        env={name: value for name, value in environ.items() if value is not None},
        **options,
    )
    found = Client(process, marker)
    try:
        yield found
    finally:
        process.kill()
        process.communicate()
        for left in found.descendants():
            try:
                os.kill(int(left.split()[0]), signal.SIGKILL)
            except ProcessLookupError:
                pass


def run(code: str = "", *, timeout: float = 60.0, limit: Callable[[], None] | None = None, **options: Any) -> Ended:
    """Run a program to its end; `limit` is called in its process before it begins. See :func:`running`."""
    with running(code, preexec_fn=limit, **options) as client:
        return client.end(timeout)
