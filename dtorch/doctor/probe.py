"""Questions that need torch, asked in a process of their own: it may crash, hang, or initialise CUDA."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from typing import Any

__all__ = ["ask"]

_MARK = "dtorch-doctor: "


def ask(what: str, *arguments: str, timeout: float = 180.0) -> dict[str, Any]:
    """What the function `what` of this file says; {"error": one line, "detail": what was printed} where it cannot."""
    command = [sys.executable, "-c", _START, json.dumps([p for p in sys.path if p]), what, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError) as error:
        return {"error": f"{type(error).__name__}: {error}", "detail": ""}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(_MARK):
            return json.loads(line.removeprefix(_MARK))
    said = [line for line in done.stderr.splitlines() if line.strip()]
    status = f"exit status {done.returncode}" if done.returncode >= 0 else f"signal {-done.returncode}"
    return {"error": said[-1].strip() if said else f"the process ended with {status}", "detail": done.stderr[-2000:]}


# Not as a module: `-m` would search the working directory first, and a broken one may lie there.
_START = (
    "import sys, json; sys.path[:0] = [p for p in json.loads(sys.argv[1]) if p not in sys.path]; "
    "from dtorch.doctor.probe import answer; answer(sys.argv[2:])"
)


def answer(arguments: list[str]) -> None:
    """In the other process: run one function, and print what it returns."""
    found = {"about_torch": about_torch, "about_gpus": about_gpus, "try_pool": try_pool}[arguments[0]](*arguments[1:])
    print(f"\n{_MARK}{json.dumps(found)}", flush=True)
    # Without the interpreter's own end, which may take a second, or crash after all was well.
    os._exit(0)


def about_torch() -> dict[str, Any]:
    """What torch this is; CUDA is not touched."""
    began = time.monotonic()
    torch: Any = importlib.import_module("torch")
    seconds = time.monotonic() - began
    value = float((torch.ones(2, 3) @ torch.ones(3, 2)).sum())
    distributed: Any = importlib.import_module("torch.distributed")
    available = distributed.is_available()
    return {
        "version": torch.__version__,
        "seconds": seconds,
        "where": os.path.dirname(torch.__file__),
        "computes": value == 12.0,
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "gloo": available and distributed.is_gloo_available(),
        "nccl": available and distributed.is_nccl_available(),
        "threads": torch.get_num_threads(),
        "blas": "MKL" if torch.backends.mkl.is_available() else "another BLAS than MKL",
    }


def about_gpus() -> dict[str, Any]:
    """Every GPU, by asking CUDA itself."""
    torch: Any = importlib.import_module("torch")
    gpus: list[dict[str, Any]] = []
    seen: int = torch.cuda.device_count()
    driver: int = torch._C._cuda_getDriverVersion()
    for i in range(seen):
        properties = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        one = torch.ones(4, device=f"cuda:{i}")
        gpus.append(
            {
                "name": properties.name,
                "capability": f"sm_{properties.major}{properties.minor}",
                "free": free,
                "total": total,
                "computes": float((one + one).sum()) == 8.0,
                "peers": [j for j in range(seen) if j != i and torch.cuda.can_device_access_peer(i, j)],
            }
        )
    nccl: Any = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
    return {"gpus": gpus, "driver": driver, "nccl": ".".join(map(str, nccl)), "built_for": torch.cuda.get_arch_list()}


def try_pool() -> dict[str, Any]:
    """Two executors: started, an add, an all_reduce, and their end; all times in seconds."""
    torch: Any = importlib.import_module("torch")
    dtorch: Any = importlib.import_module("dtorch")
    client: Any = importlib.import_module("dtorch.runtime.client")
    dtorch.configure(cpu_executors=2)
    times: dict[str, float] = {}
    began = time.monotonic()

    def lap(name: str) -> None:
        nonlocal began
        now = time.monotonic()
        times[name], began = now - began, now

    mesh = dtorch.init_device_mesh("cpu", (2,))
    x = dtorch.distribute_tensor(torch.arange(8.0), mesh, [dtorch.Shard(0)])
    pool = client.client().pool
    pool.ensure(2)
    lap("start")
    value = (x + 1).to_torch().tolist()
    lap("first_add")
    for _ in range(100):
        (x + 1).to_torch()
    lap("adds")
    total = x.sum().redistribute(placements=[dtorch.Replicate()]).item()
    lap("first_all_reduce")
    for _ in range(100):
        x.sum().redistribute(placements=[dtorch.Replicate()]).item()
    lap("all_reduces")
    pids = [pool.warden_pid, *pool.pids.values()]
    began = time.monotonic()
    dtorch.shutdown()
    lap("end")
    left = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    return {
        "times": times,
        "add": value == [float(i) for i in range(1, 9)],
        "all_reduce": total == 28.0,
        "executors": len(pids) - 1,
        "left": left,
    }
