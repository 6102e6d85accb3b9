"""Commands that see a file system of their own, where the kernel allows that to an ordinary user."""

from __future__ import annotations

import functools
import shlex
import subprocess
from collections.abc import Sequence

import pytest

__all__ = ["in_namespace"]


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


def in_namespace(mounts: str, command: Sequence[str]) -> list[str]:
    """The command that runs `command` after the shell's `mounts`; skips the test where that is not allowed."""
    if _reason():
        pytest.skip(f"no mounts of one's own here: {_reason()}")
    return ["unshare", "-Urm", "sh", "-c", f"{mounts}; exec {shlex.join(command)}"]
