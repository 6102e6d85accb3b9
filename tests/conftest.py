"""The tests share one pool; at the end it is shut down, and nothing may be left running."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import dtorch

MARKER = "DTORCH_TEST_SESSION"


def _stat(pid: int) -> tuple[str, int] | None:
    """(state, parent) of a process, or None when it is gone."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return state, int(parent)


def started_here(root: int) -> list[str]:
    """What `root` and its descendants started and is still alive, orphans included: "pid command" each."""
    marker = f"{MARKER}={root}".encode()
    stats = {int(p.name): _stat(int(p.name)) for p in Path("/proc").iterdir() if p.name.isdigit()}
    family, found = {root}, []
    for pid, stat in sorted(stats.items()):
        if stat is None or pid == root:
            continue
        try:
            marked = marker in (Path(f"/proc/{pid}/environ").read_bytes()).split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if marked or stat[1] in family:
            family.add(pid)
            found.append(f"{pid} ({stat[0]}) {command}")
    return found


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_running() -> Iterator[None]:
    os.environ[MARKER] = str(os.getpid())
    yield
    dtorch.shutdown()
    deadline = time.monotonic() + 5
    while (left := started_here(os.getpid())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, "still running after dtorch.shutdown():\n" + "\n".join(left)
