"""gather, as_completed, awaitable forms of what depends on data, back-pressure, strict, and what tasks do not share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import dtorch
from dtorch import Replicate, Shard, aio, init_device_mesh
from dtorch.runtime import modes, waiting
from dtorch.runtime.client import client

from .loops import LOOPS, on
from .test_aio_futures import failing, slow


@pytest.fixture
def mesh() -> dtorch.DeviceMesh:
    return init_device_mesh("cpu", (2,))


# -- several values ----------------------------------------------------------------------------------------------------


@LOOPS
def test_gather_tensors_futures_and_awaitables_in_their_order(mesh: dtorch.DeviceMesh, loop: str) -> None:
    async def later(value: int) -> int:
        await anyio.sleep(0.01 * value)
        return value

    async def main() -> None:
        t = dtorch.arange(8, device_mesh=mesh, placements=[Shard(0)])
        future = (t * 2).to_torch_async()
        got = await aio.gather(t.sum(), later(2), future, later(1), t, torch.ones(1), 7)
        assert got[0] == 28 and got[1] == 2 and got[2].tolist() == list(range(0, 16, 2)) and got[3] == 1
        assert got[4].tolist() == list(range(8)) and got[5:] == [torch.ones(1), 7]
        assert await aio.gather() == []
        many = await aio.gather(*[t.sum() * i for i in range(1000)])
        assert [v.item() for v in many] == [28 * i for i in range(1000)]

    on(loop, main)


@LOOPS
def test_gather_raises_the_first_error_and_leaves_nothing_running(mesh: dtorch.DeviceMesh, loop: str) -> None:
    async def main() -> None:
        ended: list[str] = []

        async def long() -> None:
            try:
                await anyio.sleep(60)
            finally:
                ended.append("long")

        began = time.monotonic()
        with pytest.raises(IndexError) as caught:
            await aio.gather(long(), failing(mesh), dtorch.ones(1))
        assert isinstance(caught.value, dtorch.RemoteError) and ended == ["long"]
        with pytest.raises(IndexError):
            await aio.gather(dtorch.ones(1), failing(mesh), dtorch.ones(1))

        async def bad() -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await aio.gather(long(), bad(), dtorch.ones(1))
        assert ended == ["long"] * 2 and time.monotonic() - began < 40
        got = await aio.gather(failing(mesh), bad(), dtorch.ones(1), return_exceptions=True)
        assert [type(v).__name__ for v in got] == ["IndexError", "KeyError", "Tensor"]
        with anyio.move_on_after(0.02) as scope:
            await aio.gather(long(), slow(mesh, 0.1))
        assert scope.cancelled_caught and ended == ["long"] * 3

    on(loop, main)


@LOOPS
def test_as_completed(mesh: dtorch.DeviceMesh, loop: str) -> None:
    async def main() -> None:
        tensors = [dtorch.ones(1) * i for i in range(5)]
        late = slow(init_device_mesh("cpu", (2,)), 0.1)
        order = [(i, v) async for i, v in aio.as_completed(late, *tensors)]
        assert sorted(i for i, _ in order) == list(range(6))
        assert all(v.item() == i - 1 for i, v in order if i)
        assert [i async for i, _ in aio.as_completed([])] == []
        found = aio.as_completed([dtorch.ones(1), failing(mesh), dtorch.ones(1)])
        got: list[Any] = []
        while True:
            try:
                got.append((await anext(found))[0])
            except IndexError:
                got.append("failed")
            except StopAsyncIteration:
                break
        assert sorted(map(str, got)) == ["0", "2", "failed"]
        with pytest.raises(TypeError, match="number 1 is a int"):
            aio.as_completed(dtorch.ones(1), 3)

    on(loop, main)


@LOOPS
def test_an_iterator_of_as_completed_serves_one_task(mesh: dtorch.DeviceMesh, loop: str) -> None:
    async def main() -> None:
        found = aio.as_completed(slow(mesh, 0.1).to_torch_async(), slow(mesh, 0.6))
        turns: list[Any] = []

        async def turn() -> None:
            try:
                turns.append((await anext(found))[0])
            except RuntimeError as error:
                turns.append(str(error))

        async with anyio.create_task_group() as group:
            group.start_soon(turn)
            group.start_soon(turn)
        assert sorted(map(type, turns), key=str) == [int, str]
        assert any("one iterator serves one task" in str(t) for t in turns)
        # It goes on, in this task, and after a turn that was cancelled.
        with anyio.move_on_after(0):
            await anext(found)
        await turn()
        assert sorted(t for t in turns if isinstance(t, int)) == [0, 1]
        with pytest.raises(StopAsyncIteration):
            await anext(found)

    on(loop, main)


# -- what depends on data ----------------------------------------------------------------------------------------------

Pair = tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], Any]]
FORMS: dict[str, Pair] = {
    "nonzero": (aio.nonzero, torch.nonzero),
    "nonzero, as a tuple": (lambda t: aio.nonzero(t, as_tuple=True), lambda t: t.nonzero(as_tuple=True)),
    "argwhere": (aio.argwhere, torch.argwhere),
    "where": (lambda t: aio.where(t > 1), lambda t: torch.where(t > 1)),
    "where of two": (lambda t: aio.where(t > 1, t, -t), lambda t: torch.where(t > 1, t, -t)),
    "masked_select": (lambda t: aio.masked_select(t, t > 1), lambda t: torch.masked_select(t, t > 1)),
    "index": (lambda t: aio.index(t, t[:, 0] > 0), lambda t: t[t[:, 0] > 0]),
    "index by two": (lambda t: aio.index(t, (t[:, 0] > 0, 1)), lambda t: t[t[:, 0] > 0, 1]),
    "unique": (aio.unique, torch.unique),
    "unique of rows": (lambda t: aio.unique(t, dim=0), lambda t: torch.unique(t, dim=0)),
    "unique with all": (
        lambda t: aio.unique(t, return_inverse=True, return_counts=True),
        lambda t: torch.unique(t, return_inverse=True, return_counts=True),
    ),
    "unique_consecutive": (aio.unique_consecutive, torch.unique_consecutive),
    "bincount": (lambda t: aio.bincount(t.abs().long().flatten()), lambda t: torch.bincount(t.abs().long().flatten())),
    "bincount with weights": (
        lambda t: aio.bincount(t.abs().long()[:, 0], t[:, 1], 9),
        lambda t: torch.bincount(t.abs().long()[:, 0], t[:, 1], 9),
    ),
    "repeat_interleave": (
        lambda t: aio.repeat_interleave(t, t[:, 0].abs().long(), 0),
        lambda t: t.repeat_interleave(t[:, 0].abs().long(), 0),
    ),
    "histogramdd": (
        lambda t: aio.histogramdd(t[:, :2].redistribute(placements=[Replicate()]), [3, 2]),  # type: ignore[attr-defined]
        lambda t: torch.histogramdd(t[:, :2], [3, 2]),
    ),
    "one_hot": (
        lambda t: aio.one_hot(t.abs().long()),
        lambda t: torch.nn.functional.one_hot(t.abs().long()),
    ),
    "equal": (lambda t: aio.equal(t, t * 1), lambda t: True),
    "equal, not": (lambda t: aio.equal(t, t + 1), lambda t: False),
    "equal, other shapes": (lambda t: aio.equal(t, t[:1]), lambda t: False),
    "allclose": (lambda t: aio.allclose(t, t + 1e-12), lambda t: True),
    "item": (lambda t: aio.item(t.sum()), lambda t: t.sum().item()),
    "tolist": (aio.tolist, lambda t: t.tolist()),
    "numpy": (lambda t: aio.numpy(t), lambda t: t.numpy().tolist()),
    "call": (lambda t: aio.call(torch.linalg.qr, t), torch.linalg.qr),
}


def numbers() -> torch.Tensor:
    found = torch.randint(-3, 5, (5, 4), generator=torch.Generator().manual_seed(5)).double()
    found[0] = torch.tensor([2.0, 0, 0.5, 2])
    return found


async def plain(value: Any) -> Any:
    if isinstance(value, dtorch.Tensor):
        return await value
    if isinstance(value, (tuple, list)) and not all(isinstance(v, (float, list)) for v in value):
        return [await plain(v) for v in value]
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, torch.Tensor) else value


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.allclose(ours, theirs)
    if isinstance(theirs, (tuple, list)) and theirs and isinstance(theirs[0], (torch.Tensor, list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


@LOOPS
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_awaitable_forms_say_what_torch_says_and_never_stop_the_loop(
    mesh: dtorch.DeviceMesh, loop: str, placement: Any
) -> None:
    async def main() -> None:
        with aio.strict(), dtorch.auto_redistribute():
            for name, (ours, theirs) in FORMS.items():
                t = slow(mesh, 0.002).sum() * 0 + dtorch.distribute_tensor(numbers(), mesh, [placement])
                made = await ours(t)
                assert same(await plain(made), theirs(numbers())), name

    on(loop, main)


@LOOPS
def test_large_ones_leave_the_loop_awake(loop: str) -> None:
    async def main() -> float:
        t = dtorch.randint(0, 1000, (3_000_000,)).double()
        await t.ready()
        longest, last = 0.0, time.perf_counter()
        done = False

        async def heartbeat() -> None:
            nonlocal longest, last
            last = time.perf_counter()
            while not done:
                await anyio.sleep(0.001)
                now = time.perf_counter()
                longest, last = max(longest, now - last), now

        async with anyio.create_task_group() as group:
            group.start_soon(heartbeat)
            began = time.perf_counter()
            found = await aio.unique(t)
            took = time.perf_counter() - began
            done = True
        assert found.shape == (1000,)
        return longest / took

    assert min(on(loop, main) for _ in range(2)) < 0.6


@LOOPS
def test_values_are_those_of_the_moment_of_the_call(mesh: dtorch.DeviceMesh, loop: str) -> None:
    async def main() -> None:
        t = dtorch.tensor([0.0, 1.0, 2.0], device_mesh=mesh)
        asked = aio.nonzero(t)
        t.zero_()
        assert (await (await asked)).tolist() == [[1], [2]]
        assert (await (await aio.nonzero(t))).shape == (0, 1)

    on(loop, main)


@LOOPS
def test_every_form_asks_at_the_call(loop: str) -> None:
    async def main() -> None:
        numbers, mask, v = dtorch.tensor([1, 2]), dtorch.tensor([True, False]), dtorch.tensor([5.0, 6.0])
        one = dtorch.tensor([3])
        asked = [
            aio.item(one),
            aio.tolist(numbers),
            aio.numpy(numbers),
            aio.one_hot(one),
            aio.equal(one, dtorch.tensor([3])),
            aio.allclose(v, dtorch.tensor([5.0, 6.0])),
            aio.index(v.clone(), mask),
            aio.repeat_interleave(v.clone(), numbers),
        ]
        written = dtorch.zeros(2)
        put = aio.index_put_(written, mask, 7.0)
        for t in (numbers, mask, v, one):
            t.zero_()
        got = [await form for form in asked]
        assert got[0] == 3 and got[1] == [1, 2] and got[2].tolist() == [1, 2] and got[4:6] == [True, True]
        values = [(await got[i]).tolist() for i in (3, 6, 7)]
        assert values == [[[0, 0, 0, 1]], [5.0], [5.0, 6.0, 6.0]]
        assert await put is written and (await written).tolist() == [7.0, 0.0]

    on(loop, main)


def test_masked_select_is_differentiable(mesh: dtorch.DeviceMesh) -> None:
    async def main() -> None:
        for n in (5, 5000):  # in the loop's thread, and in a helper's
            p = torch.randn(n, 4, requires_grad=True)
            t = dtorch.distribute_tensor(p.detach(), mesh, [Shard(0)]).requires_grad_()
            (p[p > 0] ** 2).sum().backward()
            ((await aio.masked_select(t, t > 0)) ** 2).sum().backward()
            assert t.grad is not None and torch.equal(await t.grad, p.grad)
            with torch.no_grad():
                assert not (await aio.masked_select(t, t > 0)).requires_grad

    asyncio.run(main())


@LOOPS
def test_writing_by_a_mask(mesh: dtorch.DeviceMesh, loop: str) -> None:
    async def main() -> None:
        with aio.strict():
            p = numbers()
            t = dtorch.distribute_tensor(p, mesh, [Replicate()])
            assert await aio.index_put_(t, t > 1, torch.zeros(int((p > 1).sum()), dtype=p.dtype)) is t
            p[p > 1] = 0
            assert torch.equal(await t, p)
            await aio.index_put_(t, t < 0, 1.0, accumulate=True)
            p.index_put_((p < 0,), torch.tensor(1.0).double(), accumulate=True)
            assert torch.equal(await t, p)

    on(loop, main)


def test_errors_are_torchs() -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="a Tensor with 2 elements cannot be converted to Scalar"):
            await aio.item(dtorch.ones(2))
        with pytest.raises(RuntimeError, match=r"aio\.numpy\(t\.detach\(\)\)"):
            await aio.numpy(dtorch.ones(2, requires_grad=True))
        with pytest.raises(RuntimeError, match="non-negative"):
            await aio.one_hot(dtorch.tensor([-1, 2]))
        with pytest.raises(RuntimeError):
            await aio.bincount(dtorch.tensor([-1, 2]))
        with pytest.raises(IndexError):
            await aio.nonzero(failing(dtorch.DeviceMesh("cpu")))

    asyncio.run(main())


# -- back-pressure -----------------------------------------------------------------------------------------------------


@LOOPS
def test_awaiting_room_bounds_what_is_in_flight(mesh: dtorch.DeviceMesh, loop: str) -> None:
    async def main() -> None:
        await dtorch.Graph.sync_async()
        before = aio.backlog().pauses
        token = waiting.in_flight.set(50)
        highest = 0
        x = slow(mesh, 0.2) * 1
        for _ in range(400):
            await aio.ready_to_send()
            x = x + 1
            highest = max(highest, aio.in_flight())
        assert 30 <= highest <= 55
        found = aio.backlog()
        assert found.bound == 50 and found.pauses > before and found.pausing == 0
        assert (await x).tolist() == [401.0] * 4
        waiting.in_flight.reset(token)
        assert aio.backlog().bound == client().config.run_ahead_soft

    on(loop, main)


@LOOPS
def test_every_await_pauses_at_the_bound_and_others_run_on(mesh: dtorch.DeviceMesh, loop: str) -> None:
    async def main() -> None:
        await dtorch.Graph.sync_async()
        waiting.in_flight.set(20)
        ready = dtorch.ones(1).to_torch_async()
        await ready
        ready = dtorch.ones(1).to_torch_async()
        await anyio.sleep(0.05)
        x = slow(mesh, 0.3)
        for _ in range(60):
            x = x + 1
        beats, paused = 0, [False]

        async def heartbeat() -> None:
            nonlocal beats
            while not paused[0]:
                beats += 1
                await anyio.sleep(0.005)

        async with anyio.create_task_group() as group:
            group.start_soon(heartbeat)
            await ready  # there already, but the task has issued too much
            paused[0] = True
        assert beats > 5 and aio.in_flight() < 20
        with anyio.move_on_after(0.01):
            await slow(mesh, 0.1)

    on(loop, main)


@LOOPS
def test_a_task_that_only_issues_lets_the_others_run(loop: str) -> None:
    async def main() -> None:
        beats = 0
        stop = anyio.Event()

        async def heartbeat() -> None:
            nonlocal beats
            while not stop.is_set():
                beats += 1
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as group:
            group.start_soon(heartbeat)
            x, until = dtorch.ones(4), time.monotonic() + 0.2
            while time.monotonic() < until:
                await aio.ready_to_send()
                x = x + 1
            stop.set()
        assert beats > 20
        await x

    on(loop, main)


def test_nothing_is_started_by_looking() -> None:
    dtorch.shutdown()
    assert aio.backlog() == aio.Pressure(0, 0, 0, 0, 0) and aio.in_flight() == 0


# -- strict ------------------------------------------------------------------------------------------------------------


@LOOPS
def test_strict_is_of_one_task(mesh: dtorch.DeviceMesh, loop: str) -> None:
    async def main() -> None:
        async def careful() -> None:
            aio.strict()
            await anyio.sleep(0.01)
            with pytest.raises(dtorch.BlockingCallError, match=r"Write:  await dtorch\.aio\.nonzero\(t, …\)"):
                slow(mesh, 0.05).nonzero()
            with aio.strict(False), pytest.warns(dtorch.BlockingCallWarning):
                slow(mesh, 0.05).to_torch()
            with pytest.raises(dtorch.BlockingCallError):
                slow(mesh, 0.05).to_torch()

        async def careless() -> None:
            await anyio.sleep(0.02)
            with pytest.warns(dtorch.BlockingCallWarning):
                slow(mesh, 0.05).sum().item()

        async with anyio.create_task_group() as group:
            group.start_soon(careful)
            group.start_soon(careless)

    from dtorch.runtime import blocking  # noqa: PLC0415

    blocking._told.clear()
    on(loop, main)
    with aio.strict():  # there is no loop here to stop
        assert slow(mesh, 0.01).sum().item() == 4


# -- what tasks do not share -------------------------------------------------------------------------------------------


@LOOPS
def test_context_variables_are_of_a_task(loop: str) -> None:
    two = init_device_mesh("cpu", (2,))

    async def main() -> None:
        async def one(i: int) -> None:
            mesh = two if i % 2 else dtorch.DeviceMesh("cpu")
            dtype = torch.float64 if i % 3 else torch.float16
            graph = dtorch.default_graph()
            with (
                dtorch.device_mesh(mesh),
                graph.dtype_guard(dtype),
                dtorch.auto_redistribute(bool(i % 2)),
                aio.strict(bool(i % 5)),
            ):
                for _ in range(5):
                    t = dtorch.ones(4)
                    assert t.device_mesh == mesh and t.dtype == dtype
                    assert (await t.sum()).item() == 4
                    await anyio.lowlevel.checkpoint()
                    a = dtorch.ones(4, device_mesh=two, placements=[Shard(0)])
                    if i % 2:
                        assert (await a.reshape(2, 2).T.reshape(4)).tolist() == [1.0] * 4
                    else:
                        with pytest.raises(dtorch.PlacementError):
                            a.reshape(2, 2).T.reshape(4)

        async with anyio.create_task_group() as group:
            for i in range(20):
                group.start_soon(one, i)
        assert dtorch.get_default_device_mesh() == dtorch.DeviceMesh("cpu")

    on(loop, main)


@LOOPS
def test_training_and_evaluation_interleave_without_leaks(mesh: dtorch.DeviceMesh, loop: str) -> None:
    """Many tasks under all modes, each awaiting in every way there is; each ends with the values of plain torch."""
    torch.manual_seed(0)
    weights, data = torch.randn(8, 3), torch.randn(6, 8)

    def train(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return ((x @ w) ** 2).mean()

    plain_w = weights.clone().requires_grad_()
    wanted: list[float] = []
    for _ in range(4):
        loss = train(plain_w, data)
        wanted.append(loss.item())
        (grad,) = torch.autograd.grad(loss, plain_w)
        plain_w = (plain_w - 0.1 * grad).detach().requires_grad_()

    async def main() -> None:
        x = dtorch.distribute_tensor(data, mesh, [Shard(0)])
        ordinary = modes.current()

        async def training() -> None:
            w = dtorch.distribute_tensor(weights, mesh, [Replicate()]).requires_grad_()
            for want in wanted:
                loss = train(w, x)
                assert loss.requires_grad and not loss.is_inference()
                assert (await loss).item() == pytest.approx(want, rel=1e-4)
                (grad,) = torch.autograd.grad(loss, w)
                await grad.ready()
                w = (w - 0.1 * grad).detach().requires_grad_()
                await aio.gather(w, loss)
                assert modes.current() == ordinary

        async def evaluation(context: Any) -> None:
            w = dtorch.distribute_tensor(weights, mesh, [Replicate()]).requires_grad_()
            with context:
                mine = modes.current()

                async def inner() -> None:
                    assert modes.current() == mine
                    await anyio.lowlevel.checkpoint()
                    assert modes.current() == mine

                for _ in range(6):
                    out = x @ w
                    assert not out.requires_grad
                    await out
                    await out.ready()
                    await aio.gather(out, inner())
                    await aio.item(out.sum())
                    await aio.nonzero(out)
                    await aio.ready_to_send()
                    async for _ in aio.as_completed(out, out):
                        pass
                    await dtorch.Graph.sync_async()
                    with anyio.move_on_after(0):
                        await slow(mesh, 0.001)
                    assert modes.current() == mine
            assert modes.current() == ordinary

        async def autocast() -> None:
            w = dtorch.distribute_tensor(weights, mesh, [Replicate()])
            for _ in range(4):
                with torch.autocast("cpu", torch.bfloat16):
                    out = x @ w
                    assert out.dtype == torch.bfloat16
                    await out
                    assert (x @ w).dtype == torch.bfloat16
                assert (x @ w).dtype == torch.float32

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(training)
                group.start_soon(evaluation, torch.no_grad())
                group.start_soon(evaluation, torch.inference_mode())
                group.start_soon(autocast)
        assert modes.current() == ordinary

    on(loop, main)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
