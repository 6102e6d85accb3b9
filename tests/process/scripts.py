"""Run a script as its reader would: `python FILE`, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_script(path: str | Path, *args: object, timeout: float = 110, **env: str) -> str:
    """What the script at `path` (relative to the repository) prints; fails, with its stderr, unless it exits with 0."""
    done = subprocess.run(
        [sys.executable, str(ROOT / path), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )
    assert done.returncode == 0, f"{path} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_body(body: str, *, timeout: float = 110, **env: str) -> subprocess.CompletedProcess[str]:
    """What ``python -c`` makes of `body`, in a session of its own; fails, with its output, unless it exits with 0."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=timeout,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done
