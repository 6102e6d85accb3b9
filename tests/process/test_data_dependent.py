"""Operators whose result, or its shape, is known with the values only: they wait, and work on any placements."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

import anyio
import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh
from dtorch.runtime import blocking

from .test_async import slow
from .traps import LAYOUTS, Function, claim, place, plain_of, same, summands, writes

SHAPED: dict[str, Function] = {
    "nonzero": torch.nonzero,
    "nonzero as_tuple": lambda t: t.nonzero(as_tuple=True),
    "nonzero of none": lambda t: (t > 99).nonzero(),
    "nonzero of a slice": lambda t: t[:, 1:].nonzero(),
    "argwhere": torch.argwhere,
    "where": lambda t: torch.where(t > 1),
    "masked_select": lambda t: torch.masked_select(t, t > 1),
    "masked_select of rows": lambda t: t.masked_select(torch.tensor([True, False, True, False])),
    "get by a mask": lambda t: t[t > 1],
    "get by a plain mask": lambda t: t[torch.tensor([[True, False, True, False]]).expand(t.shape)],
    "get rows by a mask": lambda t: t[t[:, 0] > 0],
    "get columns by a mask": lambda t: t[:, t[0] > 0],
    "get by a mask and a row": lambda t: t[t[:, 0] > 0, 1],
    "get by a mask of none": lambda t: t[t > 99],
    "get by a list": lambda t: t[[True] + [False] * (t.shape[0] - 1)],
    "unique": torch.unique,
    "unique unsorted": lambda t: torch.unique(t, sorted=False).sort().values,
    "unique with all": lambda t: torch.unique(t, return_inverse=True, return_counts=True),
    "unique of rows": lambda t: torch.unique(t, dim=0, return_inverse=True, return_counts=True),
    "unique of columns": lambda t: t.unique(dim=1),
    "unique_consecutive": lambda t: torch.unique_consecutive(t, return_inverse=True, return_counts=True),
    "unique_consecutive of columns": lambda t: t.unique_consecutive(dim=1),
    "repeat_interleave": lambda t: torch.repeat_interleave(t, t[:, 0].abs().long(), dim=0),
    "repeat_interleave of all": lambda t: torch.repeat_interleave(t, t.abs().long().flatten()),
    "repeat_interleave of repeats": lambda t: torch.repeat_interleave(t[:, 0].abs().long()),
    "repeat_interleave, size known": lambda t: t[:1].repeat_interleave(torch.tensor([2]), 0, output_size=2),
    "bincount": lambda t: torch.bincount(t.abs().long().flatten()),
    "bincount weighted": lambda t: torch.bincount(t.abs().long().flatten(), t.flatten(), minlength=12),
    "histc": lambda t: t.histc(4),
    "histogram": lambda t: torch.histogram(t, 3),
    "histogramdd": lambda t: torch.histogramdd(t[:, :2], [2, 3]),
    "combinations": lambda t: torch.combinations(t[:, 0]),
    "combinations with replacement": lambda t: torch.combinations(t[:, 0], 2, with_replacement=True),
    "tensor_split by a tensor": lambda t: t.tensor_split(torch.tensor([1, 2])),
    "one_hot": lambda t: torch.nn.functional.one_hot(t.abs().long()),
    "take_along nonzero": lambda t: t[t.nonzero(as_tuple=True)],
    "slice by an item": lambda t: t[: int((t > 1).sum())],
    "range by a tensor": lambda t: torch.arange(int(t.abs().max())),
    "trapezoid by size": lambda t: t.new_zeros(int(t.max())),
}  # fmt: skip
VALUES: dict[str, Function] = {
    "item": lambda t: t.sum().item(),
    "tolist": lambda t: t.tolist(),
    "bool": lambda t: bool(t.sum() > 1),
    "if": lambda t: 1 if (t > 1).any() else 2,
    "float": lambda t: float(t.sum()),
    "int": lambda t: int(t.sum()),
    "index": lambda t: [1, 2, 3][t.abs().long().min()],
    "format": lambda t: f"{t.sum():.3f}",
    "in": lambda t: 2.0 in t,
    "not in": lambda t: 99.0 in t,
    "len": len,
    "iterate": lambda t: [x.sum().item() for x in t],
    "equal": lambda t: torch.equal(t, t * 1),
    "not equal": lambda t: torch.equal(t, t + 1),
    "equal to plain": lambda t: torch.equal(t, torch.zeros(t.shape, dtype=t.dtype)),
    "equal of other shapes": lambda t: torch.equal(t, t[:1, :1]),
    "allclose": lambda t: torch.allclose(t, t + 1e-12),
    "allclose not": lambda t: torch.allclose(t, t + 1),
    "isclose": lambda t: torch.isclose(t, t + 1e-12),
    "is_nonzero": lambda t: torch.is_nonzero(t.sum()),
    "all of a comparison": lambda t: (t == t).all().item(),
    "max as a number": lambda t: max(t.flatten()).item(),
    "sorted": lambda t: [x.item() for x in sorted(t.flatten())],
    "numpy": lambda t: t.numpy().tolist(),
}
WRITES: dict[str, Function] = {
    "set a number by a mask": lambda t: t.__setitem__(t > 1, 0.0),
    "set a tensor by a mask": lambda t: t.__setitem__(t > 1, torch.arange(float((t > 1).sum().item()), dtype=t.dtype)),
    "set rows by a mask": lambda t: t.__setitem__(t[:, 0] > 0, torch.ones(4, dtype=t.dtype)),
    "set by a mask and a column": lambda t: t.__setitem__((t[:, 0] > 0, 1), 5.0),
    "set by a mask of none": lambda t: t.__setitem__(t > 99, 5.0),
    "add by a mask": lambda t: t.index_put_((t > 1,), torch.tensor(1.0, dtype=t.dtype), accumulate=True),
    "+= by a mask": lambda t: t.__setitem__(t > 1, t[t > 1] + 1),
    "masked_fill_": lambda t: t.masked_fill_(t > 1, 7.0),
    "masked_scatter_": lambda t: t.masked_scatter_(t > 1, torch.arange(40.0, dtype=t.dtype)),
    "set where": lambda t: t.__setitem__(torch.where(t > 1), 3.0),
}
SOME = ("S0", "S1", "S1,S0")


def numbers(n: int = 5) -> torch.Tensor:
    """Small numbers, with repetitions and zeros, whose fractions do not round when they are added."""
    found = torch.randint(-3, 5, (n, 4), generator=torch.Generator().manual_seed(n)).double()
    found[0] = torch.tensor([2.0, 0, 0.5, 2])
    return found


def placed(n: int) -> list[tuple[str, dtorch.Tensor]]:
    mesh = init_device_mesh("cpu", (2,))
    made = [(layout, place(numbers(n), layout)) for layout in (SOME if n > 1 else SOME[:2])]
    made.append(("one", dtorch.tensor(numbers(n))))
    made.append(("R", dtorch.distribute_tensor(numbers(n), mesh, [Replicate()])))
    made += [(kind, summands(numbers(n), mesh, kind)) for kind in ("sum", "max") if n > 1]
    return made


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("n", [5, 1])
def test_what_is_known_with_the_values_only(n: int) -> None:
    wrong = []
    for where, ours in placed(n):
        for name, f in {**SHAPED, **VALUES}.items():
            try:
                claim(f, numbers(n), ours)
            except AssertionError as error:
                wrong.append(f"{name} on {where}: {error}")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong)


def test_they_need_no_leave_to_move() -> None:
    """Waiting for a value gathers it as item() does, in strict mode too."""
    for name in ("nonzero", "argwhere", "where", "masked_select", "get by a mask", "unique", "unique with all",
                 "unique of rows", "unique_consecutive"):  # fmt: skip
        for where, ours in placed(5):
            if not ours._spec.is_partial and (where in ("one", "R") or "get" not in name):
                assert claim(SHAPED[name], numbers(), ours), (name, where)


def test_writes_by_masks() -> None:
    for layout in (*SOME, "R"):
        for name, f in WRITES.items():
            plain = numbers()
            ours = dtorch.tensor(plain) if layout == "R" else place(plain, layout)
            with dtorch.auto_redistribute():
                try:
                    f(ours)
                except dtorch.PlacementError:
                    same(ours, plain)
                    continue
            f(plain)
            try:
                same(ours, plain)
            except AssertionError as error:
                raise AssertionError(f"{name} on {layout}") from error


BACKWARD: dict[str, Function] = {
    "masked_select": lambda t: torch.masked_select(t, t > 1),
    "get by a mask": lambda t: t[t > 1] ** 2,
    "get rows by a mask": lambda t: t[t[:, 0] > 0],
    "get by nonzero": lambda t: t[t.nonzero(as_tuple=True)],
    "repeat_interleave": lambda t: t.repeat_interleave(torch.arange(5), 0) ** 2,
    "repeat_interleave of all": lambda t: t.repeat_interleave(torch.arange(20)),
    "masked_fill": lambda t: t.masked_fill(t > 1, 0.0) ** 2,
    "masked_scatter": lambda t: t.masked_scatter(t > 1, torch.arange(40.0, dtype=t.dtype)) ** 2,
    "masked_scatter of it": lambda t: torch.zeros_like(t).masked_scatter(t > 1, t * 2),
    "set by a mask": lambda t: _set(t * 2, t > 1, 3.0),
    "set a tensor by a mask": lambda t: _set(t * 2, t > 1, (t * 3)[t > 1]),
    "where": lambda t: torch.where(t > 1, t * 2, t * 3),
    "combinations": lambda t: torch.combinations(t[:, 0]) ** 2,
    "unique, inverse": lambda t: t.flatten()[torch.unique(t, return_inverse=True)[1].flatten()],
}


def _set(t: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
    t[mask] = value
    return t


@pytest.mark.parametrize("layout", [*SOME, "R"])
def test_backward(layout: str) -> None:
    for name, f in BACKWARD.items():
        plain = numbers().requires_grad_()
        ours = dtorch.tensor(numbers()) if layout == "R" else place(numbers(), layout)
        ours.requires_grad_()
        f(plain).sum().backward()
        with dtorch.auto_redistribute():
            try:
                f(ours).sum().backward()
            except dtorch.PlacementError as error:
                assert writes(error), name
                continue
        assert ours.grad is not None and plain.grad is not None
        assert ours.grad.placements == ours.placements, name
        try:
            same(ours.grad, plain.grad)
        except AssertionError as error:
            raise AssertionError(f"{name} on {layout}") from error


IN_A_LOOP: dict[str, tuple[str, Function]] = {
    "nonzero()": ("await dtorch.aio.nonzero(t, …)", lambda t: torch.nonzero(t)),
    "nonzero(), by where": ("await dtorch.aio.nonzero(t, …)", lambda t: torch.where(t > 0)),
    "nonzero(), by argwhere": ("await dtorch.aio.nonzero(t, …)", lambda t: torch.argwhere(t)),
    "masked_select()": ("await dtorch.aio.masked_select(t, …)", lambda t: torch.masked_select(t, t > 0)),
    "t[mask]": ("t[await mask]", lambda t: t[t > 0]),
    "t[mask] = value": ("t[await mask] = value", lambda t: _set(t, t > 0, torch.ones(4))),
    "unique()": ("await dtorch.aio.unique(t, …)", lambda t: torch.unique(t)),
    "unique(), of rows": ("await dtorch.aio.unique(t, …)", lambda t: torch.unique(t, dim=0)),
    "unique_consecutive()": ("await dtorch.aio.unique_consecutive(t, …)", lambda t: torch.unique_consecutive(t)),
    "bincount()": ("await dtorch.aio.bincount(t, …)", lambda t: torch.bincount(t.long())),
    "repeat_interleave()": ("t.repeat_interleave(await repeats)", lambda t: torch.repeat_interleave(t, t.long())),
    "histogramdd()": ("await dtorch.aio.histogramdd(t, …)", lambda t: torch.histogramdd(t.reshape(2, 2), [2, 2])),
    "equal()": ("await dtorch.aio.equal(a, b)", lambda t: torch.equal(t, t)),
    "allclose()": ("await dtorch.aio.allclose(a, b)", lambda t: torch.allclose(t, t)),
    "item()": ("(await t).item()", lambda t: t.sum().item()),
    "item(), of is_nonzero": ("(await t).item()", lambda t: torch.is_nonzero(t.sum())),
    "tolist()": ("(await t).tolist()", lambda t: t.tolist()),
    "__bool__()": ("if await t:", lambda t: bool(t.sum())),
    "__contains__()": ("x in await t", lambda t: 7.0 in t),
}


def _told(f: Function, mesh: dtorch.DeviceMesh) -> list[str]:
    """What warnings say of ``f(t)`` where `t` is still on its way; a busy machine may need a longer one."""
    for seconds in (0.01, 0.1, 0.5):
        t = slow(mesh, seconds).redistribute(placements=[Replicate()])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            f(t)
        told = [str(w.message) for w in caught if w.category is dtorch.BlockingCallWarning]
        if told:
            return told
    return []


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_in_a_loop_each_says_what_to_await(backend: str) -> None:
    mesh = init_device_mesh("cpu", (2,))

    async def main() -> None:
        for called, (instead, f) in IN_A_LOOP.items():
            told = _told(f, mesh)
            assert len(told) == 1, (called, told)
            assert told[0].startswith(called.partition(",")[0] + " waits for a value"), (called, told)
            assert f"  Write:  {instead}\n" in told[0], (called, told)

    blocking._told.clear()
    anyio.run(main, backend=backend)


def test_in_strict_mode_each_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))

    async def main() -> None:
        token = blocking.strict.set(True)
        for _, f in IN_A_LOOP.values():
            with pytest.raises(dtorch.BlockingCallError, match="  Write:  "):
                f(slow(mesh, 0.01).redistribute(placements=[Replicate()]))
        blocking.strict.reset(token)

    asyncio.run(main())


def test_what_the_warnings_say_to_write_works_and_does_not_warn() -> None:
    async def main() -> None:
        t = place(numbers(), "S0")
        mask = t > 1
        assert torch.equal(await (await dtorch.aio.nonzero(t)), numbers().nonzero())
        assert torch.equal(await (await dtorch.aio.unique(t)), numbers().unique())
        assert await dtorch.aio.equal(t, t * 1) and not await dtorch.aio.allclose(t, t + 1)
        with dtorch.auto_redistribute():
            picked = t[await mask]
            assert isinstance(picked, dtorch.Tensor)
            assert torch.equal(await picked, numbers()[numbers() > 1])
            repeated = t.repeat_interleave(await t[:, 0].abs().long(), 0)
            wanted = numbers()
            assert torch.equal(await repeated, wanted.repeat_interleave(wanted[:, 0].abs().long(), 0))
        whole = t.redistribute(placements=[Replicate()])
        whole[await mask] = torch.zeros(int((numbers() > 1).sum()), dtype=torch.float64)
        assert torch.equal(await whole, numbers().masked_fill(numbers() > 1, 0))

    with warnings.catch_warnings():
        warnings.simplefilter("error", dtorch.BlockingCallWarning)
        asyncio.run(main())


def test_a_result_of_unknown_size_is_a_tensor_of_the_mesh_like_any_other() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    d = dtorch.distribute_tensor(numbers(), mesh, [Shard(0), Shard(1)])
    found = d.nonzero()
    assert isinstance(found, dtorch.Tensor) and found.device_mesh == mesh
    assert found.placements == [Replicate(), Replicate()]
    cut = found.redistribute(placements=[Shard(0), Shard(0)])
    same(cut.sum(0), numbers().nonzero().sum(0))
    assert plain_of(torch.masked_select(d, d > 99)).shape == (0,)
    partial = summands(numbers(), mesh)
    assert partial.placements == [Partial(), Partial()]
    same(partial.nonzero(), numbers().nonzero())
    assert set(LAYOUTS) >= set(SOME)
