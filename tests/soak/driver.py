"""Runs the parts one after the other within a time limit, and makes the table."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..conftest import started_here
from .parts import Part

__all__ = ["Result", "conduct", "run_part", "table"]

ROOT = Path(__file__).resolve().parents[2]
# Seconds that a worker has besides the limit of a trial: it imports torch, and ends pools.
_GRACE = 60.0
# Seconds after which nothing that a worker started may run.
_LEFTOVERS = 2.0
_LINES = 30
# Violations of one part that are printed.
_SHOWN = 5
# Crashes of one part after which it ends.
_CRASHES = 5


@dataclass
class Result:
    """What became of one part.

    Attributes:
        done: trials that ended, whatever their outcome.
        violations: of each, what it was and the line that runs it again.
        worst: the largest figure.
        seconds: that the part took.
    """

    part: Part
    wanted: int
    done: int = 0
    violations: list[str] = field(default_factory=list)
    worst: float | None = None
    seconds: float = 0.0


def conduct(parts: Iterable[Part], seconds: float, seed: int, count: int | None = None) -> list[Result]:
    """Run all `parts` in about `seconds`; what one leaves of its share of time the others have.

    Args:
        count: trials of each part, in place of a full run's.
    """
    left = list(parts)
    end = time.monotonic() + seconds
    results: list[Result] = []
    while left:
        part = left[0]
        share = (end - time.monotonic()) * part.weight / sum(p.weight for p in left)
        result = run_part(part, seed, count or part.wanted, max(share, 1.0))
        results.append(result)
        print(row(result), flush=True)
        for violation in result.violations[:_SHOWN]:
            print(violation, flush=True)
        if len(result.violations) > _SHOWN:
            print(f"… and {len(result.violations) - _SHOWN} more in {part.name}", flush=True)
        left.pop(0)
    return results


def run_part(part: Part, seed: int, wanted: int, seconds: float) -> Result:
    """Run trials of `part` from `seed` on: `wanted`, or as many as begin within `seconds`."""
    result = Result(part, wanted)
    began = time.monotonic()
    first, crashes = seed, 0
    while result.done < wanted and crashes < _CRASHES:
        left = seconds - (time.monotonic() - began)
        if left <= 0 and result.done:
            break
        ended = _one_worker(part, first, seed + wanted - first, max(left, 0.5), result)
        if ended is None:
            break
        # It hung or crashed in the trial of this seed: go on behind it.
        first, crashes = ended + 1, crashes + 1
    result.seconds = time.monotonic() - began
    return result


def _one_worker(part: Part, first: int, count: int, seconds: float, result: Result) -> int | None:
    """Run one worker; the seed it ended at without a word, or None where it came to its end."""
    read, write = os.pipe()
    command = [sys.executable, "-m", "tests.soak", "--only", part.name, "--seed", str(first), "--count", str(count)]
    command += ["--seconds", str(seconds), "--worker", str(write)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, pass_fds=(write,), stdout=said, stderr=said, start_new_session=True
        )
        os.close(write)
        current = first
        finished = False
        with open(read) as lines:
            for line in _lines_until(lines.fileno(), process, part, seconds):
                told = json.loads(line)
                if "begin" in told:
                    current = told["begin"]
                elif "end" in told:
                    finished = True
                    for text in told["end"]:
                        _count(result, {"figure": text} if isinstance(text, (int, float)) else {"violation": text})
                else:
                    result.done += 1
                    _count(result, told)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        status = process.wait()
        said.seek(0)
        words = said.read().decode(errors="replace").splitlines()[-_LINES:]
    if left := _leftovers(process.pid):
        result.violations.append(
            _violation(part, "still running 2 s after the worker had ended:\n" + "\n".join(left), again=current)
        )
    if finished and status == 0:
        return None
    result.done += 1
    text = f"the trial hung, or its process crashed (it ended with {status}):\n" + "\n".join(words)
    result.violations.append(_violation(part, text, again=current))
    return current


def _lines_until(fd: int, process: subprocess.Popen[bytes], part: Part, seconds: float) -> Iterable[str]:
    """What the worker tells, line by line, until it ends or has been silent for longer than a trial may take."""
    kept = b""
    deadline = time.monotonic() + part.limit + _GRACE
    while True:
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            # Says where it is before it is ended.
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)
            return
        data = os.read(fd, 1 << 16)
        if not data:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
            return
        deadline = time.monotonic() + part.limit + _GRACE
        *whole, kept = (kept + data).split(b"\n")
        for line in whole:
            yield line.decode()


def _leftovers(pid: int) -> list[str]:
    deadline = time.monotonic() + _LEFTOVERS
    while (left := started_here(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _count(result: Result, told: dict[str, object]) -> None:
    figure, violation, seed, part = told.get("figure"), told.get("violation"), told.get("seed"), result.part
    if isinstance(violation, str):
        result.violations.append(_violation(part, violation, again=seed))
    if isinstance(figure, (int, float)):
        result.worst = max(figure, result.worst or 0.0)
        if part.bound is not None and figure > part.bound:
            text = f"{part.figure}: {figure:.3f} {part.unit}, and the bound is {part.bound:g} {part.unit}"
            result.violations.append(_violation(part, text, again=seed))


def _violation(part: Part, text: str, again: object) -> str:
    line = f"python -m tests.soak --only {part.name}"
    line += "" if again is None else f" --seed {again} --count 1"
    indented = "\n".join("    " + line for line in text.rstrip().splitlines())
    return f"VIOLATION in {part.name}, seed {'all' if again is None else again}:\n{indented}\n  again:  {line}"


HEAD = f"{'part':36s} {'done':>9s} of {'wanted':>9s} {'violations':>10s}  {'worst':>10s}  {'bound':>8s} {'seconds':>8s}"


def row(result: Result) -> str:
    """One line of the table."""
    part = result.part
    worst = "–" if result.worst is None else f"{result.worst:.3g} {part.unit}"
    bound = "–" if part.bound is None else f"{part.bound:g} {part.unit}"
    return (
        f"{part.title:36s} {result.done * part.each:9,d} of {result.wanted * part.each:9,d} "
        f"{len(result.violations):10d}  {worst:>10s}  {bound:>8s} {result.seconds:8.0f}  {part.figure}"
    )


def table(results: list[Result]) -> str:
    """All results, and whether the run got to its end."""
    lines = [HEAD, *map(row, results)]
    short = [r.part.name for r in results if r.done < r.wanted]
    if short:
        lines.append(f"Time ran out (load {os.getloadavg()[0]:.1f}) before these were whole: {', '.join(short)}.")
    return "\n".join(lines)
