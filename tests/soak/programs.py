"""Random programs, made from the seed: every value is plain torch's, or its raise was promised."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import dtorch
from dtorch.runtime.client import client

from ..process import program_values, program_views  # noqa: F401  they register operators
from ..process.program_futures import FUTURES
from ..process.programs import MESHES, OPERATORS, Program, Steps

__all__ = ["Trials"]

# Runs that making a failing program shorter may take.
_SHRINKS = 60


def program_of(seed: int) -> tuple[str, bool, Steps]:
    """(mesh, whether auto_redistribute is on, steps) of trial `seed`."""
    lots = random.Random(seed)
    names = sorted(OPERATORS)

    def numbers() -> tuple[int, ...]:
        return tuple(lots.randrange(24) for _ in range(6))

    steps: Steps = [("new", numbers()) for _ in range(lots.randint(2, 4))]
    for _ in range(lots.randint(4, 24)):
        # A twentieth of all operators, and a third of a program.
        name = lots.choice(sorted(FUTURES)) if lots.random() < 0.3 else lots.choice(names)
        steps.append(("new" if lots.random() < 0.1 else name, numbers()))
    return lots.choice(sorted(MESHES)), lots.random() < 0.5, steps


class Trials:
    """Programs on one pool."""

    def trial(self, seed: int) -> float:
        mesh, auto, steps = program_of(seed)
        began = time.monotonic()
        try:
            _run(mesh, auto, steps)
        except Exception as error:
            error.add_note(f"mesh {mesh}, auto {auto}; made shorter: {_shorter(mesh, auto, steps, type(error))}")
            raise
        finally:
            dtorch.clear_errors()
            _forget_failures()
        return time.monotonic() - began

    def close(self) -> Iterator[str]:
        _forget_failures()
        dtorch.shutdown()
        yield from ()


def _run(mesh: str, auto: bool, steps: Steps) -> None:
    Program(dtorch.init_device_mesh("cpu", MESHES[mesh]), auto=auto).run(steps)


def _forget_failures() -> None:
    """Programs fail on purpose and do not ask: that is no news at the end."""
    c = client()
    c.drain()
    c.failures._asked |= set(c.failures._reports)


def _shorter(mesh: str, auto: bool, steps: Steps, kind: type[Exception]) -> Steps:
    """Fewer steps that fail in the same way, by leaving out one after the other."""
    runs, at = 0, 0
    while at < len(steps) and runs < _SHRINKS:
        fewer = steps[:at] + steps[at + 1 :]
        runs += 1
        try:
            _run(mesh, auto, fewer)
        except Exception as error:
            if type(error) is kind:
                steps = fewer
                continue
        at += 1
    return steps
