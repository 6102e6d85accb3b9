"""What a failure reaches, and what it does not: on meshes of one and two dims, several ranks to an executor."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh
from dtorch.runtime import plans
from dtorch.runtime.client import client

from .scripts import run_body

SHAPES = [(2,), (4,), (2, 2)]
Make = Callable[..., dtorch.Tensor]


@pytest.fixture(autouse=True)
def _settled() -> Iterator[None]:
    """No test leaves failures that nobody asked for to the summary at the end of the session."""
    yield
    c = client()
    c.drain()
    c.failures._asked |= set(c.failures._reports)


def bad_on(mesh: dtorch.DeviceMesh, ranks: tuple[int, ...], placements: list[Any]) -> dtorch.Tensor:
    """float32[4, 4] that ``from_local`` could not make on `ranks`."""
    local = dtorch.zeros(4, 4, device_mesh=mesh, placements=placements)
    shapes = [tuple(local.to_local(r).shape) for r in range(mesh.size())]

    def make(rank: int) -> torch.Tensor:
        if rank in ranks:
            raise ZeroDivisionError(f"rank {rank}")
        return torch.ones(shapes[rank])

    return dtorch.from_local(make, mesh, placements, shape=(4, 4))


# -- peers ----------------------------------------------------------------------------------------------------------

ON_ONE: list[Any] = [Shard(0), Shard(1), Replicate(), Partial()]


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_no_rank_waits_for_one_that_failed_on_a_line_of_four(failing: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    good = torch.arange(16.0).view(4, 4)
    for source, target in itertools.product(ON_ONE, [Shard(0), Shard(1), Replicate()]):
        if source == target:
            continue
        moved = bad_on(mesh, (failing,), [source]).redistribute(placements=[target])
        for rank in range(4):
            if isinstance(source, Replicate) and rank % 2 != failing % 2:
                # Each rank cuts what it has, and those of the other executor have all.
                assert moved.to_local(rank).eq(1).all()
                continue
            with pytest.raises(ZeroDivisionError, match=f"rank {failing}") as caught:
                moved.to_local(rank)
            assert isinstance(caught.value, dtorch.RemoteError) and caught.value.rank == failing
        # The next exchange of the same kind is right.
        if not isinstance(source, Partial):
            fine = dtorch.distribute_tensor(good, mesh, [source]).redistribute(placements=[target])
            assert fine.to_torch().equal(good)


@pytest.mark.parametrize("failing", [0, 2, 3])
def test_no_rank_waits_for_one_that_failed_on_a_grid(failing: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    good = torch.arange(16.0).view(4, 4)
    whole = [Replicate(), Replicate()]
    for source in ([Shard(0), Shard(1)], [Shard(1), Replicate()], [Replicate(), Shard(0)], [Partial(), Shard(0)]):
        moved = bad_on(mesh, (failing,), source).redistribute(placements=whole)
        with pytest.raises(ZeroDivisionError, match=f"rank {failing}"):
            moved.redistribute(placements=[Shard(0), Shard(0)]).to_torch()
        if not isinstance(source[0], Partial):
            fine = dtorch.distribute_tensor(good, mesh, source).redistribute(placements=whole)
            assert all(fine.to_local(rank).equal(good) for rank in range(4))


def test_ranks_outside_the_failure_keep_their_pieces() -> None:
    """A piece of another executor is good; those of one executor are one value, and fail together."""
    mesh = init_device_mesh("cpu", (2,))
    bad = bad_on(mesh, (1,), [Shard(0)])
    assert bad.to_local(0).tolist() == [[1.0] * 4] * 2
    assert (bad * 3).to_local(0).tolist() == [[3.0] * 4] * 2
    with pytest.raises(ZeroDivisionError):
        (bad * 3).to_local(1)


def test_between_meshes() -> None:
    """A failure on one mesh reaches what is moved to another, and nothing else there."""
    first, second = dtorch.DeviceMesh("cpu", [0, 1]), dtorch.DeviceMesh("cpu", [2, 3])
    bad = bad_on(first, (1,), [Shard(0)]).redistribute(second, [Replicate()])
    good = dtorch.ones(2, device_mesh=second)
    for rank in (0, 1):
        with pytest.raises(ZeroDivisionError, match="rank 1"):
            bad.to_local(rank)
    assert (good + 1).to_local(1).tolist() == [2, 2]


# -- what an operator should have made ------------------------------------------------------------------------------


def test_all_outputs_of_one_that_fails() -> None:
    mesh = init_device_mesh("cpu", (2,))
    singular = dtorch.zeros(3, 3, device_mesh=mesh)
    good = dtorch.eye(3, device_mesh=mesh)
    with pytest.raises(torch.linalg.LinAlgError) as as_torch:
        torch.linalg.inv(torch.zeros(3, 3))
    outputs = torch.max(bad_on(mesh, (0, 1), [Replicate()]), dim=0)
    for out in (
        outputs.values,
        outputs.indices,
        *bad_on(mesh, (0, 1), [Replicate()]).split(2),
        *torch.aminmax(outputs[0]),
    ):
        with pytest.raises(ZeroDivisionError):
            out.to_torch()
    with pytest.raises(torch.linalg.LinAlgError) as caught:
        torch.linalg.inv(singular).to_torch()
    assert str(caught.value).split(":")[-1] == str(as_torch.value).split(":")[-1]
    assert torch.linalg.inv(good).to_torch().equal(torch.eye(3))


def test_out_of_memory_costs_the_value_and_not_the_executor() -> None:
    mesh = init_device_mesh("cpu", (2,))
    small = dtorch.ones(3, device_mesh=mesh)
    with pytest.raises(RuntimeError) as as_torch:
        torch.empty(1 << 48)
    pids = client().pool.pids
    huge = dtorch.ones(1, device_mesh=mesh).expand(1 << 48).clone()
    for value in (huge, huge + 1, huge.sum()):
        with pytest.raises(RuntimeError, match=r"not enough memory|can't allocate|out of memory") as caught:
            value.sum().item()
        assert isinstance(caught.value, dtorch.RemoteError) and caught.value.ranks == (0, 1)
        assert type(caught.value).__mro__[3] is type(as_torch.value)
    assert (small * 2).tolist() == [2, 2, 2]
    assert client().pool.pids == pids


def test_a_function_that_captures_a_failed_value_raises_at_the_call() -> None:
    """The captured tensor's value goes along, so it is asked for."""
    mesh = init_device_mesh("cpu", (2,))
    bad = bad_on(mesh, (0, 1), [Replicate()])
    good = dtorch.full((2,), 3.0, device_mesh=mesh)

    def uses(which: dtorch.Tensor) -> Callable[[int], torch.Tensor]:
        return lambda rank: which.sum().reshape(1) + rank

    with pytest.raises(ZeroDivisionError, match="rank 0"):
        dtorch.from_local(uses(bad), mesh, [Shard(0)], shape=(2,))
    assert dtorch.from_local(uses(good), mesh, [Shard(0)], shape=(2,)).tolist() == [6, 7]


# -- writes ---------------------------------------------------------------------------------------------------------


def _in_place(targets: list[torch.Tensor], bad: torch.Tensor) -> None:
    for t in targets:
        t.mul_(2.0).add_(bad)


def _foreach(targets: list[torch.Tensor], bad: torch.Tensor) -> None:
    torch._foreach_mul_(targets, [torch.ones_like(bad)] * (len(targets) - 1) + [bad])


def _copy(targets: list[torch.Tensor], bad: torch.Tensor) -> None:
    for t in targets:
        t.copy_(bad)


def _through_a_view(targets: list[torch.Tensor], bad: torch.Tensor) -> None:
    for t in targets:
        t.t().add_(bad.t())


def _optimizer(targets: list[torch.Tensor], bad: torch.Tensor) -> None:
    parameters = [torch.nn.Parameter(t) for t in targets]
    for p in parameters:
        p.grad = bad.clone()
    torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.0).step()


@pytest.mark.parametrize("write", [_in_place, _foreach, _copy, _through_a_view, _optimizer])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_write_is_done_on_all_ranks_or_lost(shape: tuple[int, ...], write: Callable[..., None]) -> None:
    mesh = init_device_mesh("cpu", shape)
    whole, rows = [Replicate()] * len(shape), [Shard(0)] + [Replicate()] * (len(shape) - 1)
    old = torch.arange(16.0).view(4, 4)
    everywhere = tuple(range(mesh.size()))
    done = torch.arange(16.0).view(4, 4) * (2 if write is _in_place else 1)
    for placements in (whole, rows):
        # All ranks know: nothing is written but what was before it in the list of calls, and that stands.
        targets = [dtorch.distribute_tensor(old, mesh, placements) for _ in range(2)]
        bystander = dtorch.distribute_tensor(old, mesh, placements)
        write(targets, bad_on(mesh, everywhere, placements))
        for t in targets:
            with pytest.raises(ZeroDivisionError, match="rank 0"):
                (t + 1).to_torch()
        dtorch.clear_errors()
        for t in (*targets, bystander):
            wanted = old if t is bystander else done
            assert t.to_torch().equal(wanted)
            assert all(t.redistribute(placements=whole).to_local(r).equal(wanted) for r in range(mesh.size()))
        # One rank knows: its peers on other executors have written.
        targets = [dtorch.distribute_tensor(old, mesh, placements) for _ in range(2)]
        write(targets, bad_on(mesh, (1,), placements))
        dtorch.clear_errors()
        with pytest.raises(dtorch.TensorLostError, match=r"Write:  t\.copy_"):
            targets[-1].to_torch()
        for t in targets:
            t.copy_(bystander)
            t.add_(1)
            assert t.to_torch().equal(old + 1)


def test_clearing_gives_back_targets_and_nothing_else() -> None:
    mesh = init_device_mesh("cpu", (2,))
    dtorch.clear_errors()  # nothing has failed
    bad = bad_on(mesh, (0, 1), [Replicate()])
    target = dtorch.ones(4, 4, device_mesh=mesh)
    alias, after = target[1:], target * 2
    target.add_(bad)
    late = target * 3
    for value in (target, alias, late, bad):
        with pytest.raises(ZeroDivisionError):
            value.to_torch()
    assert after.to_torch().eq(2).all()
    for _ in range(2):
        dtorch.clear_errors()
        assert target.to_torch().eq(1).all() and alias.to_torch().eq(1).all()
        # What was computed from it meanwhile was never computed.
        for value in (late, bad):
            with pytest.raises(ZeroDivisionError):
                value.to_torch()
    alias.add_(1)
    assert target.sum().item() == 4 + 24
    # The same target, a second failure: it is that one which is told.
    target.add_(dtorch.from_local(_second, mesh, [Replicate()], shape=(4, 4)))
    with pytest.raises(LookupError, match="another"):
        target.to_torch()
    dtorch.clear_errors()
    assert target.sum().item() == 28


def _second(rank: int) -> torch.Tensor:
    raise LookupError("another")


def test_the_first_of_two_failures_is_the_root() -> None:
    mesh = init_device_mesh("cpu", (4,))
    first = bad_on(mesh, (2,), [Shard(0)])
    second = dtorch.from_local(_second, mesh, [Shard(0)], shape=(4, 4))
    whole = [Replicate()]
    for both in (
        first + second,
        second + first,
        first.redistribute(placements=whole) + second.redistribute(placements=whole),
    ):
        with pytest.raises(ZeroDivisionError, match="rank 2"):
            both.redistribute(placements=whole).to_torch()


# -- calls that are wrong -------------------------------------------------------------------------------------------


def test_wrong_calls_raise_at_the_call_and_issue_nothing() -> None:
    mesh, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = dtorch.ones(4, 4, device_mesh=mesh, placements=[Shard(0)])
    y = dtorch.ones(4, 4, device_mesh=grid)
    sums = dtorch.ones(4, 4, device_mesh=mesh, placements=[Shard(0)]).sum(0)
    assert (x.sum(1) + 1).to_local(1).tolist() == [5, 5]
    wrong: dict[str, tuple[type[Exception] | tuple[type[Exception], ...], Callable[[], Any]]] = {
        "shapes": (RuntimeError, lambda: x + dtorch.ones(3, device_mesh=mesh)),
        "dims": (IndexError, lambda: x.sum(2)),
        "dtypes": (RuntimeError, lambda: x @ dtorch.ones(4, 4, device_mesh=mesh, dtype=dtorch.int64)),
        "a dtype without a kernel": (NotImplementedError, lambda: x.long().softmax(1)),
        "placements": (dtorch.PlacementError, lambda: x.softmax(0)),
        "partial": (dtorch.PlacementError, lambda: sums.relu()),
        "two meshes": (dtorch.DeviceMeshError, lambda: x + y),
        "an unknown mesh": ((ValueError, RuntimeError), lambda: dtorch.ones(2, device_mesh="nowhere")),
        "an unknown dim of a mesh": ((KeyError, ValueError), lambda: grid["pp"]),
        "a mesh of too many dims": (ValueError, lambda: x.redistribute(placements=[Shard(0), Shard(1)])),
        "a dim that the tensor lacks": ((ValueError, IndexError), lambda: x.redistribute(placements=[Shard(2)])),
    }
    for name, (kind, call) in wrong.items():
        client().flush()
        before = client().writer.issued
        with pytest.raises(kind) as caught:
            call()
        assert not isinstance(caught.value, dtorch.RemoteError), name
        # What a call made for it before it was wrong is its own affair; the wrong one is never sent.
        assert client().writer.issued - before <= 6, name
    assert x.sum().redistribute(placements=[Replicate()]).item() == 16


def test_eight_ranks_that_fail_alike_are_logged_once() -> None:
    done = run_body(
        """
        import torch, dtorch
        mesh = dtorch.init_device_mesh("cpu", (8,))
        def fails(rank):
            raise ValueError("the same")
        bad = dtorch.from_local(fails, mesh, [dtorch.Shard(0)], shape=(8,))
        later = (bad * 2).redistribute(placements=[dtorch.Replicate()])
        del bad, later
        good = dtorch.ones(8, device_mesh=mesh)
        for _ in range(3):
            for rank in range(8):
                good.to_local(rank)
        """
    )
    lines = done.stderr.splitlines()
    assert len(lines) == 2, done.stderr
    assert lines[0].startswith(
        "a value was dropped unread, and could not be computed: ValueError: the same, in from_local("
    )
    assert lines[1].startswith("1 failed operation whose value nobody asked for")
    assert all("on ranks 0-7 (cpu), issued at <string>:6 in <module>" in line for line in lines)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, i: x @ i,
        lambda x, i: x.double() @ x,
        lambda x, i: torch.addmm(x, x, i),
        lambda x, i: torch.nn.functional.linear(x, i),
        lambda x, i: torch.nn.functional.conv1d(x[None], i[None]),
        lambda x, i: x[0] @ i,
        lambda x, i: x.index_select(0, x[0]),
        lambda x, i: i.softmax(0),
        lambda x, i: x & x,
        lambda x, i: torch.bmm(x[None], i[None]),
        lambda x, i: torch.einsum("ij,jk->ik", x, i),
    ],
)
def test_dtypes_that_no_kernel_takes_are_refused_at_the_call_in_torchs_words(
    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    mesh = init_device_mesh("cpu", (2,))
    x, i = torch.ones(4, 4), torch.ones(4, 4, dtype=torch.int64)
    with pytest.raises(Exception) as as_torch:
        call(x, i)
    with pytest.raises(type(as_torch.value)) as caught:
        call(*(dtorch.distribute_tensor(t, mesh, [Replicate()]) for t in (x, i)))
    assert str(caught.value) == str(as_torch.value) and not isinstance(caught.value, dtorch.RemoteError)


def test_no_kernel_is_asked_that_checks_nothing() -> None:
    """A recurrent layer's backward trusts its arguments to fit: asked with other shapes it ended the client."""
    torch.manual_seed(0)
    lstm = torch.nn.LSTM(8, 4, bidirectional=True, num_layers=2)
    mesh = init_device_mesh("cpu", (2,))
    x = dtorch.distribute_tensor(torch.randn(7, 2, 8), mesh, [Replicate()])
    asked: list[str] = []
    original = plans._said_of_one_element

    def spy(func: Any, args: Any, kwargs: Any) -> Exception | None:
        asked.append(func._schema.name)
        return original(func, args, kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "_said_of_one_element", spy)
        out, _ = copy.deepcopy(lstm).to(mesh)(x)  # type: ignore[arg-type]
        out.double().square().sum().backward()
        out.double() @ torch.ones(8, 1, dtype=torch.float64)
    assert any(name in asked for name in ("aten::mm", "aten::mul", "aten::bmm", "aten::addmm", "aten::matmul")), asked
    assert not [name for name in asked if "rnn" in name or "backward" in name or "lstm" in name]
