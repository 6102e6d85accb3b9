"""Commands that see a file system of their own, where the kernel allows that to an ordinary user."""

from __future__ import annotations

import functools
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from .scripts import ROOT

__all__ = ["in_namespace", "over"]


@functools.cache
def _reason() -> str:
    """Why there are no namespaces here; empty where there are."""
    try:
        done = subprocess.run(
            ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return "there is no unshare(1)"
    return done.stderr.strip() if done.returncode else ""


def in_namespace(before: str, command: Sequence[str], *, processes: bool = False) -> list[str]:
    """The command that runs `command` after the shell's `before`, which may mount; with `processes` of its own, and so
    their kernel settings, if that is asked. Skips the test where this is not allowed."""
    if _reason():
        pytest.skip(f"no mounts of one's own here: {_reason()}")
    more = ["-pf", "--mount-proc"] if processes else []
    return ["unshare", "-Urm", *more, "sh", "-c", f"{before}; exec {shlex.join(command)}"]


def over(options: str, *directories: str) -> str:
    """The shell's command that mounts an empty file system over each of `directories`, but for those that hold Python
    or what is tested."""
    needed = [Path(p).resolve() for p in (ROOT, sys.prefix, sys.base_prefix)]
    free = [d for d in directories if not any(p.is_relative_to(Path(d).resolve()) for p in needed)]
    return "; ".join(f"mount -t tmpfs -o {options} none {d}" for d in free) or "true"
