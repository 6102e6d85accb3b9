"""Rules of random operators: the values depend on the seed and the global index, never on the mesh.

A rank that holds a slice gets the values a single device would have there (see `executor.kernels_random`), and every
rank's generator ends where a single device's would. Distributions that take a varying number of draws per element
(poisson, binomial) run on Replicate only.
"""

from __future__ import annotations

from typing import Any

from .factory import ignores_partial, local_region, packed_stride
from .rule import Call, Local, Rule, names, rule, untied

__all__: list[str] = []

_NUMBERS = ("mean", "std", "from", "to", "lambd", "p", "median", "sigma", "low", "high")


def _is_sharded(local: Local) -> bool:
    return any(f and local.sharded(f) for f in local.rule.outs[0] or ())


def _draw(local: Local, method: str, *args: Any) -> None:
    """Let this rank draw its piece of output 0, a new tensor."""
    meta = local.call.outs[0]
    assert meta is not None
    region = local_region(local)
    stride = packed_stride(tuple(length for _, length in region), meta.stride)
    local.use("dtorch.random_slice", method, meta.shape, meta.stride, region, stride, meta.dtype, *args)


# Factories, as the method that fills them and the arguments it is given.
_METHODS = {"rand": "uniform_", "randn": "normal_", "randint": "random_"}


def _method_of(local: Local, stem: str) -> tuple[str, tuple[Any, ...]]:
    if stem == "randint":
        low = local.arg("low") if "low" in local.call.sig.index else 0
        return "random_", (low, local.arg("high"))
    return _METHODS[stem], (0.0, 1.0)


@rule("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", free=_NUMBERS, always=True)
def random_factory(call: Call) -> Rule | None:
    """Uniform, normal or integers, placed as asked for, or as the model is."""
    if "generator" in call.sig.index or len(call.specs) > 1:
        return None
    meta = call.outs[0]
    assert meta is not None
    dims = names(len(meta.shape))

    def local(local: Local) -> None:
        if _is_sharded(local):
            method, args = _method_of(local, call.stem.removesuffix("_like"))
            _draw(local, method, *args)

    return Rule(
        (dims,) * len(call.specs), (dims,), flows=ignores_partial(call.specs[0]) if call.specs else (), local=local
    )


@rule("randperm", always=True)
def randperm(call: Call) -> Rule | None:
    """The whole permutation, then the piece."""
    if "generator" in call.sig.index:
        return None

    def local(local: Local) -> None:
        if _is_sharded(local):
            local.use("dtorch.random_factory", call.sig.op, local_region(local), *local.args, **local.kwargs)

    return Rule((), (names(1),), local=local)


# Fills of self, and the arguments the method takes.
_FILLS = {
    "uniform": ("from", "to"),
    "exponential": ("lambd",),
    "cauchy": ("median", "sigma"),
    "log_normal": ("mean", "std"),
    "geometric": ("p",),
    "random": ("from", "to"),
}


def _fill(call: Call, arguments: tuple[str, ...]) -> Rule | None:
    if call.arg("generator") is not None:
        return None
    x = call.specs[0]
    dims, method = names(x.ndim), f"{call.stem}_"

    def local(local: Local) -> None:
        if not _is_sharded(local):
            return
        args = [local.arg(a) for a in arguments if a in call.sig.index]
        if call.sig.inplace:
            region = local_region(local)
            local.use("dtorch.random_slice_", local.arg("self"), method, x.shape, x.stride, region, *args)
        else:
            _draw(local, method, *args)

    why = f"A random fill gives every rank its own slice of one tensor, so {call.stem}_ cannot fill a Partial one."
    return Rule((dims,), (dims,), flows=() if call.sig.inplace else ignores_partial(x), local=local, why=why)


@rule(*_FILLS, free=_NUMBERS, always=True)
def fill(call: Call) -> Rule | None:
    """``t.uniform_()`` and the like; self keeps its placements."""
    return _fill(call, _FILLS[call.stem])


@rule("normal", free=_NUMBERS, always=True)
def normal(call: Call) -> Rule | None:
    """``normal_``, and the functions whose mean or standard deviation is a tensor."""
    if not call.overload:
        return _fill(call, ("mean", "std"))
    if call.arg("generator") is not None:
        return None
    meta = call.outs[0]
    assert meta is not None
    dims = names(len(meta.shape))
    ins = tuple(
        tuple("" if s == 1 and meta.shape[d - t.ndim] != 1 else dims[d - t.ndim] for d, s in enumerate(t.shape))
        for t in call.specs
    )

    def local(local: Local) -> None:
        if not _is_sharded(local):
            return
        if not call.specs:
            _draw(local, "normal_", local.arg("mean"), local.arg("std"))
            return
        region = local_region(local)
        stride = packed_stride(tuple(length for _, length in region), meta.stride)
        mean, std = local.arg("mean"), local.arg("std")
        local.use("dtorch.random_normal", mean, std, meta.shape, meta.stride, region, stride, meta.dtype)

    return Rule(ins, (dims,), local=local)


@rule("bernoulli", free=_NUMBERS, always=True)
def bernoulli(call: Call) -> Rule | None:
    """``bernoulli_(p)`` of a number, or one draw for each probability in a tensor."""
    if call.overload in ("float", "p"):
        return _fill(call, ("p",))
    if call.overload or call.arg("generator") is not None:
        return None
    x = call.specs[0]

    def local(local: Local) -> None:
        if _is_sharded(local):
            region = local_region(local)
            local.use("dtorch.random_embed", local.arg("self"), call.sig.op, x.shape, x.stride, region, region, 0.5)

    return Rule((names(x.ndim),), (names(x.ndim),), local=local)


@rule("multinomial", always=True)
def multinomial(call: Call) -> Rule | None:
    """Rows are independent; the dim of the classes must be whole."""
    if call.arg("generator") is not None:
        return None
    x = call.specs[0]
    rows = ("b",) * (x.ndim - 1)

    def local(local: Local) -> None:
        if local.sharded("b"):
            start, length = local.span(x.shape[0], "b")
            region = ((start, length), (0, x.shape[1]))
            out_region = ((start, length), (0, call.arg("num_samples")))
            args = (local.arg("num_samples"), local.arg("replacement", False))
            op = "dtorch.random_embed"
            local.use(op, local.arg("self"), call.sig.op, x.shape, x.stride, region, out_region, 1.0, *args)

    why = "The dim of the classes must be whole on every rank."
    return Rule(((*rows, ""),), ((*rows, *untied(1)),), local=local, why=why)
