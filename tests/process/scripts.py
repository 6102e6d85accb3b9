"""Run a script as its reader would: `python FILE`, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
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
