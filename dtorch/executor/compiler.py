"""A plan becomes a Python function: the executor's hot path is source code made once per plan.

A record's words are read straight from the ring, so that running ``c = a + b`` costs two dictionary reads, the
operator, and one dictionary write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..runtime.command import CallPlan, In, LocalCall, NumberIn, OutLayout
from . import kernels, operators
from .device import CPU, Device

__all__ = ["compile_call", "compile_plan", "resolve"]

Run = Callable[[int], None]

# Operators whose Python binding takes the very arguments of the aten overload, and costs 0.4 µs less.
_BINDINGS = frozenset(
    "add sub mul div neg exp log sqrt rsqrt sin cos tanh sigmoid relu abs mm bmm addmm matmul maximum minimum "
    "eq ne lt le gt ge where addcmul addcdiv lerp pow".split()
)


def resolve(name: str) -> Callable[..., Any]:
    """The function behind "aten.add.Tensor" or "dtorch.kernel"."""
    namespace, _, rest = name.partition(".")
    if namespace == "dtorch":
        return kernels.find(rest)
    packet_name, _, overload = rest.rpartition(".")
    if namespace != "aten":
        return operators.find(namespace, packet_name, overload)
    packet = getattr(torch.ops.aten, packet_name)
    if overload in ("Tensor", "default", "self"):
        if packet_name in _BINDINGS:
            return getattr(torch, packet_name)
        if packet_name.endswith("_") and packet_name[:-1] in _BINDINGS and hasattr(torch.Tensor, packet_name):
            return getattr(torch.Tensor, packet_name)
    return getattr(packet, overload)._op


_CPU = CPU()


class _Source:
    """Collects the constants that generated source refers to by name."""

    def __init__(self, device: Device) -> None:
        self.names: dict[str, Any] = {}
        self.device = device

    def constant(self, value: Any) -> str:
        if value is None or type(value) in (int, bool):
            return repr(value)
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def expression(self, arg: Any, numbers: list[str]) -> str:
        if type(arg) is In:
            return f"a{arg.index}"
        if type(arg) is NumberIn:
            return numbers[arg.index]
        if type(arg) is list or type(arg) is tuple:
            parts = [self.expression(x, numbers) for x in arg]
            return f"[{', '.join(parts)}]"
        return self.constant(arg)

    def call(self, call: LocalCall, numbers: list[str]) -> str:
        parts = [self.expression(x, numbers) for x in call.args]
        parts += [f"{k}={self.expression(v, numbers)}" for k, v in call.kwargs.items()]
        function = resolve(call.func)
        if call.func.startswith("dtorch."):
            function = self.device.here(function)
        return f"{self.constant(function)}({', '.join(parts)})"

    def moves(self, call: LocalCall) -> list[str]:
        """Lines that apply the moves before the call."""
        lines = []
        for i, move in enumerate(call.pre):
            if move is None:
                continue
            kind, cuts = move
            for dim, start, length in cuts:
                lines.append(f"a{i} = a{i}.narrow({dim}, {start}, {length})")
            if kind == "zero":
                lines.append(f"a{i} = {self.constant(torch.zeros_like)}(a{i})")
        return lines


def _flatten(result: Any, into: list[Any]) -> list[Any]:
    if isinstance(result, (tuple, list)):
        for x in result:
            _flatten(x, into)
    else:
        into.append(result)
    return into


def flat_outputs(result: Any, outs: tuple[OutLayout | None, ...]) -> list[Any]:
    """The outputs of an operator, lists flattened; undefined ones are None."""
    return _flatten(result, [])


def _zeros(layout: OutLayout | None, device: Device) -> torch.Tensor | None:
    """What a rank with an empty piece has to add: nothing."""
    return None if layout is None else device.empty(layout).zero_()


def same_stride(t: torch.Tensor, layout: OutLayout) -> bool:
    """Whether `t` lies as `layout` says; dims of size 1 and empty tensors may have any stride."""
    shape, stride, _ = layout
    if stride is None or t.numel() == 0:
        return True
    return all(n == 1 or have == want for n, have, want in zip(shape, t.stride(), stride, strict=True))


def compile_call(
    call: LocalCall,
    inputs: int,
    numbers: int,
    fixes: tuple[bool, ...] | None,
    draws: bool = False,
    device: Device = _CPU,
) -> Callable[..., list[Any]]:
    """``f(a0, …, n0, …) -> outputs`` of one rank. `fixes` says which outputs want ``device.restride``."""
    if call.empty and not draws:
        return lambda *_: [_zeros(o, device) for o in call.outs]
    src = _Source(device)
    nums = [f"n{i}" for i in range(numbers)]
    head = ", ".join([*(f"a{i}" for i in range(inputs)), *nums])
    flat = src.constant(flat_outputs)
    lines = [f"def run({head}):", *(f"    {m}" for m in src.moves(call))]
    lines.append(f"    r = {flat}({src.call(call, nums)}, None)")
    for i, fix in enumerate(fixes or ()):
        if fix:
            lines.append(f"    r[{i}] = {src.constant(device.restride)}(r[{i}], {src.constant(call.outs[i])})")
    lines.append("    return r")
    return _evaluate(lines, src, {})


def same_draw(functions: list[Callable[..., Any]], device: Device = _CPU) -> list[Callable[..., Any]]:
    """`functions`, one per rank of this executor, so that each draws what a rank of its own would draw."""
    start: list[torch.Tensor] = []

    def first(f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start[:] = [device.random_state()]
            return f(*args)

        return call

    def later(f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            device.set_random_state(start[0])
            return f(*args)

        return call

    return [first(f) if i == 0 else later(f) for i, f in enumerate(functions)]


def _evaluate(lines: list[str], src: _Source, extra: dict[str, Any]) -> Any:
    namespace = {**src.names, **extra}
    exec(compile("\n".join(lines), "<dtorch plan>", "exec"), namespace)
    return namespace["run"]


def compile_plan(
    plan: CallPlan,
    calls: list[LocalCall],
    fixes: list[tuple[bool, ...]],
    single: bool,
    store: dict[int, Any],
    words: memoryview,
    ints: memoryview,
    doubles: memoryview[float],
    device: Device = _CPU,
) -> Run:
    """``run(p)`` for the record at word `p`, on this executor's ranks.

    `calls` and `fixes` are those of this executor's ranks, in rank order; with `single` a ref is one tensor,
    otherwise a list with one tensor per rank.
    """
    new = [i for i, n in enumerate(plan.outputs) if n]
    base = 1 + len(new)
    base_numbers = base + plan.inputs
    numbers = [f"{'I' if k == 'q' else 'D'}[p + {base_numbers + i}]" for i, k in enumerate(plan.numbers)]
    src = _Source(device)
    extra = {"S": store, "Q": words, "I": ints, "D": doubles}
    lines = ["def run(p):"]
    lines += [f"    a{i} = S[Q[p + {base + i}]]" for i in range(plan.inputs)]
    if single:
        call, fix = calls[0], fixes[0]
        if call.empty and not plan.draws:
            lines += [
                f"    S[Q[p + {1 + k}]] = {src.constant(_zeros)}({src.constant(call.outs[i])}, {src.constant(device)})"
                for k, i in enumerate(new)
            ]
            # Poison must still pass through an operator that has nothing to compute.
            lines += [f"    a{i}.dtype" for i in range(plan.inputs)]
        else:
            if plan.writes and call.func.startswith("dtorch."):
                # A kernel of several steps must not write with the first before the second meets poison.
                lines += [f"    a{i}.dtype" for i in range(plan.inputs)]
            lines += [f"    {m}" for m in src.moves(call)]
            expression = src.call(call, numbers)
            if len(plan.outputs) == 1 and new and not plan.lists:
                if fix and fix[0]:
                    expression = f"{src.constant(device.restride)}({expression}, {src.constant(call.outs[0])})"
                lines.append(f"    S[Q[p + 1]] = {expression}")
            elif not new:
                lines.append(f"    {expression}")
            else:
                lines.append(f"    r = {src.constant(flat_outputs)}({expression}, None)")
                for k, i in enumerate(new):
                    out = f"r[{i}]"
                    if fix and fix[i]:
                        out = f"{src.constant(device.restride)}({out}, {src.constant(call.outs[i])})"
                    lines.append(f"    S[Q[p + {1 + k}]] = {out}")
    else:
        compiled: dict[int, Any] = {}
        per_rank = []
        for call, fix in zip(calls, fixes, strict=True):
            if id(call) not in compiled:
                compiled[id(call)] = compile_call(call, plan.inputs, len(plan.numbers), fix, plan.draws, device)
            per_rank.append(compiled[id(call)])
        fns = src.constant(same_draw(per_rank, device) if plan.draws else per_rank)
        nums = "".join(f", {n}" for n in numbers)
        # Should one of the ranks fail, the list tells how many were done: see failing.
        lines.append("    ranks_done = []")
        if plan.inputs:
            xs = ", ".join(f"a{i}" for i in range(plan.inputs))
            lines.append(f"    for f, *x in zip({fns}, {xs}, strict=True):")
            lines.append(f"        ranks_done.append(f(*x{nums}))")
        else:
            lines.append(f"    for f in {fns}:")
            lines.append(f"        ranks_done.append(f({nums.removeprefix(', ')}))")
        lines += [f"    S[Q[p + {1 + k}]] = [x[{i}] for x in ranks_done]" for k, i in enumerate(new)]
    if len(lines) == 1:
        lines.append("    return")
    return _evaluate(lines, src, extra)
