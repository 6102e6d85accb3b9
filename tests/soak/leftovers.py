"""What processes leave behind: descriptors, files, memory that somebody still maps."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["descriptors", "files", "mappers", "memory_files", "until_gone"]

_OURS = ("dtorch", "torch", "gloo", "psm_", "c10d")


def descriptors(pid: int | str = "self") -> int:
    """How many descriptors a process holds."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory_files(pid: int) -> set[str]:
    """The anonymous files of dtorch that process `pid` maps: their inodes. Empty once it is gone."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/memfd:dtorch-" in line:
                found.add(line.split()[4])
    return found


def mappers(inodes: set[str]) -> list[int]:
    """Processes that map any of the files `inodes`."""
    pids = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]
    return [pid for pid in pids if memory_files(pid) & inodes]


def files() -> set[str]:
    """Names in /dev/shm and /tmp that torch or dtorch may have made."""
    return {str(p) for where in ("/dev/shm", "/tmp") for p in Path(where).iterdir() if p.name.startswith(_OURS)}


def until_gone(left: Callable[[], Iterable[object]], seconds: float) -> tuple[float, list[object]]:
    """Look until nothing is left, at most `seconds`: how long that took, and what is left."""
    began = time.monotonic()
    while found := list(left()):
        if time.monotonic() - began > seconds:
            break
        time.sleep(0.005)
    return time.monotonic() - began, found
