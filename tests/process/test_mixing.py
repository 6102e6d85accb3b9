"""Plain tensors, numpy arrays and numbers beside dtorch tensors: constants, with torch's values and torch's dtypes."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Replicate, Shard, init_device_mesh
from dtorch.placement import Placement

WHERE: dict[str, tuple[int | tuple[int, ...], list[Placement]]] = {
    "one": (1, [Replicate()]),
    "replicated": (2, [Replicate()]),
    "rows": (2, [Shard(0)]),
    "columns": (2, [Shard(1)]),
    "both": ((2, 2), [Shard(0), Shard(1)]),
}

# Takes t, the dtorch tensor (5, 3), float32; p, a plain one; n, an array; i, m and k, indices and a mask of rows, as
# arrays, and plain integers.
Call = Callable[..., Any]


def _set(target: Any, index: Any, value: Any) -> Any:
    target[index] = value
    return target


BINARY = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
    operator.lt,
    operator.ge,
    operator.eq,
    operator.ne,
]
OTHERS: dict[str, Callable[[], Any]] = {
    "plain": lambda: torch.arange(1.0, 16.0).reshape(5, 3),
    "plain row": lambda: torch.arange(1.0, 4.0),
    "plain column": lambda: torch.arange(1.0, 6.0)[:, None],
    "plain float64": lambda: torch.arange(1.0, 4.0, dtype=torch.float64),
    "plain int64": lambda: torch.arange(1, 4),
    "plain bool": lambda: torch.tensor([True, True, True]),
    "plain bfloat16": lambda: torch.arange(1.0, 4.0, dtype=torch.bfloat16),
    "plain 0-dim float64": lambda: torch.tensor(2.0, dtype=torch.float64),
    "plain 0-dim int64": lambda: torch.tensor(3),
    "array float32": lambda: np.arange(1, 16, dtype=np.float32).reshape(5, 3),
    "array float64": lambda: np.arange(1.0, 4.0),
    "array int64": lambda: np.arange(1, 4),
    "array 0-dim": lambda: np.array(2.0),
    "np.float32": lambda: np.float32(2),
    "np.float64": lambda: np.float64(2),
    "np.int64": lambda: np.int64(2),
    "np.int32": lambda: np.int32(2),
    "np.bool": lambda: np.bool_(True),
    "int": lambda: 2,
    "float": lambda: 2.5,
    "bool": lambda: True,
    "complex": lambda: 1 + 2j,
    "list": lambda: [1.0, 2.0, 3.0],
}

CALLS: dict[str, Call] = {
    # constants on either side
    "where plain": lambda t, p, n, i, m, k: torch.where(t > 0, p, t),
    "where plain condition": lambda t, p, n, i, m, k: torch.where(p > 0, t, 0.5),
    "where number": lambda t, p, n, i, m, k: torch.where(t > 0, t, 0),
    "stack": lambda t, p, n, i, m, k: torch.stack([t, p]),
    "stack plain first": lambda t, p, n, i, m, k: torch.stack([p, t], 1),
    "cat": lambda t, p, n, i, m, k: torch.cat([p, t, p]),
    "cat of dtypes": lambda t, p, n, i, m, k: torch.cat([p.double(), t, k[:, None].expand(5, 3)]),
    "hstack": lambda t, p, n, i, m, k: torch.hstack([p, t]),
    "maximum": lambda t, p, n, i, m, k: torch.maximum(p, t),
    "clamp": lambda t, p, n, i, m, k: torch.clamp(t, min=p - 1, max=p + 1),
    "lerp": lambda t, p, n, i, m, k: torch.lerp(p, t, 0.25),
    "addcmul": lambda t, p, n, i, m, k: torch.addcmul(p, t, p, value=2),
    "matmul": lambda t, p, n, i, m, k: t @ p.T,
    "matmul plain first": lambda t, p, n, i, m, k: p.T @ t,
    "rmatmul array": lambda t, p, n, i, m, k: torch.from_numpy(n).T @ t,
    "einsum": lambda t, p, n, i, m, k: torch.einsum("ij,kj->ik", p, t),
    "linear": lambda t, p, n, i, m, k: F.linear(p, t, p[:, 0]),
    "equal": lambda t, p, n, i, m, k: (torch.equal(p, t), torch.equal(t, t.clone())),
    "allclose": lambda t, p, n, i, m, k: (torch.allclose(p, t), torch.allclose(p, p + 0 * t)),
    "foreach": lambda t, p, n, i, m, k: torch._foreach_add([t, t], [p, p]),
    "cross entropy": lambda t, p, n, i, m, k: F.cross_entropy(t, k % 3),
    "embedding": lambda t, p, n, i, m, k: F.embedding(k, t),
    "embedding of a plain table": lambda t, p, n, i, m, k: F.embedding((t[:, 0] > 0).long(), p),
    "type_as": lambda t, p, n, i, m, k: (t.type_as(k), t.to(k)),
    "expand_as": lambda t, p, n, i, m, k: p[:1].expand_as(t) + t,
    # read by index
    "array of indices": lambda t, p, n, i, m, k: t[i],
    "array of indices, columns": lambda t, p, n, i, m, k: t[:, i[:2] % 3],
    "two arrays": lambda t, p, n, i, m, k: t[i, i % 3],
    "plain indices": lambda t, p, n, i, m, k: t[torch.from_numpy(i)],
    "list": lambda t, p, n, i, m, k: t[[0, 2, 4]],
    "np.int64": lambda t, p, n, i, m, k: (t[np.int64(1)], t[-1, np.int64(2)]),
    "slice of np.int64": lambda t, p, n, i, m, k: t[np.int64(1) : np.int64(4)],
    "array mask": lambda t, p, n, i, m, k: t[m],
    "plain mask": lambda t, p, n, i, m, k: t[torch.from_numpy(m)],
    "full mask": lambda t, p, n, i, m, k: (t[p > 3], t[t > 0]),
    "plain by indices": lambda t, p, n, i, m, k: p[(t[:, 0] > 0).long()],
    "plain by mask": lambda t, p, n, i, m, k: p[t > 0],
    "index_select": lambda t, p, n, i, m, k: (
        t.index_select(0, torch.from_numpy(i)),
        p.index_select(0, t[:, 0].long() * 0),
    ),
    "gather": lambda t, p, n, i, m, k: (t.gather(0, k[None, :3] % 5), p.gather(1, (t > 0).long())),
    "take": lambda t, p, n, i, m, k: t.take(torch.from_numpy(i)),
    "masked_fill": lambda t, p, n, i, m, k: (t.masked_fill(p > 3, 0.5), p.masked_fill(t > 0, 0.5)),
    "masked_select": lambda t, p, n, i, m, k: (t.masked_select(p > 3), p.masked_select(t > 0)),
    # written by index
    "set by plain mask": lambda t, p, n, i, m, k: _set(t, torch.from_numpy(m), p[torch.from_numpy(m)]),
    "set by array mask": lambda t, p, n, i, m, k: _set(t, m, 7),
    "set by full mask": lambda t, p, n, i, m, k: _set(t, p > 3, -1.0),
    "set by own mask": lambda t, p, n, i, m, k: _set(t, t > 0, p[0, 0]),
    "set row to plain": lambda t, p, n, i, m, k: _set(t, slice(1, 3), p[:2]),
    "set column to number": lambda t, p, n, i, m, k: _set(t, (slice(None), 1), np.float64(5)),
    "index_put": lambda t, p, n, i, m, k: t.index_put((torch.from_numpy(i),), p[0], accumulate=True),
    "scatter": lambda t, p, n, i, m, k: t.scatter(0, k[None, :3] % 5, p),
    "index_add": lambda t, p, n, i, m, k: t.index_add(0, torch.from_numpy(i), p[: len(i)]),
    # in place on dtorch tensors
    "iadd plain": lambda t, p, n, i, m, k: operator.iadd(t, p),
    "imul array": lambda t, p, n, i, m, k: t.mul_(torch.from_numpy(n)),
    "isub number": lambda t, p, n, i, m, k: operator.isub(t, np.float32(2)),
    "copy_": lambda t, p, n, i, m, k: t.copy_(p),
    "copy_ of ints": lambda t, p, n, i, m, k: t.copy_(k[:3]),
    "masked_fill_": lambda t, p, n, i, m, k: t.masked_fill_(p > 3, p[0, 0]),
    # in place on plain tensors, which stay plain
    "plain iadd": lambda t, p, n, i, m, k: operator.iadd(p, t),
    "plain mul_": lambda t, p, n, i, m, k: p.mul_(t),
    "plain copy_": lambda t, p, n, i, m, k: p.copy_(t),
    "plain set": lambda t, p, n, i, m, k: _set(p, 0, t[1]),
    "plain set by indices": lambda t, p, n, i, m, k: _set(p, torch.from_numpy(i), t[: len(i)]),
    "plain set by mask": lambda t, p, n, i, m, k: _set(p, t > 0, 0.25),
    "plain addmm_": lambda t, p, n, i, m, k: p[:3].addmm_(p.T, t),
    "plain out": lambda t, p, n, i, m, k: torch.add(t, 1, out=p),
    "plain view add_": lambda t, p, n, i, m, k: (p[:, 1].add_(t[:, 0]), p),
    # made from both
    "tensor of tensors": lambda t, p, n, i, m, k: torch.tensor([t[0, 0].item(), 1.0]),
    "numpy of it": lambda t, p, n, i, m, k: torch.from_numpy(np.array(t)),
}
# The result is a plain tensor: what was written is, or it was made by a call that reads.
PLAIN = frozenset(name for name in CALLS if name.startswith(("plain ", "tensor of", "numpy"))) - {
    "plain indices",
    "plain mask",
    "plain by indices",
    "plain by mask",
}


def given() -> tuple[torch.Tensor, ...]:
    """t, p, n, i, m, k, all plain."""
    g = torch.Generator().manual_seed(4)
    t = torch.randn(5, 3, generator=g)
    p = torch.arange(1.0, 16.0).reshape(5, 3) / 3
    return (
        t,
        p,
        p.numpy() + 1,
        np.array([0, 2, 4]),
        np.array([True, False, True, True, False]),
        torch.tensor([0, 2, 4, 1, 3]),
    )  # type: ignore[return-value]


def spread(t: torch.Tensor, where: str) -> dtorch.Tensor:
    shape, placements = WHERE[where]
    return dtorch.distribute_tensor(t, init_device_mesh("cpu", shape), placements)


def told(call: Callable[[], Any]) -> Any:
    """The result, or what was raised, in the call or when its value was asked for."""
    try:
        result = call()
        if isinstance(result, dtorch.Tensor):
            result.to_torch()
        return result
    except (dtorch.PlacementError, dtorch.DeviceMeshError):
        raise
    except Exception as e:
        return e


def same(ours: Any, theirs: Any, plain: bool = False) -> None:
    if isinstance(theirs, (tuple, list)):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            same(a, b, plain)
    elif isinstance(theirs, torch.Tensor):
        assert isinstance(ours, dtorch.Tensor) is not plain, type(ours)
        value = ours.to_torch() if isinstance(ours, dtorch.Tensor) else ours
        assert value.dtype is theirs.dtype and value.shape == theirs.shape
        torch.testing.assert_close(value, theirs, equal_nan=True)
    elif isinstance(theirs, np.ndarray):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    elif isinstance(theirs, Exception):
        assert isinstance(ours, type(theirs)), repr(ours)
    else:
        assert ours == theirs


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("other", OTHERS)
def test_operators(other: str, where: str) -> None:
    """Both orders, in strict mode: a constant never has to move. Where torch raises, so does dtorch."""
    for dtype in (torch.float32, torch.int64):
        base = (given()[0].abs() * 4 + 1).to(dtype)
        t = spread(base, where)
        for op in BINARY:
            for ours, theirs in (
                (lambda: op(t, OTHERS[other]()), lambda: op(base, OTHERS[other]())),  # noqa: B023
                (lambda: op(OTHERS[other](), t), lambda: op(OTHERS[other](), base)),  # noqa: B023
            ):
                wanted, got = told(theirs), told(ours)
                try:
                    same(got, wanted)
                except AssertionError as e:
                    raise AssertionError(f"{op.__name__} of {dtype} and {other}: {got!r} for {wanted!r}") from e


@pytest.mark.parametrize("where", WHERE)
def test_arrays_that_torch_itself_refuses(where: str) -> None:
    """torch takes no array in ``where``, nor as the value of an assignment; dtorch takes it as a constant."""
    base, p, n, i, _, _ = given()
    t, array = spread(base, where), torch.from_numpy(n)
    same(dtorch.where(t > 0, n, 1.0), torch.where(base > 0, array, 1.0))
    same(dtorch.where(t > 0, n, t), torch.where(base > 0, array, base))
    same(dtorch.where(p.numpy() > 3, t, other=n), torch.where(p > 3, base, array))
    t[:] = n
    same(t, array)
    t[t > 2] = np.array(0.5)
    same(t, torch.where(array > 2, 0.5, array))
    t = spread(base, where)
    t[p > 3] = -1.0
    same(t, base.masked_fill(p > 3, -1.0))
    if where in ("one", "replicated"):
        t[i], t[0] = n[i], n[1]
        base[p > 3] = -1.0
        base[i], base[0] = array[i], array[1]
        same(t, base)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("where", WHERE)
def test_calls(where: str) -> None:
    wrong = []
    for name, call in CALLS.items():
        theirs, ours = given(), given()
        t = spread(ours[0], where)
        try:
            wanted = call(*theirs)
            with dtorch.auto_redistribute():
                try:
                    got = call(t, *ours[1:])
                except dtorch.PlacementError:
                    # A write in place that would have to move what it writes; nothing was written.
                    if not name.startswith("set") or where not in ("rows", "columns", "both"):
                        raise
                    same(t, given()[0])
                    continue
                same(got, wanted, plain=name in PLAIN)
                same(t, theirs[0])
            same(ours[1], theirs[1], plain=True)
        except (AssertionError, Exception) as e:
            wrong.append(f"{name}: {type(e).__name__}: {e}")
    assert not wrong, f"{len(wrong)} on {where}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("where", WHERE)
def test_numbers_and_arrays_of_it(where: str) -> None:
    base = given()[0]
    t = spread(base, where)
    with dtorch.auto_redistribute():
        assert float(t[0, 1]) == float(base[0, 1])
        assert int(t.sum()) == int(base.sum())
        assert bool(t.any()) is True
        assert complex(t[0, 1]) == complex(base[0, 1])
        assert math.floor(t[0, 1].item()) == math.floor(base[0, 1].item())
        assert [*range(spread(torch.tensor([[3]]), where)[0, 0])] == [0, 1, 2]
        assert len(t) == 5
        assert f"{t[0, 1]:.3f}" == f"{base[0, 1]:.3f}"
        assert (base[0, 0] in t) is True
        for row, wanted in zip(t, base, strict=True):
            same(row, wanted)
        same(np.asarray(t), base.numpy())
        same(np.array(t, dtype=np.float64), base.double().numpy())
        own = np.array(t)
        own += 1
        same(own, base.numpy() + 1)
        same(t, base)
        same(np.asarray(t.long()), base.long().numpy())
        same(np.stack([t, base]), np.stack([base.numpy(), base.numpy()]))
        same(np.concatenate([t, t]), np.concatenate([base.numpy(), base.numpy()]))
        same(dtorch.tensor([t[0, 0], 1.0]), torch.tensor([base[0, 0], 1.0]))
        same(dtorch.tensor(t), base)
        same(dtorch.as_tensor(base.numpy()), base)
        assert dtorch.as_tensor(t) is t


@pytest.mark.parametrize("where", WHERE)
def test_a_plain_tensor_that_requires_grad_is_refused(where: str) -> None:
    t, p = spread(given()[0], where), given()[1].requires_grad_()
    for call in (lambda: t + p, lambda: p * t, lambda: torch.stack([t, p])):
        with pytest.raises(RuntimeError, match="gradient"):
            call()
    with torch.no_grad():
        same(t + p, given()[0] + given()[1])


def test_gradients_beside_constants() -> None:
    """A dtorch leaf's gradient is torch's where constants of all kinds stand beside it."""
    for where in WHERE:
        theirs = given()[0].requires_grad_()
        ours = spread(given()[0], where).requires_grad_()
        _, p, n, i, _, _ = given()
        for x in (theirs, ours):
            with dtorch.auto_redistribute():
                (
                    torch.where(x > 0, x * p, torch.from_numpy(n)).sum()
                    + (x[i] * 2.5).sum()
                    + (np.float32(3) * x).sum()
                ).backward()
        same(ours.grad, theirs.grad)
        assert ours.grad.placements == ours.placements  # type: ignore[union-attr]


def test_inside_a_guard_what_numpy_and_lists_give_lies_on_its_mesh() -> None:
    mesh = init_device_mesh("cpu", 2)
    with dtorch.device_mesh(mesh):
        for made in (dtorch.Tensor([1, 2]), torch.tensor([1, 2]), torch.from_numpy(np.array([1, 2]))):
            same(made, torch.empty_strided((2,), (1,), dtype=torch.int64).copy_(made.to_torch()))
            assert made.device_mesh == mesh
        t = dtorch.ones(2)
        same(t.new_tensor([1, 2]) + np.array([1, 2]), dtorch.tensor([2.0, 4.0], dtype=torch.float64).to_torch())


@pytest.mark.parametrize("inside", [False, True])
def test_as_tensor_and_asarray_keep_the_gradient(inside: bool) -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,))
    library = torch if inside else dtorch
    with dtorch.device_mesh(mesh) if inside else contextlib.nullcontext():
        leaf = dtorch.distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).requires_grad_()
        made = [
            library.as_tensor(leaf * 2, dtype=torch.float64),
            library.as_tensor(leaf * 3, dtype=torch.float32),
            library.as_tensor(leaf * 4, device=leaf.device),
            library.asarray(leaf * 5),
            library.asarray(leaf * 6, dtype=torch.float64),
            library.asarray(leaf * 7, copy=True),
        ]
        assert all(t.requires_grad for t in made)
        sum(t.sum() for t in made).backward()
        assert leaf.grad.to_torch().tolist() == [27.0] * 4
        assert not library.asarray(leaf * 2, requires_grad=False).requires_grad
        rate, concentration = (dtorch.ones(4, device_mesh=mesh).requires_grad_() for _ in range(2))
        torch.distributions.Gamma(concentration, rate).log_prob(leaf.abs() + 1).sum().backward()
        plain = torch.arange(4.0).requires_grad_()
        torch.distributions.Gamma(torch.ones(4), torch.ones(4)).log_prob(plain.abs() + 1).sum().backward()
        torch.testing.assert_close(leaf.grad.to_torch() - 27, plain.grad)
