"""What plans and meshes are called: a file that the client appends to, for whoever has to tell of them.

The warden reads it when a command has taken long, and the client when a wait has; nobody asks otherwise, so writing is
one short write when a plan is defined.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Names", "PlanName"]

# Bytes after which the file begins anew. Plans named before that are told of by number.
_LARGEST = 16 << 20
# Characters of one name.
_LONGEST = 1000


@dataclass(frozen=True, slots=True)
class PlanName:
    """What plan it is: the call, the id of its mesh (0: none), and whether it waits for other executors."""

    text: str
    mesh: int = 0
    exchange: bool = False


class Names:
    """Either end of the file. Only one process writes, one thread at a time."""

    def __init__(self, fd: int) -> None:
        """Use the descriptor `fd`, which stays its maker's."""
        self._fd = fd
        self._size = 0
        self._meshes = b""

    def add_plan(self, plan: int, name: PlanName) -> None:
        """Say what `plan` is."""
        text = " ".join(name.text.split())[:_LONGEST]
        line = json.dumps([plan, text, name.mesh, name.exchange]).encode() + b"\n"
        if self._size + len(line) > _LARGEST:
            os.ftruncate(self._fd, 0)
            self._size = 0
            self._write(self._meshes)
        self._write(line)

    def add_mesh(self, mesh: int, device_type: str, ids: Sequence[int], hosts: Sequence[int]) -> None:
        """Say of each rank of `mesh` which device and which executor it has."""
        line = json.dumps([-mesh, device_type, list(ids), list(hosts)]).encode() + b"\n"
        self._meshes += line
        self._write(line)

    def _write(self, data: bytes) -> None:
        os.pwrite(self._fd, data, self._size)
        self._size += len(data)

    def plan(self, plan: int) -> PlanName | None:
        """What `plan` is, if that is known."""
        found = self._find(plan)
        return None if found is None else PlanName(*found)

    def ranks(self, mesh: int, executor: int) -> str:
        """``rank 1 (cpu:1)``, ``ranks 1, 3 (cpu:1, cpu:3)``: those of `mesh` that `executor` has; "" if unknown."""
        found = self._find(-mesh) if mesh else None
        if found is None:
            return ""
        device_type, ids, hosts = found
        mine = [r for r, host in enumerate(hosts) if host == executor]
        if not mine:
            return ""
        devices = ", ".join(f"{device_type}:{ids[r]}" for r in mine)
        return f"{'rank' if len(mine) == 1 else 'ranks'} {', '.join(map(str, mine))} ({devices})"

    def _find(self, key: int) -> list[Any] | None:
        wanted = f"[{key}, ".encode()
        data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        for line in data.splitlines():
            if line.startswith(wanted):
                try:
                    return json.loads(line)[1:]  # type: ignore[no-any-return]
                except ValueError:  # half written
                    continue
        return None
