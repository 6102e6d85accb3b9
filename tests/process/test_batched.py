"""One batch of many callers' requests: whose rows are whose, when a batch is sent, and how the function looks."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import random
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import dtorch
from dtorch import Replicate, Shard, init_device_mesh
from dtorch.aio import batched

from .batches import BACKENDS, Gated, counted, row, settle, together


@pytest.fixture(scope="module")
def mesh() -> dtorch.DeviceMesh:
    return init_device_mesh("cpu", (2,))


# -- values ---------------------------------------------------------------------------------------------------------


@BACKENDS
def test_each_caller_gets_the_rows_of_plain_torch(mesh: dtorch.DeviceMesh, backend: str) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
    model.load_state_dict(plain.state_dict())
    model = dtorch.distributed.tensor.distribute_module(model, mesh)

    @batched(max_size=16)
    async def sharded(x: torch.Tensor) -> Any:
        size = x.shape[0]
        return model(dtorch.distribute_tensor(x, mesh, [Shard(0) if size > 1 else Replicate()]))

    @batched(max_size=16)
    def replicated(x: torch.Tensor) -> Any:
        return model(x)

    async def main() -> None:
        for function in (sharded, replicated):
            inputs = [torch.randn(1 + i % 3, 6) for i in range(60)]
            got = await together([lambda x=x, f=function: f(x) for x in inputs])
            for x, y in zip(inputs, got, strict=True):
                assert type(y) is torch.Tensor and not y.requires_grad
                torch.testing.assert_close(y, plain(x).detach(), rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(await function.unbatched(x), plain(x).detach(), rtol=1e-5, atol=1e-6)
            assert function.metrics.batches < 20
            assert function.metrics.rows == sum(len(x) for x in inputs) and counted(function)

    anyio.run(main, backend=backend)


@BACKENDS
def test_structures_of_arguments_and_results(mesh: dtorch.DeviceMesh, backend: str) -> None:
    seen: list[tuple[int, Any]] = []

    @batched(max_size=8)
    async def mixed(pair: Any, *more: Any, mask: Any = None, mode: str = "sum", **named: Any) -> Any:
        a, inner = pair
        seen.append((len(a), mode))
        total = a + inner["b"] + sum(more) + named["c"]
        there = dtorch.distribute_tensor(total, mesh, [Replicate()])
        return {"total": there * 2, "parts": [total, (there.to_torch_async(), None)]}

    def make(i: int) -> Callable[[], Awaitable[Any]]:
        n, v = 1 + i % 2, float(i)
        mode = "sum" if i % 3 else "mean"
        full = torch.full((n, 2), v)
        return lambda: mixed((full, {"b": full}), full, full, mode=mode, c=full)

    async def main() -> None:
        got = await together([make(i) for i in range(24)])
        for i, found in enumerate(got):
            want = torch.full((1 + i % 2, 2), 5.0 * i)
            assert found["total"].equal(want * 2)
            assert found["parts"][0].equal(want) and found["parts"][1][0].equal(want) and found["parts"][1][1] is None
            assert not isinstance(found["total"], dtorch.Tensor)
        # Arguments that are no tensors never mix.
        assert {mode for _, mode in seen} == {"sum", "mean"} and len(seen) < 16

    anyio.run(main, backend=backend)


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (True, 1), (0.0, -0.0), ("a", "b"), (None, 0), ([1], [2])])
def test_constants_that_differ_never_share_a_batch(one: Any, other: Any) -> None:
    @batched()
    async def tell(x: torch.Tensor, constant: Any) -> torch.Tensor:
        return torch.full((len(x), 1), [repr(one), repr(other)].index(repr(constant)))

    async def main() -> None:
        x = row(1)
        got = await together([lambda c=c: tell(x, c) for c in (one, other) * 4])
        assert [int(t) for t in got] == [0, 1] * 4
        assert tell.metrics.batches == 2

    anyio.run(main)


def test_dtypes_and_shapes_that_differ_go_to_different_batches() -> None:
    seen: list[tuple[torch.dtype, tuple[int, ...]]] = []

    @batched()
    def same(x: torch.Tensor) -> torch.Tensor:
        seen.append((x.dtype, tuple(x.shape)))
        return x

    async def main() -> None:
        inputs = [torch.ones(1, 2), torch.ones(1, 3), torch.ones(1, 2, dtype=torch.int64), torch.ones(1, 2)]
        got = await together([lambda x=x: same(x) for x in inputs])
        assert all(y.equal(x) and y.dtype == x.dtype for x, y in zip(inputs, got, strict=True))
        assert seen == [(torch.float32, (2, 2)), (torch.float32, (1, 3)), (torch.int64, (1, 2))]

    anyio.run(main)


def test_batches_have_sizes_from_a_short_list_and_padding_goes_to_nobody() -> None:
    sizes: list[int] = []

    @batched(max_size=12)
    async def same(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return x

    async def main() -> None:
        for count in range(13):
            got = await together([lambda i=i: same(row(i)) for i in range(count)])
            assert [t.tolist() for t in got] == [[[i]] for i in range(count)]
        assert set(sizes) == {1, 2, 4, 8, 12}
        assert same.metrics.rows == sum(range(13)) and same.metrics.rows + same.metrics.padding_rows == sum(sizes)

    anyio.run(main)


def test_a_call_of_many_rows_goes_in_parts_and_a_call_of_none_comes_back() -> None:
    sizes: list[int] = []

    @batched(max_size=4, max_queue=6)
    async def same(x: torch.Tensor, y: Any = None) -> Any:
        sizes.append(len(x))
        return {"x": x, "nothing": (y,)}

    async def main() -> None:
        big = torch.arange(18.0).view(9, 2)
        got = await together([lambda: same(big), lambda: same(big[:1])])
        assert got[0]["x"].equal(big) and got[0]["nothing"] == (None,) and got[1]["x"].equal(big[:1])
        assert sorted(sizes) == [2, 4, 4]
        assert same.metrics.requests == 2 == same.metrics.completed
        assert (await same(big[:0]))["x"].shape == (0, 2)
        with pytest.raises(ValueError, match="25 rows are 7 batches of max_size=4, and never fit into max_queue=6"):
            await same(torch.ones(25, 1))
        assert counted(same)

    anyio.run(main)


def test_rows_are_the_callers_own() -> None:
    table = torch.arange(8.0).view(8, 1)

    @batched()
    async def look_up(x: torch.Tensor) -> torch.Tensor:
        return table[: len(x)]

    async def main() -> None:
        got = await together([lambda: look_up(row(0)), lambda: look_up(row(0))])
        got[0].fill_(7)
        assert got[1].tolist() == [[1]] and table[0] == 0

    anyio.run(main)


@BACKENDS
@pytest.mark.parametrize("callers", [1, 2, 3])
def test_rows_and_arguments_share_memory_with_nobody(mesh: dtorch.DeviceMesh, backend: str, callers: int) -> None:
    buffer = torch.zeros(4, 2)
    table = torch.arange(8.0).view(4, 2)
    kept: list[torch.Tensor] = []

    @batched(max_size=4)
    async def f(x: torch.Tensor, kind: str) -> Any:
        kept.append(x)
        if kind == "buffer":
            return torch.mul(x, 2, out=buffer[: len(x)])
        if kind == "mixed":
            # The dtorch tensor is waited for, and the buffer is written to by the next batch meanwhile.
            there = dtorch.distribute_tensor(x, mesh, [Replicate()])
            return torch.mul(x, 2, out=buffer[: len(x)]), there + 1
        if kind == "table":
            return table[: len(x)]
        if kind == "inplace":
            return x.mul_(2)
        return {"a": x, "b": x, "c": [x.expand(len(x), 2)]}

    async def main() -> None:
        inputs = [torch.full((1, 2), 1.0 + i) for i in range(callers)]
        for call in (f, f.unbatched):
            for kind in ("buffer", "table", "inplace", "input"):
                got = await together([lambda x=x, k=kind, c=call: c(x, k) for x in inputs])
                want = [[t.clone() for t in torch.utils._pytree.tree_leaves(result)] for result in got]
                # Later calls, writes of other callers, and writes to what the function keeps, change nothing.
                await call(torch.full((callers, 2), 9.0), kind)
                for t in kept:
                    t.fill_(-1)
                table.add_(100)
                for mine, expected in zip(got, want, strict=True):
                    for t, w in zip(torch.utils._pytree.tree_leaves(mine), expected, strict=True):
                        assert t.equal(w), (call, kind)
                        t.fill_(-2)
                table.copy_(torch.arange(8.0).view(4, 2))
                assert [x.tolist() for x in inputs] == [[[1.0 + i] * 2] for i in range(callers)], (call, kind)
        got = await together([lambda i=i: f(torch.full((4, 2), float(i)), "mixed") for i in range(8)])
        for i, (doubled, more) in enumerate(got):
            assert doubled.tolist() == [[2.0 * i] * 2] * 4 and more.tolist() == [[1.0 + i] * 2] * 4

    anyio.run(main, backend=backend)


# -- padding --------------------------------------------------------------------------------------------------------


@BACKENDS
def test_ragged_tokens_and_masks_equal_the_unpadded_call(mesh: dtorch.DeviceMesh, backend: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(50, 16)
    there = dtorch.distribute_tensor(weight, mesh, [Replicate()])
    shapes: set[tuple[int, ...]] = set()

    def pooled(table: Any, ids: Any, mask: Any) -> Any:
        rows = torch.nn.functional.embedding(ids, table)
        return (rows * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

    @batched(max_size=8, pad={"ids": 49, "mask": 0})
    async def embed(ids: torch.Tensor, mask: torch.Tensor) -> Any:
        shapes.add(tuple(ids.shape))
        return pooled(there, *(dtorch.distribute_tensor(t, mesh, [Replicate()]) for t in (ids, mask)))

    async def main() -> None:
        rng = random.Random(1)
        inputs = [torch.randint(0, 49, (rng.choice([1, 2]), rng.randint(1, 60))) for _ in range(80)]
        got = await together([lambda x=x: embed(x, mask=torch.ones_like(x)) for x in inputs])
        for x, y in zip(inputs, got, strict=True):
            # Width 16 is a padded length as well: nothing is cut by its looks.
            torch.testing.assert_close(y, pooled(weight, x, torch.ones_like(x)), rtol=1e-5, atol=1e-6)
        assert {n for _, n in shapes} == {8, 16, 32, 64} and {n for n, _ in shapes} <= {1, 2, 4, 8}

    anyio.run(main, backend=backend)


def test_results_are_cut_back_where_it_is_said() -> None:
    @batched(pad=-1, unpad={"tokens": 1, "square": (2, None)})
    async def f(x: torch.Tensor) -> Any:
        square = x[:, None, :].expand(-1, 3, -1)
        return {"tokens": x[..., None].expand(-1, -1, 8), "square": (square, x.new_ones(len(x), 8))}

    async def main() -> None:
        lengths = [1, 5, 8, 9, 16, 3]
        got = await together([lambda n=n: f(torch.arange(n)[None]) for n in lengths])
        for n, found in zip(lengths, got, strict=True):
            assert found["tokens"].shape == (1, n, 8) and found["tokens"][0, :, 0].tolist() == list(range(n))
            assert found["square"][0].shape == (1, 3, n) and found["square"][1].shape == (1, 8)
        assert f.metrics.batches == 2

    anyio.run(main)


def test_dims_and_lengths_of_padding() -> None:
    shapes: list[tuple[int, ...]] = []

    @batched(pad={"bias": (0.5, (1, 2)), "ids": 0}, pad_lengths=(4, 6))
    async def f(inputs: dict[str, torch.Tensor], other: torch.Tensor) -> torch.Tensor:
        shapes.extend(tuple(t.shape) for t in (*inputs.values(), other))
        return inputs["bias"].sum((1, 2))

    async def main() -> None:
        x = {"bias": torch.zeros(1, 5, 3), "ids": torch.zeros(1, 2)}
        assert (await f(x, torch.zeros(1, 3))).item() == 0.5 * (6 * 4 - 15)
        assert shapes == [(1, 6, 4), (1, 4), (1, 3)]
        with pytest.raises(ValueError, match="a length of 7 is more than the longest that is padded to, 6"):
            await f({"bias": torch.zeros(1, 7, 3), "ids": torch.zeros(1, 2)}, torch.zeros(1, 3))
        with pytest.raises(ValueError, match="pad= names bias, ids, but this call has inputs, other"):
            await f(torch.zeros(1, 2), torch.zeros(1, 2))

    anyio.run(main)


# -- when a batch is sent -------------------------------------------------------------------------------------------


@BACKENDS
def test_the_window_adapts(backend: str) -> None:
    async def main() -> None:
        gated = Gated()
        async with anyio.create_task_group() as group:

            def ask(*values: float) -> None:
                for value in values:
                    group.start_soon(gated.call, row(value))

            # Idle: one call is sent at once, however long max_delay is.
            ask(1)
            await settle()
            assert gated.batches == [[1]]
            # Busy: calls collect.
            for value in (2, 3):
                ask(value)
                await settle()
            assert len(gated.batches) == 1 and gated.call.metrics.queue_depth == 2
            # A full batch goes behind the first, and nothing behind that.
            ask(4, 5, 6, 7, 8, 9)
            await settle()
            assert [len(b) for b in gated.batches] == [1, 4] and set(gated.batches[1]) >= {2, 3}
            # As one ends, the next full one goes; when nothing runs, whatever there is.
            gated.gates[0].set()
            await settle()
            assert [len(b) for b in gated.batches] == [1, 4, 4] and gated.call.metrics.queue_depth == 0
            gated.open()
            await settle()
            ask(10, 11, 12)
            await settle()
            assert set(gated.batches[3]) == {10, 11, 12} and gated.call.metrics.batches == 4
            gated.open()
        assert counted(gated.call) and gated.call.metrics.pending == 0

    anyio.run(main, backend=backend)


@BACKENDS
def test_a_call_waits_no_longer_than_max_delay_for_a_second_batch(backend: str) -> None:
    async def main() -> None:
        gated = Gated(max_delay=0.01)
        async with anyio.create_task_group() as group:
            group.start_soon(gated.call, row(1))
            await settle()
            group.start_soon(gated.call, row(2))
            with anyio.fail_after(20):
                while len(gated.batches) < 2:  # noqa: ASYNC110
                    await anyio.sleep(0.002)
            assert gated.batches == [[1], [2]]
            gated.open()

    anyio.run(main, backend=backend)


@BACKENDS
def test_first_come_first_served(backend: str) -> None:
    async def main() -> None:
        gated = Gated(max_size=2)
        async with anyio.create_task_group() as group:
            group.start_soon(gated.call, row(0), 1.0)
            await settle()
            # One lonely call among many of another kind is served in its turn, and not behind them all.
            for value in range(1, 14):
                group.start_soon(gated.call, row(value), 3.0 if value == 4 else 2.0)
                await settle()
            for _ in range(20):
                gated.open()
                await settle()
        firsts = [b[0] for b in gated.batches]
        assert firsts == sorted(firsts) and gated.batches[:4] == [[0], [1, 2], [3, 5], [4]]
        served = [v for b in gated.batches for v in b]
        assert [v for v in served if v != 4] == [v for v in range(14) if v != 4]

    anyio.run(main, backend=backend)


@BACKENDS
def test_a_full_queue_refuses_and_says_when_to_come_again(backend: str) -> None:
    async def main() -> None:
        gated = Gated(max_queue=3, max_size=1)
        async with anyio.create_task_group() as group:
            for value in range(2):
                group.start_soon(gated.call, row(value))
                await settle()
            for value in range(2, 5):
                group.start_soon(gated.call, row(value))
                await settle()
            for _ in range(2):
                with pytest.raises(dtorch.OverloadedError, match="3 requests are waiting, and max_queue=3") as caught:
                    await gated.call(row(9))
                assert caught.value.retry_after > 0
            for gate in range(5):
                gated.gates[gate].set()
                await settle()
        m = dataclasses.asdict(gated.call.metrics)
        assert {name: n for name, n in m.items() if n} == {
            **{"requests": 7, "refused": 2, "completed": 5},
            **{"batches": 5, "rows": 5},
        }
        # There is room again.
        async with anyio.create_task_group() as group:
            group.start_soon(gated.call, row(1))
            await settle()
            gated.open()
        assert gated.batches == [[0], [1], [2], [3], [4], [1]]

    anyio.run(main, backend=backend)


# -- the function, as its callers see it ----------------------------------------------------------------------------


class Model:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    @batched(max_size=4)
    async def scale(self, x: torch.Tensor, *, offset: float = 0.0) -> torch.Tensor:
        """Its help."""
        return x * self.factor + offset


def test_the_signature_is_the_functions_and_a_method_is_a_method() -> None:
    assert str(inspect.signature(Model.scale)).startswith("(self, x: ")
    models = [Model(2), Model(3)]
    model = models[0]
    assert str(inspect.signature(model.scale)) == str(inspect.signature(Model.scale)).replace("self, ", "")
    assert model.scale.__name__ == "scale" and model.scale.__doc__ == "Its help."

    async def main() -> None:
        got = await together([lambda m=m, i=i: m.scale(row(i), offset=1.0) for i in range(3) for m in models])
        assert [t.item() for t in got] == [1, 1, 3, 4, 5, 7]
        assert (await model.scale.unbatched(row(5))).item() == 10
        assert (await Model.scale(model, row(5))).item() == 10
        assert model.scale.metrics.requests == 3 == models[1].scale.metrics.completed
        assert model.scale.metrics.batches == 1 == Model.scale.metrics.requests
        with pytest.raises(TypeError, match="unexpected keyword argument 'ofset'"):
            await model.scale(row(1), ofset=1)

    anyio.run(main)
    gone = weakref.ref(models.pop())
    gc.collect()
    assert gone() is None and len(Model.scale._instances) == 1


@BACKENDS
def test_modes_of_callers_hold_for_their_batches_and_leak_to_nobody(backend: str) -> None:
    other = init_device_mesh("cpu", (2,), mesh_dim_names=["dp"])

    @batched(max_delay=0)
    async def tell(x: torch.Tensor) -> torch.Tensor:
        await anyio.sleep(0.001)
        meshes = [None, other]
        held = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"))
        named = meshes.index(other if dtorch.get_default_device_mesh() == other else None)
        return torch.tensor([[*map(int, held), named]]).expand(len(x), -1)

    x = row(1)

    async def under(manager: Any) -> list[int]:
        with manager:
            got = await tell(x)
        assert type(got) is torch.Tensor
        return got[0].tolist()

    async def main() -> None:
        leaks: list[bool] = []

        async def watch() -> None:
            for _ in range(30):
                leaks.append(not torch.is_grad_enabled() or torch.is_inference_mode_enabled())
                await anyio.sleep(0.0005)

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            got = await together(
                [
                    lambda: under(torch.no_grad()),
                    lambda: under(torch.enable_grad()),
                    lambda: under(torch.inference_mode()),
                    lambda: under(torch.autocast("cpu", torch.bfloat16)),
                    lambda: under(dtorch.device_mesh(other)),
                ]
                * 3
            )
        assert got == [[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]] * 3
        assert not any(leaks) and tell.metrics.batches == 5

    anyio.run(main, backend=backend)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda f: f(dtorch.ones(2, 2)),
            TypeError,
            r"made of plain torch tensors[^$]*await f\(await t\)",
        ),
        (lambda f: f(torch.tensor(1.0)), TypeError, r"this one has no dims"),
        (lambda f: f(torch.ones(1, 1, requires_grad=True)), TypeError, r"f\(t.detach\(\)\)"),
        (lambda f: f(3), TypeError, "none of its arguments is a tensor"),
        (lambda f: f((torch.ones(2, 1), torch.ones(3, 1))), ValueError, r"differ in it: \[2, 1\], \[3, 1\]"),
        (lambda f: f(torch.ones(2, 1).to_sparse()), TypeError, "dense tensors"),
        (lambda f: f(torch.ones(2, 1), "sum"), ValueError, r"2 rows here, and one has the shape \[1\]"),
        (lambda f: f(torch.ones(2, 1), "names"), TypeError, "this one returned str"),
    ],
)
def test_what_cannot_be_a_batch_is_refused(call: Any, error: type[Exception], message: str) -> None:
    @batched()
    async def f(x: Any, result: str = "x") -> Any:
        return {"x": x, "sum": x.sum(0) if result == "sum" else None, "names": ["a"] if result == "names" else []}[
            result
        ]

    async def main() -> None:
        with pytest.raises(error, match=message):
            await call(f)
        assert (await f(torch.ones(2, 1))).tolist() == [[1], [1]]

    anyio.run(main)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_size": 0}, "max_size=0"),
        ({"max_queue": 0}, "max_queue=0"),
        ({"max_delay": -1}, "max_delay=-1"),
        ({"pad": (0, 0)}, "dim 0 holds the rows"),
        ({"unpad": 1}, "give pad= as well"),
        ({"pad": "x"}, "write a number"),
        ({"pad": (0, None)}, "write a number"),
        ({"max_delay": "x"}, "max_delay='x'.*: expected seconds, at least 0"),
        ({"max_delay": None}, "max_delay=None.*: expected seconds, at least 0"),
        ({"max_delay": float("nan")}, "max_delay=nan.*: expected seconds, at least 0"),
        ({"pad": 0, "pad_lengths": 5}, "pad_lengths=5: write a list of lengths"),
        ({"pad": 0, "pad_lengths": "12"}, "pad_lengths='12': write a list of lengths"),
        ({"pad": 0, "pad_lengths": []}, r"pad_lengths=\[\] leaves no length to pad to"),
        ({"pad": 0, "pad_lengths": ["a"]}, "'a' is no whole number"),
        ({"pad": 0, "pad_lengths": [8, 0]}, "0 is less than 1"),
    ],
)
def test_options_are_checked_where_they_are_given(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        batched(**options)
    with pytest.raises(TypeError, match=r"@batched\(max_size=32\)"):
        batched()(3)  # type: ignore[arg-type]


def test_forgotten_parentheses_and_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"@batched above f .*\n  Write:  @batched\(\)"):

        @batched  # type: ignore[arg-type]
        async def f(x: torch.Tensor) -> torch.Tensor:
            return x

    @batched(pad=0, pad_lengths=range(8, 33, 8))
    async def g(x: torch.Tensor) -> torch.Tensor:
        return x

    async def main() -> None:
        with pytest.raises(TypeError, match=r"^g\(\) got an unexpected keyword argument 'zz'$"):
            await g(row(1), zz=2)
        with pytest.raises(TypeError, match=r"^g\(\) missing a required argument: 'x'$"):
            await g()
        with pytest.raises(TypeError, match=r"^Model.scale\(\) got an unexpected keyword argument 'ofset'$"):
            await Model(2).scale(row(1), ofset=1)
        assert (await g(torch.ones(1, 20))).shape == (1, 24) and counted(g)

    anyio.run(main)
