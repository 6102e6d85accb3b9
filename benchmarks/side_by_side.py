"""What all benchmarks share: rounds interleaved between peers, medians, and the floor in a process of its own."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import torch

HERE = Path(__file__).parent


class Floor:
    """benchmarks/floor.py, started once and asked once per round; asleep in between."""

    def __enter__(self) -> Floor:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "floor.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.measure()  # warm
        return self

    def measure(self) -> tuple[float, float]:
        """(µs per issued op, op/s from issue to value)."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        issue, rate = map(float, self.process.stdout.readline().split())
        return issue, rate

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(10)


def rounds(measures: Mapping[str, Callable[[], float]], count: int) -> dict[str, float]:
    """The median of `count` rounds of each measure; a round runs them all, so that drift of the box hits them alike."""
    figures: dict[str, list[float]] = {name: [] for name in measures}
    for measure in measures.values():
        measure()  # warm: plans, caches, pages
    gc.collect()
    for _ in range(count):
        for name, measure in measures.items():
            figures[name].append(measure())
    return {name: statistics.median(values) for name, values in figures.items()}


def microseconds(call: Callable[[], object], n: int, settle: Callable[[], object] | None = None) -> float:
    """µs per call over `n` calls; `settle` runs after the clock has stopped."""
    repeat = range(n)
    start = time.perf_counter()
    for _ in repeat:
        call()
    taken = time.perf_counter() - start
    if settle:
        settle()
    return taken / n * 1e6


def conditions() -> str:
    """Where and under what load the figures were taken."""
    load = " ".join(f"{x:.1f}" for x in os.getloadavg())
    cores = len(os.sched_getaffinity(0))
    python = sys.version.split()[0]
    return (
        f"{cores} cores, load {load}, torch {torch.__version__} with {torch.get_num_threads()} thread, Python {python}"
    )


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns aligned: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = (
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in [header, ["-" * w for w in widths], *rows]
    )
    return "\n".join(lines)
