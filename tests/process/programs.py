"""Random programs run twice: on plain tensors, and on tensors spread over a mesh.

A program is a list of steps, each a few small integers, which :class:`Program` reads as "which operator, on which
tensors, with which arguments". So any list is a program, and a shorter or smaller list is a simpler one: hypothesis
shrinks them well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

import dtorch
from dtorch import Partial, Replicate, Shard

MESHES = {"2": (2,), "3": (3,), "2x2": (2, 2)}
LARGEST = 1e6


class Pair:
    """One value, as torch holds it and as dtorch does."""

    def __init__(self, plain: torch.Tensor, ours: torch.Tensor) -> None:
        self.plain, self.ours = plain, ours

    def __repr__(self) -> str:
        where = list(self.ours.placements) if isinstance(self.ours, dtorch.Tensor) else "plain"
        return f"{str(self.plain.dtype)[6:]}{list(self.plain.shape)} {where}"


class Digits:
    """The small integers of one step, read one after another; 0 when they run out."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self._numbers = itertools.chain(numbers, itertools.repeat(0))

    def below(self, n: int) -> int:
        return next(self._numbers) % n if n > 0 else 0

    def of(self, values: Any) -> Any:
        return values[self.below(len(values))]


class Skip(Exception):
    """The step means nothing here."""


Step = tuple[list[Pair], Callable[..., Any], bool]
Steps = list[tuple[str, tuple[int, ...]]]
Maker = Callable[["Program", Digits], Step]
OPERATORS: dict[str, Maker] = {}


def operator(name: str) -> Callable[[Maker], Maker]:
    def add(maker: Maker) -> Maker:
        OPERATORS[name] = maker
        return maker

    return add


def simple(name: str, f: Callable[..., Any], *, steep: bool = False, floating: bool = True) -> None:
    """One tensor in. `steep`: a rounding error in is no rounding error out, so that it wants equal inputs."""
    OPERATORS[name] = lambda p, d: ([p.pick(d, floating=floating)], f, steep)


class Program:
    """Runs steps on both sides and compares. `trace` is the program in words."""

    def __init__(self, mesh: dtorch.DeviceMesh, *, auto: bool = False, seed: int = 0) -> None:
        self.mesh, self.auto = mesh, auto
        self.pairs: list[Pair] = []
        self.leaves: list[Pair] = []
        self.trace: list[str] = []
        self.ran = self.refused = 0
        self.random = torch.Generator().manual_seed(seed)

    # -- choosing -----------------------------------------------------------------------------------------------

    def pick(self, d: Digits, *, floating: bool = False, ndim: int = 0, where: Any = None) -> Pair:
        def fits(p: Pair) -> bool:
            return (
                (not floating or p.plain.is_floating_point())
                and p.plain.ndim >= ndim
                and (where is None or where(p.plain))
            )

        found = [p for p in self.pairs if fits(p)]
        if not found:
            raise Skip
        # Recent tensors are more telling than old ones.
        return found[-1 - d.below(len(found))]

    def beside(self, d: Digits, a: Pair, *, floating: bool = True) -> Pair:
        """A tensor that broadcasts with `a`."""

        def fits(t: torch.Tensor) -> bool:
            try:
                torch.broadcast_shapes(t.shape, a.plain.shape)
            except RuntimeError:
                return False
            return t.is_floating_point() or not floating

        return self.pick(d, where=fits)

    def into(self, d: Digits, a: Pair) -> Pair:
        """A tensor that can be written over `a`."""

        def fits(t: torch.Tensor) -> bool:
            # What is read while it is written has no value to compare.
            if t is not a.plain and t.untyped_storage().data_ptr() == a.plain.untyped_storage().data_ptr():
                return False
            try:
                return torch.broadcast_shapes(t.shape, a.plain.shape) == a.plain.shape and t.is_floating_point()
            except RuntimeError:
                return False

        return self.pick(d, where=fits)

    def values(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Multiples of 1/8: their sums and products are exact."""
        return torch.randint(-16, 17, shape, generator=self.random).double() / 8

    def indices(self, n: int, shape: tuple[int, ...]) -> torch.Tensor:
        if n == 0:
            raise Skip
        return torch.randint(0, n, shape, generator=self.random)

    # -- tensors ------------------------------------------------------------------------------------------------

    def placements(self, d: Digits, shape: tuple[int, ...], *, partial: bool = True) -> list[Any]:
        kinds = ["sum", "avg", "max", "min"] if partial else []
        kind = d.of(kinds) if partial else ""
        found: list[Any] = []
        for _ in range(self.mesh.ndim):
            choices: list[Any] = [Shard(i) for i in range(len(shape))]
            choices += [Replicate(), *([Partial(kind)] if kind else [])]
            found.append(d.of(choices))
        return found

    def lay(self, value: torch.Tensor, placements: list[Any]) -> dtorch.Tensor:
        """`value` on the mesh; ranks that hold summands hold different ones."""
        if not any(isinstance(p, Partial) for p in placements):
            return dtorch.distribute_tensor(value, self.mesh, placements)
        outer = [p if isinstance(p, Shard) else Replicate() for p in placements]
        shards = dtorch.distribute_tensor(value, self.mesh, outer)
        pieces = [shards.to_local(r) for r in range(self.mesh.nranks)]
        for dim, p in enumerate(placements):
            if not isinstance(p, Partial):
                continue
            made: dict[Any, list[torch.Tensor]] = {}  # replicas hold the same summands
            for start in range(self.mesh.nranks):
                if self.mesh.coordinates[start][dim] == 0:
                    step = math.prod(self.mesh.shape[dim + 1 :])
                    line = [start + step * i for i in range(self.mesh.shape[dim])]
                    own = tuple(
                        -1 if isinstance(q, Replicate) else c
                        for q, c in zip(placements, self.mesh.coordinates[start], strict=True)
                    )
                    if own not in made:
                        made[own] = self.split(pieces[start], len(line), p.reduce_op)
                    parts = made[own]
                    for r, part in zip(line, parts, strict=True):
                        pieces[r] = part
        return dtorch.DTensor.from_local(pieces, self.mesh, placements, shape=tuple(value.shape))

    def split(self, whole: torch.Tensor, n: int, kind: str) -> list[torch.Tensor]:
        """`n` different tensors that reduce to `whole`."""
        if not whole.is_floating_point():
            return [whole if i == 0 or kind != "sum" else torch.zeros_like(whole) for i in range(n)]
        noise = [self.values(tuple(whole.shape)) for _ in range(n)]
        if kind in ("sum", "avg"):
            rest = (whole * n if kind == "avg" else whole) - sum(noise[1:])  # type: ignore[operator]
            return [rest, *noise[1:]]
        apart = [x.abs() if kind == "min" else -x.abs() for x in noise]
        apart[n - 1] = torch.zeros_like(whole)
        return [whole + x for x in apart]

    def add(self, plain: torch.Tensor, ours: torch.Tensor) -> None:
        self.pairs.append(Pair(plain, ours))
        del self.pairs[:-12]

    def start(self, d: Digits) -> None:
        """A new tensor of either kind."""
        shape = d.of(
            [(5, 3), (4, 4), (6,), (2, 3, 4), (3,), (1, 5), (7, 2), (), (2, 1, 3), (0, 3), (4, 6), (3, 5), (5,)]
        )
        value = self.values(shape)
        kind = d.below(8)
        if kind == 1:
            self.trace.append(f"plain {list(shape)}")
            self.add(value, value.clone())
            return
        placements = self.placements(d, shape)
        ours = self.lay(value, placements)
        leaf = kind in (2, 3) and not any(isinstance(p, Partial) for p in placements)
        if leaf:
            value.requires_grad_()
            ours.requires_grad_()
        self.add(value, ours)
        if leaf:
            self.leaves.append(self.pairs[-1])
        self.trace.append(f"new {self.pairs[-1]}{' requires grad' if leaf else ''}")

    # -- running ------------------------------------------------------------------------------------------------

    def step(self, name: str, numbers: tuple[int, ...]) -> bool:
        """Run one step. False: the program cannot go on (a value is no longer fit to be compared)."""
        d = Digits(numbers)
        if name.startswith("data") and self.auto:
            return True  # what is written through .data is counted nowhere: torch's autograd does not see it either
        if name == "new":
            self.start(d)
            return True
        try:
            inputs, f, steep = OPERATORS[name](self, d)
        except Skip:
            return True
        text = f"{name}({', '.join(map(repr, inputs))})"
        if not any(isinstance(p.ours, dtorch.Tensor) for p in inputs):
            return True
        if steep and not all(_same(p) for p in inputs):
            return True
        try:
            ours = f(*(p.ours for p in inputs))
        except Exception as error:
            ours = error
            if _refusal(error):
                self.refused += 1
                self.trace.append(f"{text}: refused")
                return True
        try:
            plain = f(*(p.plain for p in inputs))
        except Exception as error:
            plain = error
        self.trace.append(text)
        self.ran += 1
        if isinstance(plain, Exception) or isinstance(ours, Exception):
            if isinstance(plain, Exception) and isinstance(ours, type(plain)):
                return True
            if isinstance(plain, Exception) and _fails_later(plain, inputs, ours):
                return False
            raise AssertionError(f"torch: {plain!r}\ndtorch: {ours!r}") from (
                ours if isinstance(ours, Exception) else None
            )
        for a, b in _both(plain, ours):
            if not any(p.plain is a for p in self.pairs) and _fit(a):
                self.add(a, b)
        return all(_fit(p.plain) for p in self.pairs)

    def run(self, steps: Steps) -> None:
        """All steps; then every tensor, and every gradient, is compared."""
        try:
            with dtorch.auto_redistribute(self.auto):
                for name, numbers in steps:
                    if not self.step(name, numbers):
                        return
                for pair in self.pairs:
                    if not _out_of_date(pair.ours):
                        compare(pair.plain, pair.ours)
            self.backward()
        except Exception as error:
            error.add_note("\n".join([f"on {self.mesh.describe()}:", *self.trace]))
            raise

    def backward(self) -> None:
        try:
            ends = [p for p in self.pairs if p.plain.requires_grad and p.plain.is_floating_point() and p.plain.grad_fn]
        except RuntimeError:
            return  # a view whose base was written in a way that autograd does not follow
        ends = [p for p in ends if isinstance(p.ours, dtorch.Tensor)]
        if not ends or not self.leaves:
            return
        self.trace.append(f"backward from {ends}")
        outcome: list[Any] = []
        for side in ("ours", "plain"):
            try:
                with dtorch.auto_redistribute():
                    total = sum((getattr(p, side) * 0.5).sum() for p in ends)
                total.backward()  # type: ignore[union-attr]
                outcome.append(None)
            except Exception as error:
                outcome.append(error)
        ours, plain = outcome
        if ours or plain:
            if _refusal(ours) or (plain and isinstance(ours, type(plain))):
                return
            raise AssertionError(f"torch: {plain!r}\ndtorch: {ours!r}") from ours
        for leaf in self.leaves:
            grad, mine = leaf.plain.grad, leaf.ours.grad
            assert (grad is None) == (mine is None), (grad, mine)
            if grad is not None and _fit(grad):
                assert isinstance(mine, dtorch.Tensor)
                assert mine.placements == leaf.ours.placements, (mine.placements, leaf)  # type: ignore[attr-defined]
                compare(grad, mine)


def _refusal(error: Any) -> bool:
    return isinstance(error, dtorch.PlacementError) or (
        isinstance(error, RuntimeError) and "a plain torch.Tensor that requires grad met a dtorch" in str(error)
    )


def _out_of_date(t: torch.Tensor) -> bool:
    """Whether `t` is a copy that auto_redistribute made for a view, and refuses to be read."""
    try:
        return isinstance(t, dtorch.Tensor) and t.detach().sum() is None
    except dtorch.PlacementError as error:
        return "out of date" in str(error)


def _fails_later(wanted: Exception, inputs: list[Pair], ours: Any) -> bool:
    """Whether a call that torch refused fails on the executors: what it wrote or made raises when it is read."""
    values = [*(p.ours for p in inputs), *(ours if isinstance(ours, (tuple, list)) else [ours])]
    for value in values:
        if isinstance(value, dtorch.Tensor):
            try:
                value.detach().to_torch()
            except type(wanted):
                return True
    return False


def _same(p: Pair) -> bool:
    if not isinstance(p.ours, dtorch.Tensor):
        return True
    return not _out_of_date(p.ours) and torch.equal(p.ours.detach().to_torch(), p.plain.detach())


def _fit(t: torch.Tensor) -> bool:
    if t.numel() == 0 or not t.is_floating_point():
        return True
    return bool(t.detach().abs().max() < LARGEST)  # also False for NaN


def _both(plain: Any, ours: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if isinstance(plain, torch.Tensor):
        yield plain, ours
    elif isinstance(plain, (tuple, list)):
        assert len(plain) == len(ours)
        for a, b in zip(plain, ours, strict=True):
            yield from _both(a, b)
    else:
        assert plain == ours or math.isclose(plain, ours, rel_tol=1e-9, abs_tol=1e-9), (plain, ours)


def compare(plain: torch.Tensor, ours: torch.Tensor) -> None:
    """The same value, the same layout, and every rank holds its part of it."""
    assert ours.dtype == plain.dtype and ours.shape == plain.shape, (plain.dtype, plain.shape, ours.dtype, ours.shape)
    assert ours.requires_grad == plain.requires_grad
    whole = ours.detach()
    mine = whole.to_torch() if isinstance(whole, dtorch.Tensor) else whole
    torch.testing.assert_close(mine, plain.detach(), rtol=1e-9, atol=1e-8, equal_nan=True)
    if not isinstance(ours, dtorch.Tensor):
        return
    if plain.numel():
        strides = [(n, a, b) for n, a, b in zip(plain.shape, plain.stride(), ours.stride(), strict=True) if n > 1]
        assert all(a == b for _, a, b in strides), f"strides {ours.stride()} where torch has {plain.stride()}"
    spec = ours._spec
    assert spec.shape == tuple(ours.shape) and spec.dtype == ours.dtype
    if spec.is_partial:
        return
    for rank in range(spec.mesh.nranks):
        piece = plain.detach()
        for dim, (start, length) in enumerate(spec.region(rank)):
            piece = piece.narrow(dim, start, length)
        held = whole.to_local(rank)
        torch.testing.assert_close(
            held, piece, rtol=1e-9, atol=1e-8, equal_nan=True, msg=lambda m, r=rank: f"rank {r}: {m}"
        )
