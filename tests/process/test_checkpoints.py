"""dtorch.save and dtorch.load: every piece once, restored onto any mesh, whole or not at all whoever dies."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import dtorch
from dtorch import CheckpointError, Partial, Replicate, Shard, init_device_mesh, nn
from dtorch.checkpoint import files, safetensors
from dtorch.runtime.client import client

from ..pure.test_checkpoint_files import DTYPES, damaged, equal, filled
from .loops import LOOPS
from .loops import on as run_on
from .scripts import ROOT, run_body

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning", "ignore:ComplexHalf support is experimental:UserWarning"
)

FORMATS = ["safetensors", "dcp", "torch"]
ONE = dtorch.DeviceMesh("cpu")
LINE = init_device_mesh("cpu", 3)
GRID = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

# Even and uneven cuts, nested ones, empty pieces, and summands.
PLACED: list[tuple[Any, list[Any]]] = [
    (ONE, [Replicate()]),
    (LINE, [Shard(0)]),
    (LINE, [Shard(1)]),
    (LINE, [Partial()]),
    (GRID, [Shard(0), Shard(0)]),
    (GRID, [Shard(1), Shard(0)]),
    (GRID, [Replicate(), Shard(1)]),
    (GRID, [Partial(), Shard(1)]),
    (GRID, [Shard(0), Partial("max")]),
]


def value(*shape: int, seed: int = 0) -> torch.Tensor:
    """Small whole numbers: sums of them are exact in any order."""
    return torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(seed)).float()


def on(t: torch.Tensor, mesh: Any, placements: list[Any]) -> Any:
    return dtorch.distribute_tensor(t, mesh, placements)


def plain(state: Any) -> Any:
    """A state with plain tensors in it."""
    if isinstance(state, dtorch.Tensor):
        return state.detach().to_torch()  # type: ignore[attr-defined]
    if isinstance(state, torch.Tensor):
        return state.detach()
    if isinstance(state, OrderedDict):
        return OrderedDict((k, plain(v)) for k, v in state.items())
    if isinstance(state, dict):
        return {k: plain(v) for k, v in state.items()}
    return type(state)(map(plain, state)) if type(state) in (list, tuple) else state


def named(directory: Path, format: str) -> Path:
    return directory / ("x.pt" if format == "torch" else "x")


# -- what comes back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("source", PLACED, ids=lambda p: f"{p[0].shape}{p[1]}")
def test_any_placements_to_any_others(tmp_path: Path, format: str, source: tuple[Any, list[Any]]) -> None:
    whole = {"five by four": value(5, 4), "one row": value(1, 4, seed=1), "large": value(700, 600, seed=2)}
    # Shares of summands are whole numbers on every rank.
    state = {name: on(t, *source) for name, t in whole.items()}
    dtorch.save(state, named(tmp_path, format), format=format)
    for mesh, placements in PLACED:
        found = dtorch.load(named(tmp_path, format), device_mesh=mesh, placements=placements)
        assert all(found[k].device_mesh is mesh and found[k].placements == placements for k in whole)
        assert equal(plain(found), whole)
    into = {
        name: on(torch.zeros_like(t), *target) for (name, t), target in zip(whole.items(), PLACED[::3], strict=True)
    }
    refs = [int(t._ref) for t in into.values()]
    assert dtorch.load(named(tmp_path, format), into=into) is into
    assert equal(plain(into), whole) and [int(t._ref) for t in into.values()] == refs


@pytest.mark.parametrize("format", FORMATS)
def test_every_kind_of_tensor_and_value(tmp_path: Path, format: str) -> None:
    state: dict[Any, Any] = {
        "dtypes": {str(d): on(filled(d, 3, 4), LINE, [Shard(0)]) for d in DTYPES},
        "0-dim": on(torch.tensor(2.5), LINE, [Replicate()]),
        "empty": on(torch.zeros(0, 4), LINE, [Shard(0)]),
        "transposed": on(value(5, 4), LINE, [Shard(0)]).t(),
        "strided": on(value(6, 4), LINE, [Replicate()])[1:, ::2],
        "expanded": on(value(1, 4), LINE, [Replicate()]).expand(3, 4),
        "conjugate": on(value(3, 2).to(torch.complex64) * 1j, LINE, [Replicate()]).conj(),
        "plain": [torch.arange(5)[::2], torch.tensor(1j).conj(), torch.zeros(0)],
        "values": (1, -(1 << 70), 0.1, float("inf"), True, None, "ä", b"\x00", 1j, torch.float16, torch.Size([1, 2])),
        7: {(1, "a"): OrderedDict(b=1)},
    }
    dtorch.save(state, named(tmp_path, format), format=format)
    found = dtorch.load(named(tmp_path, format))
    assert type(found["plain"][0]) is torch.Tensor
    assert equal(plain(found), plain(state))


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_tied_tensors_are_stored_once_and_tied_again(tmp_path: Path, format: str) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(300, 100), torch.nn.Linear(100, 300, bias=False)).to(LINE)
    model[1].weight = model[0].weight
    counter = torch.zeros(3)
    state = {"model": model.state_dict(), "a": counter, "b": counter}
    dtorch.save(state, tmp_path / "x", format=format)
    size = sum(p.stat().st_size for p in (tmp_path / "x").iterdir())
    assert 120_000 < size < 140_000
    found = dtorch.load(tmp_path / "x", device_mesh=LINE)
    assert found["a"] is found["b"] and found["model"]["0.weight"] is found["model"]["1.weight"]
    assert equal(plain(found), plain(state))


def test_leaves_are_leaves_again(tmp_path: Path) -> None:
    p = torch.nn.Parameter(on(value(3, 2), LINE, [Shard(0)]))
    frozen = torch.nn.Parameter(on(value(3, 2), LINE, [Shard(0)]), requires_grad=False)
    leaf = on(value(2), LINE, [Replicate()]).requires_grad_()
    dtorch.save({"p": [p, frozen], "leaf": leaf, "none": leaf.detach()}, tmp_path / "x")
    found = dtorch.load(tmp_path / "x", device_mesh=LINE, placements=lambda name, shape: [Shard(0)])
    kinds = [(isinstance(t, torch.nn.Parameter), t.requires_grad) for t in (*found["p"], found["leaf"], found["none"])]
    assert kinds == [(True, True), (True, False), (False, True), (False, False)]
    (found["p"][0] * 2).sum().backward()
    assert found["p"][0].grad.placements == [Shard(0)] and found["p"][0].grad.to_torch().tolist() == [[2.0] * 2] * 3


def test_every_piece_is_written_once_and_the_work_is_shared(tmp_path: Path) -> None:
    state = {f"replicated {i}": on(value(100, 100, seed=i), GRID, [Replicate()] * 2) for i in range(8)}
    state |= {f"halves {i}": on(value(100, 100, seed=i), GRID, [Replicate(), Shard(1)]) for i in range(8)}
    dtorch.save(state, tmp_path / "x", format="dcp")
    written = [p.stat().st_size for p in (tmp_path / "x").glob("__*_0.distcp")]
    assert len(written) == min(4, os.cpu_count() or 1)
    assert 640_000 <= sum(written) < 720_000 and max(written) < 1.1 * min(written)
    dtorch.save(state, tmp_path / "y")
    sizes = [p.stat().st_size for p in (tmp_path / "y").glob("*.safetensors")]
    assert sum(sizes) < 660_000


def test_relative_paths_are_those_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, format in (("x", None), ("y", "dcp"), ("z.safetensors", None), ("w.pt", None)):
        monkeypatch.chdir(tmp_path)
        dtorch.save({"a": on(value(3), LINE, [Shard(0)])}, name, format=format)
        assert equal(plain(dtorch.load(name)), {"a": value(3)})
    assert sorted(os.listdir(tmp_path)) == ["w.pt", "x", "y", "z.safetensors"]


def test_one_tensor_is_a_state(tmp_path: Path) -> None:
    t = on(value(3), LINE, [Shard(0)])
    for name in ("x", "x.safetensors"):
        dtorch.save(t, tmp_path / name)
        assert equal(plain(dtorch.load(tmp_path / name)), value(3))
        assert dtorch.load(tmp_path / name, into=t) is t
    with pytest.raises(CheckpointError, match=r"write \{'name': tensor\}"):
        dtorch.save(t, tmp_path / "y", format="dcp")
    # torch joins keys by dots, and cannot tell these two apart.
    twins = {"a": {"b": t}, "a.b": t * 2}
    dtorch.save(twins, tmp_path / "y")
    assert equal(plain(dtorch.load(tmp_path / "y")), plain(twins))
    with pytest.raises(CheckpointError, match=r"two values are called 'a\.b'"):
        dtorch.save(twins, tmp_path / "z", format="dcp")
    assert sorted(os.listdir(tmp_path)) == ["x", "x.safetensors", "y"]


def test_placements_by_name_and_by_function(tmp_path: Path) -> None:
    dtorch.save(
        {"a": value(4, 4), "b": {"c": on(value(4), LINE, [Replicate()]), "d": on(value(6, 2), ONE, [Replicate()])}},
        tmp_path / "x",
    )
    found = dtorch.load(tmp_path / "x", device_mesh=GRID, placements={"b.d": [Shard(0), Shard(1)]})
    assert found["b"]["c"].placements == [Replicate()] * 2 and found["b"]["d"].placements == [Shard(0), Shard(1)]
    found = dtorch.load(tmp_path / "x", device_mesh=GRID["tp"], placements=lambda name, shape: [Shard(len(shape) - 1)])
    assert found["b"]["c"].placements == [Replicate(), Shard(0)] and found["b"]["d"].placements == [
        Replicate(),
        Shard(1),
    ]
    with dtorch.device_mesh(LINE):
        assert dtorch.load(tmp_path / "x")["b"]["d"].device_mesh is LINE
    with pytest.raises(CheckpointError, match=r"placements of 'e', and the checkpoint has no tensor of that name"):
        dtorch.load(tmp_path / "x", placements={"e": [Shard(0)]})
    with pytest.raises(CheckpointError, match=r"placements of 'b.c' \[4\]: Shard\(1\) is out of range"):
        dtorch.load(tmp_path / "x", placements=lambda name, shape: [Shard(1)])


# -- what others read and write ---------------------------------------------------------------------------------------


def test_safetensors_reads_a_sharded_model(tmp_path: Path) -> None:
    whole = {f"layer.{i}.weight": value(70, 50, seed=i) for i in range(120)}
    dtorch.save({n: on(t, GRID, [Shard(i % 2), Shard(0)]) for i, (n, t) in enumerate(whole.items())}, tmp_path / "x")
    index = json.loads((tmp_path / "x" / safetensors.INDEX).read_text())
    assert index["weight_map"].keys() == whole.keys() and index["metadata"]["total_size"] == 120 * 70 * 50 * 4
    read: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        read |= load_file(tmp_path / "x" / name)
    assert equal({n: read[n] for n in whole}, whole)
    dtorch.save({"w": on(whole["layer.0.weight"], GRID, [Shard(0), Shard(1)])}, tmp_path / "x.safetensors")
    assert equal(load_file(tmp_path / "x.safetensors"), {"w": whole["layer.0.weight"]})
    save_file(whole, tmp_path / "theirs.safetensors")
    found = dtorch.load(tmp_path / "theirs.safetensors", device_mesh=LINE, placements=[Shard(1)])
    assert equal({n: plain(found[n]) for n in whole}, whole)


def test_transformers_reads_a_sharded_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.BertModel(config)
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    model.to(LINE)
    dtorch.save(model.state_dict(), tmp_path / "x")
    config.save_pretrained(tmp_path / "x")
    again = transformers.BertModel.from_pretrained(tmp_path / "x")
    assert equal(dict(again.state_dict()), expected)
    # A second save keeps what is not its own.
    dtorch.save(model.state_dict(), tmp_path / "x")
    assert (tmp_path / "x" / "config.json").exists()


def test_torch_reads_its_format_in_one_process(tmp_path: Path) -> None:
    state = {
        "model": {"w": on(value(5, 4), GRID, [Shard(0), Shard(1)]), "b": on(value(3), GRID, [Shard(0), Replicate()])}
    }
    state |= {"step": 5, "rates": [0.1, 0.2], "random": torch.arange(9, dtype=torch.uint8)}
    dtorch.save(state, tmp_path / "x", format="dcp")
    into: dict[str, Any] = {"model": {"w": torch.zeros(5, 4), "b": torch.zeros(3)}, "step": 0, "rates": []}
    into["random"] = torch.zeros(9, dtype=torch.uint8)
    torch_dcp.load(into, checkpoint_id=tmp_path / "x", no_dist=True)
    assert equal(into, plain(state))


DTENSOR = """
import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DeviceMesh, Shard, Replicate, distribute_tensor
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2] + "/rendezvous", rank=rank, world_size=2)
mesh = DeviceMesh("cpu", [0, 1])
whole = torch.arange(35.0).reshape(5, 7)
state = {"a": distribute_tensor(whole, mesh, [Shard(0)]), "b": {"c": distribute_tensor(whole, mesh, [Shard(1)])}}
if sys.argv[3] == "save":
    dcp.save(state | {"n": 3}, checkpoint_id=sys.argv[2] + "/theirs")
else:
    for t in (state["a"], state["b"]["c"]):
        t.zero_()
    dcp.load(state, checkpoint_id=sys.argv[2] + "/ours")
    assert torch.equal(state["a"].full_tensor(), whole) and torch.equal(state["b"]["c"].full_tensor(), whole)
dist.destroy_process_group()
os._exit(0)  # gloo's threads abort a process now and then that ends otherwise
"""


@pytest.mark.timeout(300)
def test_dtensors_of_two_processes_read_and_write_it_too(tmp_path: Path) -> None:
    whole = torch.arange(35.0).reshape(5, 7)

    def both(what: str) -> None:
        (tmp_path / "rendezvous").unlink(missing_ok=True)
        command = [sys.executable, "-W", "ignore", "-c", DTENSOR]
        started = [subprocess.Popen([*command, str(rank), str(tmp_path), what]) for rank in range(2)]
        try:
            assert [p.wait(timeout=90) for p in started] == [0, 0]
        finally:
            for p in started:
                p.kill()

    both("save")
    found = dtorch.load(tmp_path / "theirs", device_mesh=GRID, placements=[Shard(1), Shard(0)])
    assert found["n"] == 3 and equal(plain(found["b"]["c"]), whole) and equal(plain(found["a"]), whole)
    state = {"a": on(whole, LINE, [Shard(1)]), "b": {"c": on(whole, LINE, [Shard(0)])}}
    dtorch.save(state, tmp_path / "ours", format="dcp")
    both("load")


def test_torch_reads_its_own_files(tmp_path: Path) -> None:
    model = nn.Linear(4, 3, device_mesh=LINE, placements=[Shard(0)])
    dtorch.save(model.state_dict(), tmp_path / "x.pt")
    read = torch.load(tmp_path / "x.pt", weights_only=True)
    assert type(read["weight"]) is torch.Tensor and equal(dict(read), plain(dict(model.state_dict())))
    assert all(type(t) is torch.Tensor for t in dtorch.load(tmp_path / "x.pt").values())
    found = dtorch.load(tmp_path / "x.pt", device_mesh=GRID, placements={"weight": [Shard(1), Replicate()]})
    assert found["weight"].placements == [Shard(1), Replicate()] and found["bias"].device_mesh is GRID
    assert equal(plain(found["weight"]), read["weight"])
    # An object of any class goes the way it always went.
    dtorch.save({"a": slice(1, 2)}, tmp_path / "any.pt")
    assert dtorch.load(tmp_path / "any.pt", weights_only=False) == {"a": slice(1, 2)}


# -- a training run ---------------------------------------------------------------------------------------------------


def trained(mesh: Any, placements: list[Any], optimizer: str = "AdamW", steps: int = 3) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    dtorch.distribute_module(
        model,
        mesh,
        lambda name, module, mesh: [
            module.register_parameter(k, torch.nn.Parameter(on(p.detach(), mesh, placements)))
            for k, p in list(module.named_parameters(recurse=False))
        ],
    )
    opt = getattr(dtorch.optim, optimizer)(model.parameters(), lr=0.01)
    for n in range(steps):
        step(model, opt, n)
    return model, opt


def step(model: Any, opt: Any, n: int) -> None:
    p = next(model.parameters())
    x = value(8, 6, seed=n) / 99
    if isinstance(p, dtorch.Tensor):
        x = on(x, p.device_mesh, [Replicate()] * p.device_mesh.ndim)
    with dtorch.auto_redistribute():
        (model(x) - 1).square().sum().backward()
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize("format", FORMATS)
def test_a_run_goes_on_elsewhere(tmp_path: Path, format: str) -> None:
    model, opt = trained(GRID, [Replicate(), Shard(0)])
    path = named(tmp_path, format)
    state: dict[str, Any] = {"model": model, "optimizer": opt, "step": 3}
    if format == "torch":
        # torch's own format pickles a module as it stands.
        state |= {"model": model.state_dict(), "optimizer": opt.state_dict()}
    dtorch.save(state, path, format=format)
    for n in range(3, 5):
        step(model, opt, n)
    expected = [p.detach().to_torch() for p in model.parameters()]
    for mesh, placements in ((LINE, [Shard(0)]), (ONE, [Replicate()]), (GRID, [Shard(0), Replicate()])):
        other, opt2 = trained(mesh, placements, steps=1)
        state = {"model": other, "optimizer": opt2, "step": 0}
        assert dtorch.load(path, into=state)["step"] == 3
        first = next(other.parameters())
        assert opt2.state[first]["exp_avg"].placements == placements and type(opt2.state[first]["step"]) is torch.Tensor
        for n in range(3, 5):
            step(other, opt2, n)
        for p, right in zip(other.parameters(), expected, strict=True):
            torch.testing.assert_close(p.detach().to_torch(), right)


def test_a_lost_state_is_restored_after_a_restart(tmp_path: Path) -> None:
    model, opt = trained(GRID, [Replicate(), Shard(0)])
    buffer = on(value(4), LINE, [Shard(0)])
    state = {"model": model, "optimizer": opt, "buffers": [buffer, buffer], "step": 3}
    before = {name: p.detach().to_torch() for name, p in model.named_parameters()}
    dtorch.save(state, tmp_path / "x")
    dtorch.restart()
    with pytest.raises(dtorch.TensorLostError):
        model[0].weight.to_torch()
    dtorch.load(tmp_path / "x", into=state)
    assert equal({name: p.detach().to_torch() for name, p in model.named_parameters()}, before)
    assert equal(buffer.to_torch(), value(4))
    step(model, opt, 3)
    again, _ = trained(GRID, [Replicate(), Shard(0)], steps=4)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(p.detach().to_torch(), q.detach().to_torch())
    # What state_dict() gives are other proxies of the same values.
    dtorch.restart()
    dtorch.load(tmp_path / "x", into={"model": model.state_dict()})
    assert equal({name: p.detach().to_torch() for name, p in model.named_parameters()}, before)


def test_plain_torch_goes_on(tmp_path: Path) -> None:
    model, opt = trained(LINE, [Shard(0)])
    dtorch.save({"model": model, "optimizer": opt}, tmp_path / "x")
    theirs = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    opt2 = torch.optim.AdamW(theirs.parameters(), lr=0.5)
    dtorch.load(tmp_path / "x", into={"model": theirs})
    found = dtorch.load(tmp_path / "x", device_mesh=ONE)
    opt2.load_state_dict(plain(found["optimizer"]))
    step(model, opt, 3)
    step(theirs, opt2, 3)
    for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.detach().to_torch(), q.detach())


def test_generators_go_on(tmp_path: Path) -> None:
    dtorch.manual_seed(5)
    g = torch.Generator().manual_seed(6)
    dtorch.save({"here": g.get_state(), "there": dtorch.get_rng_state()}, tmp_path / "x")
    expected = dtorch.randn(3).to_torch(), torch.randn(3, generator=g)
    found = dtorch.load(tmp_path / "x")
    g.set_state(found["here"])
    dtorch.set_rng_state(found["there"])
    assert equal((dtorch.randn(3).to_torch(), torch.randn(3, generator=g)), expected)


POOL = """
    import sys, torch, dtorch
    from dtorch import Replicate, Shard, init_device_mesh
    dtorch.configure(cpu_executors={n})
    mesh = init_device_mesh("cpu", {n})
    whole = torch.arange(77.0).reshape(7, 11)
    if {save}:
        dtorch.save({{"w": dtorch.distribute_tensor(whole, mesh, [Shard(1)]), "n": {n}}}, {path!r}, format={format!r})
    else:
        found = dtorch.load({path!r}, device_mesh=mesh, placements=[Shard(0)])
        assert torch.equal(found["w"].to_torch(), whole) and found["n"] == 3
"""


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_a_pool_of_another_size_reads_it(tmp_path: Path, format: str) -> None:
    for n, save in ((3, True), (1, False), (5, False)):
        run_body(POOL.format(n=n, save=save, path=str(tmp_path / "x"), format=format))


# -- without waiting --------------------------------------------------------------------------------------------------


@LOOPS
def test_the_loop_and_the_training_go_on(tmp_path: Path, loop: str) -> None:
    async def main() -> None:
        t = on(torch.zeros(300, 300), LINE, [Shard(0)])
        with dtorch.aio.strict():
            saves = []
            for n in range(4):
                # Asked for now; what is issued behind it does not show.
                saves.append(dtorch.aio.save({"t": t, "n": n}, tmp_path / f"{n}", format=["safetensors", "dcp"][n % 2]))
                t += 1
            with dtorch.no_grad():
                t.fill_(99)
            assert [await save for save in saves] == [None] * 4
            await dtorch.aio.save({"t": t, "n": [4]}, tmp_path / "4.pt")
            with pytest.raises(TypeError, match=r"m is a torch\.nn\.modules\.linear\.Linear"):
                dtorch.aio.save({"m": torch.nn.Linear(1, 1)}, tmp_path / "5.pt")
            for n in range(4):
                found = await dtorch.aio.load(tmp_path / f"{n}", device_mesh=LINE, placements=[Shard(1)])
                assert found["n"] == n and equal(await found["t"], torch.full((300, 300), float(n)))
            found = await dtorch.aio.load(tmp_path / "4.pt")
            assert equal(found, {"t": torch.full((300, 300), 99.0), "n": [4]})
            with pytest.raises(dtorch.BlockingCallError, match=r"Write:  await dtorch.aio.save"):
                dtorch.save({"t": t}, tmp_path / "x")
            with pytest.raises(dtorch.BlockingCallError, match=r"Write:  await dtorch.aio.load"):
                dtorch.load(tmp_path / "0")

    run_on(loop, main)


def test_a_save_that_nobody_awaits_is_made(tmp_path: Path) -> None:
    t = on(value(50, 50), LINE, [Shard(0)])
    dtorch.aio.save({"t": t}, tmp_path / "x")
    deadline = time.monotonic() + 60
    while not (tmp_path / "x").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert equal(plain(dtorch.load(tmp_path / "x")), {"t": value(50, 50)})


def test_a_save_that_the_end_of_the_pool_cuts_short_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    t = on(value(50, 50), LINE, [Shard(0)])
    dtorch.save({"n": 0, "t": t}, tmp_path / "x")
    future = dtorch.aio.save({"n": 1, "t": t}, tmp_path / "x")
    dtorch.shutdown()
    assert [r.getMessage() for r in caplog.records] == [
        f"dtorch.save('{tmp_path}/x') was not done when the pool ended: what was there before may be there still"
    ]
    with contextlib.suppress(dtorch.PoolError):
        future.get()
    assert dtorch.load(tmp_path / "x")["n"] in (0, 1)
    dtorch.save({"n": 2}, tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"] and dtorch.load(tmp_path / "x") == {"n": 2}


def test_saves_to_one_name_end_in_their_order(tmp_path: Path) -> None:
    futures = [
        dtorch.aio.save({"n": n, "t": on(value(9, 2), m, p)}, tmp_path / "x") for n, (m, p) in enumerate(PLACED[:3] * 4)
    ]
    for future in futures:
        future.get()
    assert dtorch.load(tmp_path / "x")["n"] == 11 and os.listdir(tmp_path) == ["x"]


def test_threads_save_and_load_at_once(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def work(k: int) -> None:
        try:
            for n in range(5):
                dtorch.save({"t": on(value(20, 20, seed=n), LINE, [Shard(0)])}, tmp_path / f"{k}")
                found = dtorch.load(tmp_path / f"{k}", device_mesh=LINE, placements=[Shard(1)])
                assert equal(plain(found), {"t": value(20, 20, seed=n)})
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and sorted(os.listdir(tmp_path)) == ["0", "1", "2"]


@pytest.mark.parametrize("format", ["safetensors", "dcp", "x.safetensors", "foreign"])
@pytest.mark.parametrize("loop", ["", "asyncio"])
def test_a_checkpoint_that_is_replaced_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, loop: str
) -> None:
    """It is the one before or the one after, never damaged and never half of each, checksums or none."""
    path = tmp_path / (format if "." in format else "x.safetensors" if format == "foreign" else "x")

    def save(k: float) -> None:
        state = {name: torch.full((300, 3), k) for name in "ab"}
        if format == "foreign":
            save_file(state, tmp_path / "next")
            os.replace(tmp_path / "next", path)
        else:
            dtorch.save(state, path, format="dcp" if format == "dcp" else None)

    assert dtorch.aio.load  # loaded when it is first named
    module = sys.modules["dtorch.aio.checkpoints" if loop else "dtorch.checkpoint.api"]
    real, left = module.load_state, [2, 1]

    def load_state(*args: Any) -> Any:
        """Something replaces it between the headers and the bytes."""
        if left:
            thread = threading.Thread(target=save, args=(float(left.pop()),))  # a loop may run in this one
            thread.start()
            thread.join()
        return real(*args)

    save(0.0)
    monkeypatch.setattr(module, "load_state", load_state)
    into = {name: dtorch.zeros(300, 3, device_mesh=LINE, placements=[Shard(0)]) for name in "ab"}
    if loop:

        async def main() -> None:
            await dtorch.aio.load(path, into=into)

        run_on(loop, main)
    else:
        dtorch.load(path, into=into)
    assert equal(plain(into), {name: torch.full((300, 3), 2.0) for name in "ab"})
    left[:] = range(100)
    with pytest.raises(CheckpointError, match="replaced while it was read"):
        dtorch.load(path, into=into) if not loop else run_on(loop, main)
    assert equal(plain(into), {name: torch.full((300, 3), 2.0) for name in "ab"})


def test_names_as_long_as_a_name_may_be(tmp_path: Path) -> None:
    for name in ("x" * 255, "é" * 127, "字" * 85):
        dtorch.save({"t": torch.ones(2)}, tmp_path / name, format="safetensors")
        dtorch.save({"t": torch.zeros(2)}, tmp_path / name, format="safetensors")
        assert dtorch.load(tmp_path / name)["t"].tolist() == [0, 0]
    assert all(len(os.fsencode(name)) > 250 for name in os.listdir(tmp_path)), os.listdir(tmp_path)


# -- what is refused --------------------------------------------------------------------------------------------------


def refused(call: Any, says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        call()
    assert says in str(caught.value) and "\n" not in str(caught.value), str(caught.value)


@pytest.mark.parametrize("format", FORMATS)
def test_what_does_not_fit_is_named_and_nothing_is_written(tmp_path: Path, format: str) -> None:
    path = named(tmp_path, format)
    dtorch.save(
        {"m": {"w": on(value(4, 3), LINE, [Shard(0)]), "b": value(3)}, "n": 1, "l": [1, 2]}, path, format=format
    )
    b = torch.zeros(3)

    def into(**state: Any) -> Any:
        return lambda: dtorch.load(path, into=state)

    w = on(torch.zeros(4, 3), LINE, [Replicate()])
    refused(
        into(m={"b": b, "w": on(torch.zeros(4, 4), LINE, [Shard(0)])}),
        "m.w: the checkpoint has shape [4, 3], and the state [4, 4]",
    )
    refused(into(m={"b": b, "w": w.double()}), "m.w: the checkpoint has torch.float32, and the state torch.float64")
    refused(into(m={"b": b, "v": w}), "m.v: the checkpoint has no such key")
    refused(into(m={"b": b, "w": 3}), "m.w: the checkpoint has a tensor where the state has a int")
    refused(into(m=w), "m: the checkpoint has a dict where the state has a tensor")
    refused(into(n=b), "n: the checkpoint has the value '1' where the state has a tensor")
    refused(into(n={"b": b}), "n: the checkpoint has the value '1' where the state has a dict")
    refused(into(l=[b]), "l: the checkpoint has a list of 2 where the state has 1")
    refused(into(m=[b]), "m: the checkpoint has a dict where the state has a list")
    refused(into(n=[b]), "n: the checkpoint has the value '1' where the state has a list")
    refused(into(m=torch.nn.Linear(3, 4)), "m.weight: the checkpoint has no such key")
    assert not b.any() and not w.to_torch().any()
    # What the state lacks is passed over.
    assert dtorch.load(path, into={"n": 0}) == {"n": 1}


def test_nothing_of_a_state_is_written_where_a_part_cannot_be_read(tmp_path: Path) -> None:
    whole = {f"{i}": value(200, 300, seed=i) for i in range(8)}
    dtorch.save({k: on(t, LINE, [Shard(0)]) for k, t in whole.items()}, tmp_path / "x")
    last = sorted((tmp_path / "x").glob("*.safetensors"))[-1]
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    into = {k: on(torch.zeros_like(t), LINE, [Shard(1)]) for k, t in whole.items()} | {"plain": torch.zeros(1)}
    del into["plain"]
    refused(lambda: dtorch.load(tmp_path / "x", into=into), "damaged: the checksum of the block at byte")
    assert not any(t.to_torch().any() for t in into.values())
    # A shard that was not asked for is not read.
    first = {"0": into["0"]}
    assert equal(plain(dtorch.load(tmp_path / "x", into=first)), {"0": whole["0"]})


@pytest.mark.parametrize("format", FORMATS)
def test_a_value_that_could_not_be_computed_is_not_saved(tmp_path: Path, format: str) -> None:
    path = named(tmp_path, format)
    dtorch.save({"a": on(value(3), LINE, [Shard(0)])}, path, format=format)
    bad = dtorch.nn.functional.embedding(dtorch.tensor([5]), dtorch.randn(3, 4))
    with pytest.raises(IndexError):
        dtorch.save({"a": on(value(3, seed=1), LINE, [Shard(0)]), "b": bad}, path, format=format)
    assert equal(plain(dtorch.load(path)), {"a": value(3)}) and os.listdir(tmp_path) == [path.name]


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor:UserWarning", "ignore:.*nested tensors:UserWarning")
def test_places_and_states_that_are_refused_at_the_call(tmp_path: Path) -> None:
    t = on(value(3), LINE, [Shard(0)])
    (tmp_path / "file").write_text("x")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "thesis.tex").write_text("x")
    for name in ("no/x", "no/x.pt", "no/x.safetensors"):
        refused(lambda name=name: dtorch.save({"t": t}, tmp_path / name), "does not exist")
    refused(lambda: dtorch.save({"t": t}, tmp_path / "file"), "is a file")
    refused(lambda: dtorch.save({"t": t}, tmp_path / "dir"), "holds 'thesis.tex' and no checkpoint")
    refused(lambda: dtorch.save({"t": t}, "/proc/x"), "cannot be written")
    refused(lambda: dtorch.load(tmp_path / "dir"), "no checkpoint")
    refused(lambda: dtorch.load(tmp_path / "file"), "no checkpoint")
    (tmp_path / "x.pt").write_bytes(b"PK\x03\x04" + bytes(100))
    refused(lambda: dtorch.load(tmp_path / "x.pt"), "no checkpoint, truncated or damaged")
    with pytest.raises(FileNotFoundError):
        dtorch.load(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    for name in (str(tmp_path / "pipe"), "/dev/zero"):
        refused(lambda name=name: dtorch.load(name), "neither a file nor a directory")
    (tmp_path / "pipe").unlink()
    for what, odd in (
        ("of layout torch.sparse_coo", torch.eye(3).to_sparse()),
        ("quantized", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)),
        ("nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    ):
        with pytest.raises(TypeError, match=f"'a.b' is {what}, and a checkpoint holds dense tensors"):
            dtorch.save({"a": {"b": odd}, "t": t}, tmp_path / "x")
    with pytest.raises(TypeError, match=r"a\.b is a set"):
        dtorch.save({"a": {"b": {1}}, "t": t}, tmp_path / "x")
    with pytest.raises(ValueError, match="format='zip': write one of 'safetensors', 'dcp', 'torch'"):
        dtorch.save({"t": t}, tmp_path / "x", format="zip")
    dtorch.shutdown()
    with pytest.raises(dtorch.TensorLostError):
        dtorch.save({"t": t}, tmp_path / "x")
    assert sorted(os.listdir(tmp_path)) == ["dir", "file", "x.pt"]


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    full = tmp_path / "disk"
    full.mkdir()
    body = f"""
        import os, torch, dtorch
        from dtorch import CheckpointError, Shard, init_device_mesh
        dtorch.configure(cpu_executors=2)
        mesh = init_device_mesh("cpu", 2)
        for name, format in (("a", "safetensors"), ("b", "dcp"), ("c.pt", "torch"), ("d.safetensors", None)):
            path = os.path.join({str(full)!r}, name)
            dtorch.save({{"t": dtorch.ones(10, 10, device_mesh=mesh, placements=[Shard(0)])}}, path, format=format)
            for save in (dtorch.save, lambda *a, **k: dtorch.aio.save(*a, **k).get()):
                try:
                    large = dtorch.zeros(1000, 1000, device_mesh=mesh, placements=[Shard(0)])
                    save({{"t": large}}, path, format=format)
                except CheckpointError as error:
                    assert "No space left on device" in str(error) and "\\n" not in str(error), error
                else:
                    raise AssertionError("4 MB fit on a disk of 1 MB")
            found = dtorch.load(path, device_mesh=mesh)["t"]
            assert torch.equal(found.to_torch(), torch.ones(10, 10))
        assert sorted(os.listdir({str(full)!r})) == ["a", "b", "c.pt", "d.safetensors"], os.listdir({str(full)!r})
    """
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(full)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system of 1 MB can be mounted here, which wants root")
    try:
        run_body(body)
    finally:
        subprocess.run(["umount", "-l", str(full)], check=True)


# -- damage, with executors -------------------------------------------------------------------------------------------

FUZZED: dict[str, Any] = {"a": value(40, 30), "b": [filled(torch.bfloat16, 7), {"c": 5}], "d": filled(torch.bool, 3, 3)}


@pytest.mark.parametrize("format", ["safetensors", "dcp", "file", "torch"])
def test_damage_never_becomes_a_value_or_a_crash(tmp_path: Path, format: str) -> None:
    names = {"safetensors": "x", "dcp": "x", "file": "x.safetensors", "torch": "x.pt"}
    whole, path = tmp_path / "whole" / names[format], tmp_path / "damaged" / names[format]
    whole.parent.mkdir()
    path.parent.mkdir()
    state = {"a": on(FUZZED["a"], GRID, [Shard(0), Shard(1)]), "b": [on(FUZZED["b"][0], LINE, [Shard(0)]), {"c": 5}]}
    state["d"] = FUZZED["d"]
    dtorch.save(state, whole, format=None if format == "file" else format)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def fuzz(data: st.DataObject) -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        (shutil.copytree if whole.is_dir() else shutil.copy)(whole, path)
        damaged(path, data)
        try:
            found = dtorch.load(path, device_mesh=LINE, placements=lambda name, shape: [Shard(0)] if shape else None)
        except CheckpointError as error:
            assert "\n" not in str(error)
            return
        assert equal(plain(found), FUZZED)

    pids = client().pool.pids
    fuzz()
    assert equal(plain(dtorch.load(whole, device_mesh=LINE)), FUZZED)
    assert client().pool.pids == pids


# -- whoever dies -----------------------------------------------------------------------------------------------------

SAVER = """
    import itertools, sys, torch, dtorch
    from dtorch import Replicate, Shard, init_device_mesh
    dtorch.configure(cpu_executors=3)
    mesh = init_device_mesh("cpu", 3)
    ts = {{str(i): dtorch.zeros(200, 300, device_mesh=mesh, placements=[[Shard(0), Shard(1), Replicate()][i % 3]])
          for i in range(12)}}
    for n in itertools.count({first}):
        for t in ts.values():
            t.fill_(n)
        print("saving", n, flush=True)
        dtorch.save({{"ts": ts, "n": n}}, {path!r}, format={format!r})
        print("saved", n, flush=True)
"""


def whole_step(path: Path) -> int:
    """The step of the checkpoint at `path`, all of which must be of that step."""
    found = dtorch.load(path, device_mesh=LINE, placements=[Shard(0)] if path.suffix != ".pt" else None)
    assert all((t.to_torch() == found["n"]).all() for t in found["ts"].values())
    return int(found["n"])


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("format", "name"), [("safetensors", "x"), ("dcp", "x"), ("safetensors", "x.safetensors"), ("torch", "x.pt")]
)
def test_a_killed_client_leaves_a_whole_checkpoint(tmp_path: Path, format: str, name: str) -> None:
    rng = random.Random(f"{format} {name}")
    path = tmp_path / name
    first = 0
    for _ in range(3):
        script = textwrap.dedent(SAVER.format(first=first, path=str(path), format=format))
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=env) as process:
            assert process.stdout is not None
            saved, begun = first - 1, first
            lines: Iterator[str] = iter(process.stdout.readline, "")
            for line in itertools.islice(lines, 2 * rng.randint(2, 6) + 1):
                begun = int(line.split()[1])
                saved = begun if line.startswith("saved") else saved
            time.sleep(rng.uniform(0, 0.05))
            process.kill()
            rest = process.stdout.read()
        for word, n in re.findall(r"(saving|saved) (\d+)", rest):
            begun, saved = max(begun, int(n)), int(n) if word == "saved" else saved
        # Its executors may live for a moment, and put the last one in its place.
        time.sleep(2)
        assert saved <= whole_step(path) <= begun
        first = begun + 1
    t = on(torch.zeros(3), LINE, [Shard(0)])
    dtorch.save({"ts": {"t": t}, "n": 0}, path, format=format)
    assert os.listdir(tmp_path) == [name] and whole_step(path) == 0


KILLED = """
    import os, random, signal, threading, time, torch, dtorch
    from dtorch import Replicate, Shard, init_device_mesh
    from dtorch.runtime.client import client
    dtorch.configure(cpu_executors=3)
    mesh = init_device_mesh("cpu", 3)
    rng = random.Random({format!r})
    make = lambda n: {{str(i): dtorch.full((200, 300), n, dtype=torch.float32, device_mesh=mesh,
                      placements=[[Shard(0), Shard(1), Replicate()][i % 3]]) for i in range(12)}}
    path, n, deaths, took, last = {path!r}, 0, 0, 0.05, 0
    dtorch.save({{"ts": make(0), "n": 0}}, path, format={format!r})
    for attempt in range(5):
        pids = [int(p) for p in client().pool.pids.values()]
        killer = threading.Timer(rng.uniform(0, 1.5 * took), os.kill, (rng.choice(pids), signal.SIGKILL))
        n += 1
        state = {{"ts": make(n), "n": n}}
        list(state["ts"].values())[-1].to_torch()
        killer.start()
        began = time.monotonic()
        try:
            dtorch.save(state, path, format={format!r})
            took, saved = time.monotonic() - began, True
        except dtorch.ExecutorDiedError:
            deaths, saved = deaths + 1, False
        killer.join()
        dtorch.restart()
        found = dtorch.load(path, device_mesh=mesh, placements=[Shard(0)])
        # A death after the commit and before the answer: the new one is there, and whole.
        assert found["n"] == n or (not saved and found["n"] == last), (found["n"], n, saved)
        last = found["n"]
        assert all((t.to_torch() == found["n"]).all() for t in found["ts"].values())
    dtorch.save({{"ts": make(n), "n": n}}, path, format={format!r})
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)], os.listdir(os.path.dirname(path))
    print("deaths", deaths)
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_a_killed_executor_leaves_a_whole_checkpoint(tmp_path: Path, format: str) -> None:
    done = run_body(KILLED.format(path=str(tmp_path / "x"), format=format), timeout=220)
    assert int(re.search(r"deaths (\d+)", done.stdout)[1]) >= 1  # type: ignore[index]


def test_leftovers_of_this_process_are_not_touched_while_in_use(tmp_path: Path) -> None:
    other = files.stage(tmp_path / "x", is_directory=True)
    dtorch.save({"t": on(value(3), LINE, [Shard(0)])}, tmp_path / "x")
    assert sorted(os.listdir(tmp_path)) == sorted(["x", Path(other.path).name])
    other.close()
    dtorch.save({"t": on(value(3), LINE, [Shard(0)])}, tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"]
