"""Hands operators to worker processes and gathers their lines; one that kills its worker, or hangs, has a line too."""

from __future__ import annotations

import json
import os
import queue
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .database import operators

__all__ = ["Options", "conduct"]

# (samples per operator, combinations per sample) of a full run; level A is every sample.
FULL: dict[str, tuple[int | None, int]] = {"A": (None, 1), "B": (12, 8), "C": (8, 6)}
PATIENCE = 300.0


@dataclass(frozen=True)
class Options:
    """What is run: levels, a choice of operators (`these`, or every `step`-th whose name `only` finds), and how much
    of each (None: as in a full run)."""

    levels: tuple[str, ...]
    only: str | None = None
    first: int = 0
    step: int = 1
    samples: int | None = None
    combinations: int | None = None
    seed: int = 0
    jobs: int = 2
    these: tuple[str, ...] | None = None

    @property
    def full(self) -> bool:
        """Whether every operator that is run is tried as much as in a full run."""
        return self.samples is None and self.combinations is None and self.seed == 0

    def amount(self, level: str) -> tuple[str, str]:
        cap, combinations = FULL[level]
        cap = self.samples or cap
        return str(cap or "all"), str(self.combinations or combinations)

    def names(self) -> list[str]:
        if self.these is not None:
            return sorted(self.these)
        every = sorted(operators())[self.first :: self.step]
        return [n for n in every if re.search(self.only, n)] if self.only else every


class Worker:
    """One worker process, begun anew after it dies."""

    def __init__(self, level: str, options: Options) -> None:
        self.level, self.options = level, options
        self.process: subprocess.Popen[str] | None = None
        self.read = -1
        self.errors: Any = None

    def start(self) -> subprocess.Popen[str]:
        if self.process is not None and self.process.poll() is None:
            return self.process
        self.stop()
        self.read, write = os.pipe()
        self.errors = tempfile.TemporaryFile()
        amount = self.options.amount(self.level)
        command = [sys.executable, "-m", "tests.conformance.worker", self.level, *amount, str(self.options.seed)]
        # A session of its own, so that a hung worker's executors can be ended with it.
        self.process = subprocess.Popen(
            [*command, str(write)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            pass_fds=[write],
            text=True,
            start_new_session=True,
        )
        os.close(write)
        return self.process

    def ask(self, name: str) -> dict[str, Any]:
        process = self.start()
        assert process.stdin is not None
        try:
            print(name, file=process.stdin, flush=True)
        except BrokenPipeError:
            pass
        line, deadline = b"", time.monotonic() + PATIENCE
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self.read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.stop()
                return self._lost(name, "hung", f"no answer in {PATIENCE:.0f} s")
            data = os.read(self.read, 1 << 16)
            if not data:
                code = process.wait()
                return self._lost(name, "died", f"{_ending(code)}: {self.last_words()}")
            line += data
        return json.loads(line)

    def last_words(self) -> str:
        """The last line that the process wrote to its stderr."""
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def _lost(self, name: str, kind: str, why: str) -> dict[str, Any]:
        return {"operator": name, "level": self.level, "counts": {kind: 1}, "reasons": {kind: [why]}}

    def stop(self) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        os.close(self.read)
        self.errors.close()
        self.process = None


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def conduct(options: Options, out: Path) -> list[dict[str, Any]]:
    """Try every chosen operator at every chosen level; one line each in `out`, and returned."""
    lines: list[dict[str, Any]] = []
    lock = threading.Lock()
    with out.open("w") as file:
        for level in options.levels:
            names: queue.SimpleQueue[str] = queue.SimpleQueue()
            todo = options.names()
            for name in todo:
                names.put(name)

            def work(level: str = level, names: queue.SimpleQueue[str] = names, total: int = len(todo)) -> None:
                worker = Worker(level, options)
                try:
                    while True:
                        found = worker.ask(names.get_nowait())
                        with lock:
                            lines.append(found)
                            print(json.dumps(found), file=file, flush=True)
                            done = sum(x["level"] == level for x in lines)
                            if sys.stderr.isatty() or done % 50 == 0 or done == total:
                                print(f"level {level}: {done}/{total}", file=sys.stderr)
                except queue.Empty:
                    worker.stop()

            threads = [threading.Thread(target=work) for _ in range(min(options.jobs, len(todo)))]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
    return sorted(lines, key=lambda x: (x["level"], x["operator"]))
