"""torch, the GPUs it sees, and the packages beside it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from .finding import Finding, human
from .probe import ask
from .settings import in_force

__all__ = ["check_gpus", "check_packages", "check_torch"]

_TORCH = (2, 11)
_INSTALL = "pip install --upgrade 'torch>=2.11'"
_REINSTALL = "pip install --force-reinstall 'torch>=2.11'"
_DRIVER = Path("/proc/driver/nvidia")
# package → what it is for
_NEEDED = {"numpy": "arrays", "anyio": "event loops", "cloudpickle": "functions that travel", "msgspec": "messages"}
_OPTIONAL = {
    "uvloop": "a faster event loop",
    "trio": "dtorch.aio under trio",
    "safetensors": "checkpoints in that format",
    "fastapi": "the servers of examples/",
    "uvicorn": "the servers of examples/",
    "transformers": "Hugging Face's models",
}


def check_torch() -> tuple[list[Finding], dict[str, Any]]:
    """Findings, and the facts they rest on ({"error": …} where torch does not work)."""
    if importlib.util.find_spec("torch") is None:
        return [Finding("torch", "wrong", "not installed for this Python", _INSTALL)], {"error": "not installed"}
    facts = ask("about_torch")
    if "error" in facts:
        return [Finding("torch", "wrong", f"cannot be imported: {facts['error']}", _REINSTALL)], facts
    return list(_torch(facts)), facts


def _torch(facts: dict[str, Any]) -> Iterator[Finding]:
    text = f"{facts['version']}, imported in {facts['seconds']:.1f} s from {facts['where']}"
    numbers = tuple(int(p) for p in facts["version"].split("+")[0].split(".")[:2] if p.isdigit())
    if not facts["computes"]:
        yield Finding("torch", "wrong", f"{text}, computes wrongly: a 2×3 times a 3×2 of ones", _REINSTALL)
    elif numbers < _TORCH:
        yield Finding("torch", "wrong", f"{text}; dtorch needs 2.11 or later", _INSTALL)
    else:
        yield Finding("torch", "ok", text)
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else f"ROCm {facts['hip']}" if facts["hip"] else "CPU alone"
    yield Finding("build", "ok", f"for {build}; {facts['blas']}; {facts['threads']} threads by default")
    if in_force(os.environ).collectives == "gloo" and not facts["gloo"]:
        yield Finding("gloo", "wrong", "asked for, and not in this build", "export DTORCH_COLLECTIVES=shm")
        return
    yield Finding("gloo", "ok" if facts["gloo"] else "-", "in this build" if facts["gloo"] else "not in this build")


def check_gpus(facts: dict[str, Any]) -> Iterator[Finding]:
    """The GPUs: whether torch can use those there are."""
    there = len(list((_DRIVER / "gpus").iterdir())) if (_DRIVER / "gpus").is_dir() else 0
    if "error" in facts:
        yield Finding("GPUs", "-", f"{there} by the driver; torch must work before they can be asked")
        return
    if facts["cuda"] is None:
        if there or shutil.which("nvidia-smi"):
            text = f"{there or 'some'} by NVIDIA's driver, and this torch is built for CPUs alone"
            yield Finding("GPUs", "warning", text, "pip install --force-reinstall torch  # its default build has CUDA")
        else:
            yield Finding("GPUs", "-", 'none; "cpu" meshes of any size work, and DTORCH_DTENSOR_IN_SAME_DEVICE=1')
        return
    found = ask("about_gpus")
    if "error" in found:
        if there:
            yield Finding("GPUs", "wrong", f"{there} by the driver, and CUDA says: {found['error']}", "nvidia-smi")
        else:
            yield Finding("GPUs", "-", "none: CUDA finds no driver")
        return
    yield from _gpus(facts, found, there)


def _gpus(facts: dict[str, Any], found: dict[str, Any], there: int) -> Iterator[Finding]:
    gpus = found["gpus"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f", CUDA_VISIBLE_DEVICES={visible}"
    if not gpus:
        if there and not visible and visible != "":
            fix = "nvidia-smi  # or the container lacks them: docker run --gpus all …"
            yield Finding("GPUs", "wrong", f"{there} by the driver, none by CUDA{hidden}", fix)
        else:
            yield Finding("GPUs", "-", f"none{hidden}")
        return
    yield Finding("GPUs", "ok", f"{len(gpus)}{hidden}")
    # 12040 is CUDA 12.4; a driver serves builds of its own major version.
    driver, built = f"{found['driver'] // 1000}.{found['driver'] % 1000 // 10}", facts["cuda"]
    if int(driver.split(".")[0]) < int(built.split(".")[0]):
        fix = "upgrade the driver, or: pip install torch --index-url https://download.pytorch.org/whl/cu" + (
            driver.replace(".", "")
        )
        yield Finding("driver", "wrong", f"serves CUDA {driver}, and torch is built for {built}", fix)
    else:
        yield Finding("driver", "ok", f"serves CUDA {driver}; torch is built for {built}")
    for i, gpu in enumerate(gpus):
        text = f"{gpu['name']}, {human(gpu['free'])} free of {human(gpu['total'])}, {gpu['capability']}"
        if not gpu["computes"]:
            yield Finding(f"cuda:{i}", "wrong", f"{text}: computes wrongly", "nvidia-smi -q -d ECC")
        elif gpu["free"] < gpu["total"] // 10:
            yield Finding(f"cuda:{i}", "warning", f"{text}: others use it", "nvidia-smi")
        else:
            yield Finding(f"cuda:{i}", "ok", text)
    apart = [(i, j) for i, gpu in enumerate(gpus) for j in range(len(gpus)) if j > i and j not in gpu["peers"]]
    if apart:
        pairs = ", ".join(f"{i} and {j}" for i, j in apart[:4])
        yield Finding(
            "peer access", "warning", f"not between {pairs}: copies go by way of the host", "nvidia-smi topo -m"
        )
    elif len(gpus) > 1:
        yield Finding("peer access", "ok", "between all")
    if found["nccl"]:
        yield Finding("NCCL", "ok", found["nccl"])
    elif len(gpus) > 1:
        yield Finding("NCCL", "warning", "not in this build: GPUs meet by way of the host", _REINSTALL)


def check_packages() -> Iterator[Finding]:
    """What dtorch needs, and what it can use."""
    for package, purpose in _NEEDED.items():
        found = _version(package)
        if found is None:
            yield Finding(package, "wrong", f"not installed; for {purpose}", f"pip install '{_requirement(package)}'")
        else:
            yield Finding(package, "ok", f"{found}, for {purpose}")
    for package, purpose in _OPTIONAL.items():
        found = _version(package)
        yield Finding(package, "-", f"{found}, for {purpose}" if found else f"not installed; for {purpose}")


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


def _requirement(package: str) -> str:
    """What dtorch's own metadata asks for; the bare name where dtorch is not installed."""
    try:
        wanted = requires("dtorch") or []
    except PackageNotFoundError:
        return package
    return next((r.split(";")[0].strip() for r in wanted if r.startswith(package)), package)
