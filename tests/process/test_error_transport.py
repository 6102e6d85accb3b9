"""What becomes of an exception on its way from an executor to whoever asks: the best that can honestly be had."""

from __future__ import annotations

import asyncio
import copy
import functools
import operator
import pickle
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard, init_device_mesh
from dtorch.runtime import failures
from dtorch.runtime.client import client

from .scripts import run_body


@pytest.fixture(scope="module")
def mesh() -> dtorch.DeviceMesh:
    return init_device_mesh("cpu", (2,))


@pytest.fixture(autouse=True)
def _settled() -> Iterator[None]:
    yield
    c = client()
    c.drain()
    c.failures._asked |= set(c.failures._reports)


def remote(mesh: dtorch.DeviceMesh, make: Callable[[], BaseException]) -> dtorch.RemoteError:
    """The error that arrives when rank 1 raises ``make()``; the executor it ran on still works afterwards."""

    def local(rank: int) -> torch.Tensor:
        if rank == 1:
            raise make()
        return torch.ones(2)

    made = dtorch.from_local(local, mesh, [Shard(0)], shape=(4,))
    with pytest.raises(dtorch.RemoteError) as caught:
        made.to_torch()
    assert caught.value.rank == 1 and caught.value.ranks == (1,)
    assert caught.value.site.endswith(f":{remote.__code__.co_firstlineno + 8} in remote")
    assert "in local\n" in caught.value.executor_traceback
    assert dtorch.ones(2, device_mesh=mesh).to_local(1).tolist() == [1, 1]
    return caught.value


# -- builtin types --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        IndexError("out of range", 3),
        KeyError("name"),
        ZeroDivisionError(),
        FileNotFoundError(2, "No such file or directory", "weights.pt"),
        UnicodeDecodeError("utf-8", b"ab\xff", 2, 3, "invalid start byte"),
        ImportError("no module", name="numpy", path="/tmp/numpy.py"),
        SyntaxError("invalid syntax", ("file.py", 3, 7, "x = = 1")),
        TimeoutError("too slow"),
        MemoryError("no memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        NotImplementedError("later"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_builtin_types_arrive_whole(mesh: dtorch.DeviceMesh, error: Exception) -> None:
    got = remote(mesh, lambda: error)
    assert isinstance(got, type(error)) and type(got).__name__ == type(error).__name__
    assert str(got) == str(error) and got.args == error.args
    for name in ("errno", "strerror", "filename", "start", "reason", "name", "path", "lineno", "text", "object"):
        if hasattr(error, name):
            assert getattr(got, name) == getattr(error, name)


@pytest.mark.parametrize(
    "error",
    [
        StopIteration(7),
        StopAsyncIteration(),
        KeyboardInterrupt(),
        SystemExit(3),
        GeneratorExit("x"),
        asyncio.CancelledError(),
    ],
    ids=lambda e: type(e).__name__,
)
def test_types_that_steer_arrive_as_runtime_errors(mesh: dtorch.DeviceMesh, error: BaseException) -> None:
    got = remote(mesh, lambda: error)
    name = type(error).__name__
    assert isinstance(got, RuntimeError) and not isinstance(got, type(error))
    assert str(got) == (f"{name}: {error}" if str(error) else name)
    assert name in got.executor_traceback


def test_stop_iteration_ends_no_loop_and_no_coroutine(mesh: dtorch.DeviceMesh) -> None:
    def local(rank: int) -> torch.Tensor:
        return next(iter([]))

    bad = dtorch.from_local(local, mesh, [Shard(0)], shape=(4,))

    class Rows:
        def __iter__(self) -> Rows:
            return self

        def __next__(self) -> torch.Tensor:
            return bad.to_torch()

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(Rows())

    async def ask() -> None:
        with pytest.raises(dtorch.RemoteError, match="StopIteration"):
            await bad

    asyncio.run(ask())


def test_steering_types_from_an_operator_of_the_users() -> None:
    """The pool goes on after ``sys.exit`` and an interrupt inside an operator, on executors of one and of two ranks."""
    done = run_body("""
        import sys
        import torch, dtorch

        @torch.library.custom_op("mine::leave", mutates_args=())
        def leave(x: torch.Tensor) -> torch.Tensor:
            sys.exit("enough")

        @leave.register_fake
        def _(x):
            return torch.empty_like(x)

        dtorch.configure(cpu_executors=2)
        for n in (2, 4):
            mesh = dtorch.init_device_mesh("cpu", (n,))
            x = dtorch.ones(4, device_mesh=mesh)
            for _ in range(2):
                try:
                    leave(x).to_torch()
                except RuntimeError as error:
                    print(isinstance(error, dtorch.RemoteError), error, error.rank)
            print((x + 1).sum().item())
    """)
    assert done.stdout == "True SystemExit: enough 0\nTrue SystemExit: enough 0\n8.0\n" * 2
    assert done.stderr == ""


# -- types of the user's --------------------------------------------------------------------------------------------


class PickyError(ValueError):
    """Its constructor wants what does not end up in ``args``."""

    def __init__(self, what: str, *, code: int) -> None:
        super().__init__(f"{what} failed")
        self.what, self.code = what, code
        self.handle = lambda: code  # goes by value

    def __str__(self) -> str:
        return f"[{self.code}] {self.what}"


class SlottedError(Exception):
    __slots__ = ("code", "never_set")

    def __init__(self, code: int) -> None:
        self.code = code


class SilentError(Exception):
    """Nothing can be asked of it."""

    def __str__(self) -> str:
        raise LookupError("no text")

    __repr__ = __str__


class UnpicklableError(OSError):
    def __init__(self, message: str) -> None:
        super().__init__(5, message)
        self.generator = (i for i in range(3))  # nothing pickles one
        self.kept = [1, 2]

    def __reduce__(self) -> Any:
        raise TypeError("not me")


class GuardedError(Exception):
    """``rank`` is taken, and can be read only."""

    @property
    def rank(self) -> int:
        return 99

    @property
    def size(self) -> int:
        return 4


@dataclass(frozen=True)
class FrozenError(Exception):
    code: int
    where: str


class ClosedError(ArithmeticError):
    """Nobody derives from it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise RuntimeError("final")


class StrictNewError(Exception):
    def __new__(cls, left: int, right: int) -> StrictNewError:
        made = super().__new__(cls, left + right)
        made.total = left + right
        return made

    def __init__(self, left: int, right: int) -> None:
        super().__init__(left + right)

    total: int


def test_a_constructor_that_args_do_not_feed(mesh: dtorch.DeviceMesh) -> None:
    got = remote(mesh, lambda: PickyError("loading", code=7))
    assert isinstance(got, PickyError) and isinstance(got, ValueError)
    assert str(got) == "[7] loading" and got.args == ("loading failed",)
    assert (got.what, got.code, got.handle()) == ("loading", 7, 7)


def test_a_type_that_lets_nobody_set_anything(mesh: dtorch.DeviceMesh) -> None:
    got = remote(mesh, lambda: FrozenError(4, "there"))
    assert isinstance(got, FrozenError) and (got.code, got.where) == (4, "there")
    assert "issued at" in "\n".join(got.__notes__)


def test_slots(mesh: dtorch.DeviceMesh) -> None:
    got = remote(mesh, lambda: SlottedError(5))
    assert isinstance(got, SlottedError) and got.code == 5 and got.args == (5,)
    assert not hasattr(got, "never_set")


def test_a_type_whose_text_raises(mesh: dtorch.DeviceMesh) -> None:
    got = remote(mesh, lambda: SilentError("inside"))
    assert isinstance(got, SilentError) and got.args == ("inside",)
    assert str(got) == "('inside') (its __str__ raised LookupError)"
    assert repr(got).startswith("SilentError(")
    "".join(traceback.format_exception(got))


def test_what_does_not_pickle_arrives_as_text(mesh: dtorch.DeviceMesh) -> None:
    got = remote(mesh, lambda: UnpicklableError("disk"))
    assert isinstance(got, UnpicklableError) and got.errno == 5 and str(got) == "[Errno 5] disk"
    assert got.kept == [1, 2] and "<generator object" in got.generator

    def with_a_generator() -> BaseException:
        return ValueError("sequence", (i for i in range(3)), 4)

    got = remote(mesh, with_a_generator)
    assert isinstance(got, ValueError) and got.args[0] == "sequence" and got.args[2] == 4
    assert "<generator object" in got.args[1]


def test_names_that_are_taken(mesh: dtorch.DeviceMesh) -> None:
    got = remote(mesh, lambda: GuardedError("x"))  # which asks for got.rank == 1
    assert isinstance(got, GuardedError) and got.size == 4


def test_a_type_that_cannot_be_derived_from(mesh: dtorch.DeviceMesh) -> None:
    got = remote(mesh, lambda: ClosedError("of no use"))
    assert isinstance(got, ArithmeticError) and type(got).__name__ == "ClosedError" and str(got) == "of no use"


def test_a_new_with_arguments_of_its_own(mesh: dtorch.DeviceMesh) -> None:
    got = remote(mesh, lambda: StrictNewError(1, 2))
    assert isinstance(got, StrictNewError) and got.args == (3,) and got.total == 3


def test_a_local_type(mesh: dtorch.DeviceMesh) -> None:
    lock = object()

    class LocalError(LookupError):
        seen = lock

    got = remote(mesh, functools.partial(LocalError, "here"))
    assert isinstance(got, LookupError) and type(got).__name__ == "LocalError" and str(got) == "here"


def test_types_of_main_and_of_modules_that_the_client_lacks() -> None:
    done = run_body("""
        import sys, types
        import torch, dtorch

        class MainError(ValueError):
            def __init__(self, code, detail):
                super().__init__(f"{code}: {detail}")
                self.code = code

        def fails(rank):
            raise MainError(rank, "from main")

        def fails_elsewhere(rank):
            module = types.ModuleType("only_there")
            source = "class ThereError(KeyError): pass\\nclass Detail:\\n    def __repr__(self): return 'Detail!'"
            exec(source, vars(module))
            sys.modules["only_there"] = module
            error = module.ThereError(module.Detail(), 3)
            error.detail = module.Detail()
            raise error

        mesh = dtorch.init_device_mesh("cpu", (2,))
        try:
            dtorch.from_local(fails, mesh, [dtorch.Shard(0)], shape=(4,)).to_torch()
        except MainError as error:
            print(type(error).__name__, error, error.code, error.ranks, isinstance(error, dtorch.RemoteError))
        try:
            dtorch.from_local(fails_elsewhere, mesh, [dtorch.Shard(0)], shape=(4,)).to_torch()
        except KeyError as error:
            print(f"{type(error).__module__}.{type(error).__name__}", error, error.args, error.detail)
            print(isinstance(error, dtorch.RemoteError), "only_there" in sys.modules)
    """)
    assert done.stdout.splitlines() == [
        "MainError 0: from main 0 (0,) True",
        "only_there.ThereError (Detail!, 3) ('Detail!', 3) Detail!",
        "True False",
    ]
    # The second rank of the first one failed otherwise: it is listed beside the first.
    assert done.stderr == ""


# -- size, notes, chains, groups ------------------------------------------------------------------------------------


def test_huge_arguments_are_cut(mesh: dtorch.DeviceMesh) -> None:
    got = remote(mesh, lambda: ValueError("y" * 10_000_000, list(range(1_000_000)), b"small"))
    text, numbers, small = got.args
    assert small == b"small"
    assert text.startswith("yyyy") and text.endswith("(10,000,000 characters in all)") and len(text) < 100_000
    assert numbers.startswith("[0, 1, 2") and "characters in all" in numbers
    assert len(pickle.dumps(got)) < 1_000_000


def test_notes_and_chains(mesh: dtorch.DeviceMesh) -> None:
    def chained() -> BaseException:
        try:
            try:
                {}["first"]
            except KeyError as error:
                raise PickyError("second", code=2) from error
        except PickyError as error:
            error.add_note("a note of the cause")
            third = IndexError("third")
            third.add_note("a note of the user's")
            try:
                raise third  # while the second is handled: its context
            except IndexError as found:
                return found

    got = remote(mesh, chained)
    assert isinstance(got, IndexError) and got.__notes__[0] == "a note of the user's"
    second = got.__context__
    assert isinstance(second, PickyError) and second.__notes__ == ["a note of the cause"]
    assert isinstance(second.__cause__, KeyError) and second.__cause__.args == ("first",)
    text = got.executor_traceback
    assert text.index("KeyError: 'first'") < text.index("PickyError: [2] second") < text.index("IndexError: third")
    assert "The above exception was the direct cause" in text and "During handling of the above" in text


def test_a_chain_that_bites_its_tail(mesh: dtorch.DeviceMesh) -> None:
    def cycle() -> BaseException:
        a, b = ValueError("a"), ValueError("b")
        a.__cause__, b.__cause__ = b, a
        return a

    got = remote(mesh, cycle)
    assert str(got) == "a" and str(got.__cause__) == "b" and got.__cause__.__cause__ is None


def test_groups(mesh: dtorch.DeviceMesh) -> None:
    def group() -> BaseException:
        return ExceptionGroup(
            "several",
            [ValueError(1), PickyError("x", code=3), ExceptionGroup("inner", [OSError(2, "no"), SilentError()])],
        )

    got = remote(mesh, group)
    assert isinstance(got, ExceptionGroup) and got.message == "several" and len(got.exceptions) == 3
    found: list[Any] = []
    try:
        raise got
    except* ValueError as values:
        found += values.exceptions
    except* OSError as errors:
        found += errors.exceptions
    except* SilentError as silent:
        found += silent.exceptions
    assert [type(e).__name__ for e in found] == ["ValueError", "PickyError", "ExceptionGroup", "ExceptionGroup"]
    assert found[2].exceptions[0].errno == 2


def test_errors_pickle_and_copy(mesh: dtorch.DeviceMesh) -> None:
    got = remote(mesh, lambda: PickyError("loading", code=7))
    got.handle = None
    for again in (pickle.loads(pickle.dumps(got)), copy.copy(got)):
        assert type(again) is type(got) and str(again) == "[7] loading" and again.rank == 1 and again.site == got.site
        assert again.__notes__ == got.__notes__
    got.args = ("changed",)
    assert str(got) == "[7] loading"  # the user's own str, which does not look at them
    other = remote(mesh, lambda: ValueError("before"))
    other.args = ("after",)
    assert str(other) == "after"


# -- who says what --------------------------------------------------------------------------------------------------


def test_the_same_on_all_ranks_is_told_once() -> None:
    mesh = init_device_mesh("cpu", (8,))
    rows = dtorch.distribute_tensor(torch.full((8,), 99), mesh, [Shard(0)])
    weight = dtorch.ones(8, 4, device_mesh=mesh)
    for _ in range(2):  # the first run of a plan is not like the later ones
        bad = torch.nn.functional.embedding(rows, weight)
        with pytest.raises(IndexError) as caught:
            bad.to_torch()
        error = caught.value
        assert isinstance(error, dtorch.RemoteError) and error.rank == 0 and error.ranks == tuple(range(8))
        text = "".join(traceback.format_exception(error))
        assert text.count("on ranks 0-7 (cpu)") == 1 and text.count("index out of range in self") == 2, text


def test_different_failures_of_several_ranks_are_listed() -> None:
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))

    def local(rank: int) -> torch.Tensor:
        if rank == 5:
            return torch.ones(2)
        raise [ValueError("left"), KeyError("right")][rank % 2]

    bad = dtorch.from_local(local, mesh, [Shard(0), Shard(1)], shape=(2, 3))
    with pytest.raises(ValueError, match="left") as caught:
        bad.to_torch()
    error = caught.value
    assert isinstance(error, dtorch.RemoteError) and error.ranks == (0, 2, 4)
    notes = "\n".join(error.__notes__)
    assert "on ranks 0, 2, 4 (cpu)" in notes
    assert "  and on ranks 1, 3 (cpu): KeyError: 'right'" in notes


def test_asking_again_does_not_grow(mesh: dtorch.DeviceMesh) -> None:
    def local(rank: int) -> torch.Tensor:
        raise ValueError("again")

    bad = dtorch.from_local(local, mesh, [Shard(0)], shape=(4,))
    future = bad.to_torch_async()
    asks: list[Callable[[], Any]] = [future.get, bad.to_torch, lambda: asyncio.run(bad.ready())]
    for ask in asks:
        lengths: list[int] = []
        for _ in range(4):
            with pytest.raises(ValueError) as caught:
                ask()
            lengths.append(len("".join(traceback.format_exception(caught.value))))
            assert [e for e in _chain(caught.value) if e is not caught.value] == []
        # How many commands were issued since is part of the text.
        assert max(lengths) - min(lengths) < 20, lengths


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


# -- where failures happen ------------------------------------------------------------------------------------------


def bad_rows(mesh: dtorch.DeviceMesh) -> dtorch.Tensor:
    weight = dtorch.ones(8, 4, device_mesh=mesh)
    rows = torch.zeros(4, dtype=torch.int64)
    rows[3] = 99
    return torch.nn.functional.embedding(
        dtorch.distribute_tensor(rows, mesh, [Shard(0)] + [Replicate()] * (mesh.ndim - 1)), weight
    )


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=str)
def test_the_root_is_told_of_wherever_it_is_met(shape: tuple[int, ...]) -> None:
    """On 1-D and 2-D meshes, with several ranks per executor: through views, lists, writes, moves and backward."""
    mesh = init_device_mesh("cpu", shape)
    replicate = [Replicate()] * mesh.ndim
    wanted = f":{bad_rows.__code__.co_firstlineno + 4} in bad_rows"
    kept = torch.nn.Parameter(dtorch.ones(4, device_mesh=mesh))
    target = dtorch.zeros(4, 4, device_mesh=mesh, placements=[Shard(0)] + [Replicate()] * (mesh.ndim - 1))
    view = target[:, :2]

    def backward() -> torch.Tensor:
        kept.grad = None
        (bad_rows(mesh) * kept).sum().redistribute(placements=replicate).backward()
        assert kept.grad is not None
        return kept.grad

    def through_a_write() -> torch.Tensor:
        target.add_(bad_rows(mesh))
        return target

    def captured() -> torch.Tensor:
        factor = 2.0
        return (lambda: bad_rows(mesh) * factor)()

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "view": lambda: bad_rows(mesh).t()[:1],
        "redistribute": lambda: bad_rows(mesh).redistribute(placements=replicate),
        "there and back": lambda: bad_rows(mesh).redistribute(placements=replicate).sum(0),
        "foreach": lambda: torch._foreach_mul([bad_rows(mesh), bad_rows(mesh)], 2.0)[1],
        "in place": lambda: bad_rows(mesh).mul_(2),
        "write": through_a_write,
        "view of a write": lambda: view,
        "closure": captured,
        "backward": backward,
    }
    for name, way in ways.items():
        with pytest.raises(IndexError, match="index out of range") as caught:
            way().to_torch()
        error = caught.value
        assert isinstance(error, dtorch.RemoteError), name
        assert error.site.endswith(wanted), (name, error.site)
        assert error.operator.startswith("embedding("), (name, error.operator)
    dtorch.clear_errors()
    if shape == (2, 2):
        # Ranks 2 and 3 failed. They lie on both executors, and one that has lost a rank's piece writes none.
        assert target.to_torch().eq(0).all()
    else:
        with pytest.raises(dtorch.TensorLostError):
            target.to_torch()
    assert kept.to_torch().tolist() == [1, 1, 1, 1]


def test_the_await_is_not_the_site(mesh: dtorch.DeviceMesh) -> None:
    async def main() -> None:
        bad = bad_rows(mesh)
        await asyncio.sleep(0)
        with pytest.raises(IndexError) as caught:
            await bad
        assert isinstance(caught.value, dtorch.RemoteError) and caught.value.site.endswith("in bad_rows")
        assert operator.contains(caught.value.operator, "float32[8, 4] [Replicate()]")

    asyncio.run(main())


def test_a_program_that_fails_for_ever_does_not_grow(mesh: dtorch.DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "KEPT", 64)
    first = bad_rows(mesh)
    c = client()
    with pytest.raises(IndexError):
        first.to_torch()
    for _ in range(200):
        with pytest.raises(IndexError):
            bad_rows(mesh).redistribute(placements=[Replicate()]).to_torch()
    f = c.failures
    assert len(f._reports) <= 64 and len(f._asked) < 256 and len(f._causes) <= 16 * 64
    with pytest.raises(dtorch.RemoteError, match="no longer known: only the last 64 failures"):
        first.to_torch()
