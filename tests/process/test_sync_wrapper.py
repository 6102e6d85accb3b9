"""The same values without await: from any thread, in a notebook's loop, in forked workers."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

import dtorch
from dtorch import Shard, init_device_mesh

from .scripts import ROOT


def script(body: str, timeout: float = 100) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=timeout,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


def test_get_from_any_thread() -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = dtorch.distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    shared = (x * 2).to_torch_async()
    wrong: list[object] = []

    def work(i: int) -> None:
        for k in range(20):
            own = (x * (i + k)).sum().to_torch_async()
            got = (own.get(30).item(), own.wait(1), own.is_ready(), shared.get(30).sum().item())
            if got != (28.0 * (i + k), True, True, 56.0):
                wrong.append(got)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not wrong


def test_get_with_a_timeout_leaves_all_usable() -> None:
    def make(rank: int) -> torch.Tensor:
        time.sleep(0.3)
        return torch.ones(1)

    future = dtorch.from_local(make, dtorch.DeviceMesh("cpu"), [dtorch.Replicate()], shape=(1,)).to_torch_async()
    with pytest.raises(TimeoutError):
        future.get(0.01)
    assert not future.wait(0.001) and not future.wait_for(1)
    assert future.get(30).item() == 1 and future.exception() is None


def test_a_notebooks_cells_run_inside_its_loop() -> None:
    """As ipykernel does: a loop runs in the main thread, and executes each cell, which may await at its top level."""
    out = script("""
        import ast, asyncio, inspect, sys, types
        ipython = types.ModuleType("IPython")
        ipython.get_ipython = object
        sys.modules["IPython"] = ipython

        CELLS = [
            "import dtorch\\nt = dtorch.arange(4)",
            "print(t.sum().item(), t.tolist(), bool(t.any()), float(t.sum()))",
            "t",
            "print((t * 2).to_torch_async().get(timeout=30))",
            "print(await (t * 3), await dtorch.aio.gather(t.max(), t.min()))",
            "async with dtorch.aio.open():\\n    print((await t.sum()).item(), t.sum().item())",
            "print(dtorch.ones(3).sum().item())",
        ]

        async def kernel():
            scope = {}
            for cell in CELLS:
                tree = compile(cell, "<ipython-input>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                code = compile(tree, "<ipython-input>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                made = eval(code, scope)
                if inspect.iscoroutine(made):
                    await made
                await asyncio.sleep(0)

        asyncio.run(kernel())
    """)
    assert out.splitlines() == [
        "6 [0, 1, 2, 3] True 6.0",
        "tensor([0, 2, 4, 6])",
        "tensor([0, 3, 6, 9]) [tensor(3), tensor(0)]",
        "6 6",
        "3.0",
    ]


def test_forked_workers_have_pools_of_their_own() -> None:
    """As gunicorn does: the application is loaded, and perhaps used, before the workers are forked."""
    out = script("""
        import asyncio, os, sys
        import dtorch
        from dtorch.runtime.client import client

        mesh = dtorch.init_device_mesh("cpu", (2,))
        parents = dtorch.ones(4, device_mesh=mesh)
        assert parents.sum().item() == 4
        pids = set(client().pool.pids.values())

        def worker(i):
            x = dtorch.ones(4, device_mesh=mesh, placements=[dtorch.Shard(0)]) * i
            assert x.sum().item() == 4 * i
            assert not pids & set(client().pool.pids.values())
            try:
                parents.sum().item()
            except dtorch.TensorLostError:
                pass
            else:
                raise AssertionError("the parent's tensor was read")

            async def serve():
                async with dtorch.aio.open():
                    values = await dtorch.aio.gather(*(x.sum() * k for k in range(20)))
                    assert [v.item() for v in values] == [4 * i * k for k in range(20)]

            asyncio.run(serve())
            assert (dtorch.ones(2) * i).tolist() == [i, i]

        async def main():
            # One session is open in the parent when the workers are forked: it is none of theirs.
            async with dtorch.aio.open():
                children = []
                for i in (1, 2, 3):
                    pid = os.fork()
                    if pid == 0:
                        asyncio._set_running_loop(None)
                        code = 1
                        try:
                            worker(i)
                            dtorch.shutdown()
                            code = 0
                        finally:
                            os._exit(code)
                    children.append(pid)
                for pid in children:
                    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
                assert (await (parents * 5)).tolist() == [5.0] * 4

        asyncio.run(main())
        print("served")
    """)
    assert out == "served\n"
