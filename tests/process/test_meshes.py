"""Meshes of every shape on every number of executors: `mesh_battery.py`, here and under other settings."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .mesh_battery import *  # noqa: F403
from .scripts import ROOT

SETTINGS = {
    "four executors": {"DTORCH_CPU_EXECUTORS": "4"},
    "three executors and gloo": {"DTORCH_COLLECTIVES": "gloo", "DTORCH_CPU_EXECUTORS": "3"},
    "simulation": {
        "DTORCH_DTENSOR_IN_SAME_DEVICE": "1",
        "DTORCH_NUM_GPU_WHEN_ENABLE_DTENSOR_IN_SAME_DEVICE": "432",
    },
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_battery_under(setting: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/process/mesh_battery.py"],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **SETTINGS[setting]},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
