"""Checkpoint files that are cut, spoilt or strange, and executors that die while they write them.

What is loaded is what was saved, or an error in one line; a save that does not end leaves the old checkpoint whole.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import dtorch
from dtorch import Replicate, Shard
from dtorch.runtime.client import client

from .decoders import spoiled
from .leftovers import until_gone
from .parts import Violation

__all__ = ["Trials"]

_DAMAGES = 10
# Rows of the state that is being saved when an executor dies.
_ROWS = 20_000


class Trials:
    """One pool, started anew after a death."""

    def __init__(self) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="soak-checkpoints-"))

    def trial(self, seed: int) -> float:
        lots = random.Random(seed)
        began = time.monotonic()
        name = lots.choice(["state", "state.safetensors", "state.pt", "dcp"])
        mesh = dtorch.init_device_mesh("cpu", (2,))
        target = self._home / name
        try:
            if lots.random() < 0.15:
                _death(lots, mesh, target)
            else:
                _damages(lots, mesh, target, self._home)
        except Exception as error:
            error.add_note(f"of {name}")
            raise
        finally:
            _remove(target)
        if left := list(self._home.iterdir()):
            for path in left:  # each is told of once
                _remove(path)
            raise Violation(f"of {name}: files were left: {[p.name for p in left]}")
        return time.monotonic() - began

    def close(self) -> Iterator[str]:
        dtorch.shutdown()
        shutil.rmtree(self._home)
        yield from ()


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)


def _format(target: Path) -> str | None:
    return "dcp" if target.name == "dcp" else None


def _state(mesh: dtorch.DeviceMesh, rows: int, fill: float) -> dict[str, Any]:
    weight = torch.full((rows, 4), fill) + torch.arange(4.0)
    bias = torch.arange(6) + int(fill)
    return {
        "weight": dtorch.distribute_tensor(weight, mesh, [Shard(0)]),
        "bias": dtorch.distribute_tensor(bias, mesh, [Replicate()]),
        "step": int(fill),
    }


def _same(found: Any, fill: float, rows: int) -> bool:
    try:
        weight, bias = (t.to_torch() if isinstance(t, dtorch.Tensor) else t for t in (found["weight"], found["bias"]))
        wanted = torch.full((rows, 4), fill) + torch.arange(4.0)
        return torch.equal(weight, wanted) and torch.equal(bias, torch.arange(6) + int(fill)) and found["step"] == fill
    except (KeyError, TypeError, AttributeError):
        return False


def _damages(lots: random.Random, mesh: dtorch.DeviceMesh, target: Path, home: Path) -> None:
    rows = lots.choice([1, 5, 300])
    dtorch.save(_state(mesh, rows, 3), target, format=_format(target))
    whole = home / "whole"
    (shutil.copytree if target.is_dir() else shutil.copy)(target, whole)
    try:
        for _ in range(_DAMAGES):
            _remove(target)
            (shutil.copytree if whole.is_dir() else shutil.copy)(whole, target)
            what = _damage(lots, target)
            try:
                found = dtorch.load(target, **({} if target.suffix == ".pt" else {"device_mesh": mesh}))
            except (dtorch.CheckpointError, FileNotFoundError) as error:
                if "\n" in str(error):
                    raise Violation(f"{what}: an error of several lines: {error}") from None
                continue
            except Exception as error:
                raise Violation(f"{what}: {error!r}") from error
            if not _same(found, 3, rows):
                raise Violation(f"{what}: was read as {found}")
    finally:
        _remove(whole)


def _damage(lots: random.Random, target: Path) -> str:
    """Spoil one file; what was done."""
    files = sorted(p for p in target.rglob("*") if p.is_file()) if target.is_dir() else [target]
    file = lots.choice(files)
    if target.is_dir() and lots.random() < 0.15:
        file.unlink()
        return f"{file.name} removed"
    before = file.read_bytes()
    after = spoiled(lots, before)
    file.write_bytes(after)
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    return f"{file.name} of {len(before)} bytes, {len(after)} now, other from byte {at} on"


def _death(lots: random.Random, mesh: dtorch.DeviceMesh, target: Path) -> None:
    """An executor dies while a checkpoint is written over another."""
    dtorch.save(_state(mesh, _ROWS, 1), target, format=_format(target))
    state = _state(mesh, _ROWS, 2)
    state["weight"].sum().item()
    pids = list(client().pool.pids.values())
    timer = threading.Timer(lots.random() * 0.1, os.kill, (lots.choice(pids), signal.SIGKILL))
    timer.start()
    saved = True
    try:
        dtorch.save(state, target, format=_format(target))
    except (dtorch.ExecutorDiedError, dtorch.TensorLostError, dtorch.CheckpointError):
        saved = False
    timer.join()
    dtorch.restart()
    _, left = until_gone(lambda: [p for p in pids if os.path.exists(f"/proc/{p}")], 2.0)
    if left:
        raise Violation(f"executors {left} still alive")
    found = dtorch.load(target)
    if not (_same(found, 2, _ROWS) or (not saved and _same(found, 1, _ROWS))):
        raise Violation(f"after a save that {'ended' if saved else 'did not end'}: {found}")
    # What the dead one left beside it goes with the next save.
    dtorch.save(_state(mesh, _ROWS, 3), target, format=_format(target))
    if not _same(dtorch.load(target), 3, _ROWS):
        raise Violation("the next save is not what is loaded")
