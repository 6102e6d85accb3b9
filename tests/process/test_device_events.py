"""What a device that works on its own needs: events, uploads that outlive their record, executors beside the CPUs'.

Two "GPUs" stand in for real ones (`delayed_device`): they are late with every copy, and notice mistakes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch.errors import DeviceMeshError, ExecutorDiedError
from dtorch.executor.device import is_lasting
from dtorch.runtime import client as client_module
from dtorch.runtime.client import Client, client
from dtorch.runtime.config import configure
from dtorch.runtime.shared import EXECUTOR_DONE, EXECUTOR_READ, executor_line

from . import delayed_device
from .delayed_device import REUSED
from .scripts import run_script

R, P, S = dtorch.Replicate(), dtorch.Partial(), dtorch.Shard
LATE = {"delay": 0.0, "pinned": 16 << 20}


class Late:
    """Starts pools with late devices for "cuda" meshes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch

    def start(self, count: int = 2, **options: Any) -> None:
        dtorch.shutdown()
        settings = {**LATE, **options}

        def options_of(self: Client, executor: int) -> dict[str, Any]:
            found: dict[str, Any] = {"accelerators": self.accelerators}
            if executor >= self.accelerators:
                found |= {"device": "tests.process.delayed_device:Delayed", **settings}
            return found

        for module in ("dtorch.mesh", "dtorch.runtime.pool_client"):
            self.patch.setattr(f"{module}.gpu_count", lambda: count)
        self.patch.setattr(Client, "_options_of", options_of)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    before = configure()
    yield Late(monkeypatch)
    dtorch.shutdown()
    client_module.config._current = before


def cuda(n: int = 1) -> dtorch.DeviceMesh:
    return dtorch.init_device_mesh("cuda", n)


def test_executors_of_gpus_come_last(late: Late) -> None:
    late.start()
    a = dtorch.zeros(2, device_mesh=cuda(2), placements=[S(0)])
    assert a.to_torch().tolist() == [0, 0]
    c = client()
    top = c.config.max_executors
    assert c.writer.readers == (top - 2, top - 1)
    b = dtorch.ones(2)
    assert (a.to("cpu") + b).to_torch().tolist() == [1, 1]
    assert 0 in c.writer.readers
    c.values.sync().get()
    with pytest.raises(DeviceMeshError, match="cuda:2 is not there"):
        cuda(3)


def test_a_result_is_ready_when_its_event_has_come(late: Late) -> None:
    late.start(delay=0.3)
    a = dtorch.arange(1000.0, device_mesh=cuda())
    a.to_torch()
    c = client()
    done_word = executor_line(c.accelerators) + EXECUTOR_DONE
    started = time.monotonic()
    future = (a + 1).to_torch_async()
    for _ in range(100):
        a = a + 0
    issued = c.writer.issued
    c.flush()
    # What is issued behind the fetch runs meanwhile: the loop does not wait for the copy.
    while c.control[done_word] < issued and time.monotonic() - started < 0.2:
        time.sleep(0.002)
    assert c.control[done_word] >= issued
    assert not future.is_ready()
    assert torch.equal(future.get(), torch.arange(1000.0) + 1)
    assert time.monotonic() - started >= 0.3


def test_awaits_on_a_late_device(late: Late) -> None:
    late.start(delay=0.05)
    base = dtorch.arange(4.0, device_mesh=cuda())

    async def main() -> list[Any]:
        beats = 0

        async def heart() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0.005)
                beats += 1

        task = asyncio.create_task(heart())
        values = await asyncio.gather(*[one(i) for i in range(20)])
        task.cancel()
        return [beats, values]

    async def one(i: int) -> Any:
        return (await (base + i)).tolist()

    beats, values = asyncio.run(main())
    assert values == [[i, i + 1, i + 2, i + 3] for i in range(20)]
    assert beats >= 5


@pytest.mark.parametrize("pinned", [16 << 20, 0], ids=["direct", "staged"])
def test_values_there_and_back(late: Late, pinned: int) -> None:
    late.start(delay=0.005, pinned=pinned)
    values = (torch.randn(7, 5), torch.randn(5, 7).t(), torch.randn(1, 1), torch.randn(0, 3))
    dtypes = (torch.float32, torch.bool, torch.complex64, torch.bfloat16)
    for value, dtype, placement in itertools.product(values, dtypes, (R, S(0), S(1))):
        plain = (value > 0) if dtype is torch.bool else value.to(dtype)
        there = dtorch.distribute_tensor(plain, cuda(2), [placement])
        assert torch.equal(there.to_torch(), plain)
        assert torch.equal(there.t().to_torch(), plain.t())
        for rank in range(2):
            assert torch.equal(there.to_local(rank), _piece(plain, placement, rank))
    z = dtorch.Tensor(torch.randn(3, dtype=torch.complex64), cuda())
    assert torch.equal(z.conj().to_torch(), z.to_torch().conj())


def _piece(plain: torch.Tensor, placement: Any, rank: int) -> torch.Tensor:
    if placement == R:
        return plain
    pieces = torch.chunk(plain, 2, placement.dim) if plain.shape[placement.dim] else (plain, plain)
    return pieces[rank] if rank < len(pieces) else plain.narrow(placement.dim, 0, 0)


def test_many_uploads_keep_their_memory_until_they_are_copied(late: Late) -> None:
    late.start(delay=0.05)
    total = dtorch.zeros(1 << 14, device_mesh=cuda())
    for i in range(300):
        total = total + dtorch.Tensor(torch.full((1 << 14,), float(i)), cuda())
        if i % 50 == 49:
            total.to_torch()
    assert total.to_torch()[0] == sum(range(300))
    c = client()
    c.values.reclaim()
    assert not c.values._in_upload


def test_the_stand_in_notices_memory_that_is_used_again_too_early(late: Late) -> None:
    """Proof that the test above can fail: with the read index in the place of the consumed word it does."""
    late.start(delay=0.1)
    mesh = cuda()
    dtorch.zeros(1, device_mesh=mesh).to_torch()
    c = client()
    c.consumed = tuple(executor_line(e) + EXECUTOR_READ for e in c.writer.readers)
    with pytest.raises(ExecutorDiedError, match=f"exit code {REUSED}"):
        for i in range(300):
            t = dtorch.Tensor(torch.full((1 << 14,), float(i)), mesh)
            if i % 10 == 9:
                time.sleep(0.01)
        t.to_torch()


def test_moves_between_cpus_and_gpus(late: Late) -> None:
    late.start()
    value = torch.randn(6, 5)
    meshes = [dtorch.init_device_mesh("cpu", 2), cuda(2)]
    for a, b, source, to in itertools.product(meshes, meshes, (R, S(0), S(1), P), (R, S(0), S(1))):
        moved = dtorch.distribute_tensor(value, a, [source]).redistribute(b, [to])
        assert moved.device.type == b.device_type
        assert torch.allclose(moved.to_torch(), value)


def test_generators_of_cpus_and_gpus_are_apart(late: Late) -> None:
    late.start()
    dtorch.manual_seed(3)  # before there is any executor of a GPU
    torch.manual_seed(3)
    want = torch.randn(8)
    assert torch.equal(dtorch.randn(8, device_mesh=cuda()).to_torch(), want)
    assert torch.equal(dtorch.randn(8).to_torch(), want)
    second = torch.randn(8)
    assert torch.equal(dtorch.randn(8, device_mesh=cuda(2), placements=[S(0)]).to_torch(), second)
    assert torch.equal(dtorch.randn(8).to_torch(), second)


def test_a_checkpoint_draws_the_same_again_on_gpus(late: Late) -> None:
    late.start(delay=0.002)
    values = {}
    for name in ("cpu", "cuda"):
        mesh = dtorch.DeviceMesh(name, [0])
        dtorch.manual_seed(1)
        x = dtorch.Tensor(torch.ones(64), mesh).requires_grad_()
        dtorch.rand(3)  # the generators of CPUs draw in between
        if name == "cpu":
            dtorch.manual_seed(1)
        y = dtorch.utils.checkpoint.checkpoint(torch.nn.functional.dropout, x, 0.5, use_reentrant=False)
        y.square().sum().backward()
        values[name] = (y.detach().to_torch(), x.grad.to_torch())
        assert torch.equal(values[name][1], 2 * values[name][0] * (values[name][0] != 0) * 2)
    assert torch.equal(values["cpu"][0], values["cuda"][0])


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(8, 8, batch_first=True)
        self.norm = torch.nn.LayerNorm(8)
        self.out = torch.nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        h = self.norm(self.lstm(x)[0])
        heads = h.view(*h.shape[:2], 2, 4).transpose(1, 2)
        h = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return self.out(torch.nn.functional.dropout(h.transpose(1, 2).flatten(2), 0.1))


def test_training_through_the_translated_operators(late: Late) -> None:
    late.start(delay=0.001)
    torch.manual_seed(0)
    model = Block()
    data, labels = torch.randn(4, 5, 8), torch.randint(0, 3, (4, 5))

    def train(model: torch.nn.Module, data: Any, labels: Any, seed: Any) -> list[float]:
        seed(1)
        losses = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(4):
            loss = torch.nn.functional.cross_entropy(model(data).flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    mesh = cuda()
    ours = dtorch.distributed.tensor.distribute_module(_copy(model), mesh)
    with dtorch.device_mesh(mesh):
        got = train(ours, dtorch.Tensor(data, mesh), dtorch.Tensor(labels, mesh), dtorch.manual_seed)
    want = train(model, data, labels, torch.manual_seed)
    assert got == pytest.approx(want, rel=1e-5)


def _copy(model: Block) -> Block:
    other = Block()
    other.load_state_dict(model.state_dict())
    return other


def test_simulated_ranks_share_the_executor_of_the_first_gpu(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTORCH_DTENSOR_IN_SAME_DEVICE", "1")
    late.start(count=1, delay=0.005)
    configure(same_device=True)
    mesh = dtorch.init_device_mesh("cuda", (2, 4))
    value = torch.randn(8, 12)
    x = dtorch.distribute_tensor(value, mesh, [S(0), S(1)])
    assert torch.allclose((x @ x.t().redistribute(placements=[R, S(0)])).to_torch(), value @ value.t(), atol=1e-5)
    assert client().writer.readers == (client().accelerators,)
    dtorch.manual_seed(1)
    torch.manual_seed(1)
    assert torch.equal(dtorch.rand(8, 4, device_mesh=mesh, placements=[S(0), S(1)]).to_torch(), torch.rand(8, 4))


def test_errors_of_operators_poison_and_the_device_goes_on(late: Late) -> None:
    late.start(delay=0.01)
    a = dtorch.Tensor(torch.zeros(2, 2), cuda())
    bad = a.index_select(0, dtorch.Tensor(torch.tensor([5]), cuda()))
    with pytest.raises(IndexError, match="out of range"):
        (bad + 1).to_torch()
    assert (a + 1).to_torch().sum() == 4


def _lose(rank: int) -> torch.Tensor:
    delayed_device.current[0].lost = RuntimeError("CUDA error: device-side assert triggered")
    return torch.zeros(1)


def test_a_lost_device_ends_its_executor(late: Late) -> None:
    late.start(delay=0.01)
    mesh = cuda()
    dtorch.zeros(1, device_mesh=mesh).to_torch()
    lost = dtorch.from_local(_lose, mesh, [R], shape=(1,))
    said = "late cannot be used any longer after this error, .* are lost: RuntimeError: CUDA error: device-side assert"
    for _ in range(2):
        with pytest.raises(ExecutorDiedError, match=said):
            lost.to_torch()


@torch.library.custom_op("dtorch_tests::faulty", mutates_args=())
def _faulty(x: torch.Tensor) -> torch.Tensor:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nMore advice of torch's.")


@_faulty.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_fault_of_the_device_ends_the_executor_and_names_the_operator(late: Late) -> None:
    """Peers are freed, and the error that stays is not mistaken for one of the operator's."""
    late.start(delay=0.001)
    mesh = cuda(2)
    x = dtorch.distribute_tensor(torch.ones(4, 4), mesh, [S(0)])
    x.to_torch()
    dtorch.register_sharding(torch.ops.dtorch_tests.faulty.default)(lambda x: [([R], [R])])
    waits = [x.redistribute(placements=[R]).to_torch_async() for _ in range(3)]
    faulty = torch.ops.dtorch_tests.faulty.default(x.redistribute(placements=[R]))
    after = (faulty + 1).to_torch_async()
    said = (
        r"(?s)executor \d+ .* ended with exit code 1.*DeviceError: late cannot be used any longer after this error.*"
        r"AcceleratorError: CUDA error: an illegal memory access was encountered \(met in .*faulty\(x float32\[4, 4\]"
    )
    with pytest.raises(ExecutorDiedError, match=said):
        after.get(timeout=20)
    for future in waits:
        assert future.exception() is None or isinstance(future.exception(), ExecutorDiedError)
    with pytest.raises(ExecutorDiedError, match="illegal memory access"):
        dtorch.zeros(3, device_mesh=mesh)


def test_which_errors_stay() -> None:
    stay = [
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: misaligned address"),
        RuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered"),
        RuntimeError("NCCL error: unhandled cuda error, unspecified launch failure"),
    ]
    coded = RuntimeError("CUDA error: what a later version calls it")
    coded.error_code = 719  # type: ignore[attr-defined]
    wrapped = ValueError("while doing something else")
    wrapped.__cause__ = coded
    for error in (*stay, coded, wrapped):
        assert is_lasting(error), error
    pass_by = [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        IndexError("index 5 is out of bounds"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("a device-side assert, as a user may put it"),
    ]
    for error in pass_by:
        assert not is_lasting(error), error


def test_the_checks_for_a_gpu_run_on_the_stand_in(tmp_path: Path) -> None:
    names = ["operators", "training", "simulated ranks", "between CPU and GPU", "memory stays flat"]
    run_script("tests/device/check.py", "--rehearse", "--json", tmp_path / "found.json", "--only", *names)
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["outcome"] for row in found["checks"]] == ["ok"] * len(names)


def test_device_contexts_of_torch_work_beside_dtorch() -> None:
    """torch lists what they concern when the first is used: after dtorch has put functions of its own there."""
    script = "import torch, dtorch; dtorch.zeros\nwith torch.device('meta'): print(torch.zeros(2).device)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "meta\n"
