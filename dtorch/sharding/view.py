"""Rules of views and of copies that only rearrange: view, permute, expand, squeeze, flip, repeat, pad, …

A view of a shard is a view of the global tensor's piece, so that a write through it reaches the base on every
rank. Where that cannot be (a flattened uneven shard) the placement is not legal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..placement import Shard
from ..spec import TensorSpec
from .cat import moves_values, without
from .rule import Call, Dims, In, Local, Rule, dims_of, linear, names, partials, rule, untied

__all__: list[str] = []


def _sizes_local(name: str) -> Callable[[Local], None]:
    """A ``local`` that gives the argument `name` the shape of this rank's output."""

    def local(at: Local) -> None:
        at.set(name, list(at.out_shape()))

    return local


def _one(call: Call, ins: Dims, out: Dims, *, local: Callable[[Local], None] | None = None, why: str = "") -> Rule:
    """One tensor in, one out, no value changed."""
    return Rule((ins,), (out,), flows=moves_values(call.specs[0]), local=local, why=why)


def _target(call: Call) -> tuple[int, ...]:
    out = call.outs[0]
    assert out is not None
    return out.shape


def _viewed(at: Local) -> None:
    at.use("aten.view.default", In(0), list(at.out_shape()))


_VIEW_WHY = "A view keeps a shard of the first of the dims that it joins or splits, where the pieces stay whole."


@rule("view", "_unsafe_view", "_reshape_alias")
def view(call: Call) -> Rule | None:
    """Groups of dims with equal products are tied by their first dims longer than 1.

    Tied dims have different lengths: the engine checks that both are cut in proportion.
    """
    if call.overload == "dtype":
        return _view_dtype(call)
    x, target = call.specs[0], _target(call)
    # The strides of _reshape_alias are global: the local piece is viewed by shape alone.
    local = _viewed if call.stem == "_reshape_alias" else _sizes_local("size")
    ins, outs = _groups(x.shape, target)
    return _one(call, ins, outs, local=local, why=_VIEW_WHY + _uneven(x))


def _uneven(x: TensorSpec) -> str:
    """What to say where a dim is cut unevenly: the joined dim would be cut elsewhere."""
    for p, n in zip(x.placements, x.mesh.shape, strict=True):
        if type(p) is Shard and x.shape[p.dim] % n:
            size = x.shape[p.dim]
            return (
                f"\n  The {size} of dim {p.dim} are uneven over {n} ranks, so the dims after it cannot join."
                f"\n  A size that {n} divides can: pad it, or leave the rest out (drop_last=True of a loader)."
            )
    return ""


def _groups(shape: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims]:
    """The factors of a view of `shape` as `target`."""
    if tuple(shape) == tuple(target):
        return names(len(shape)), names(len(shape))
    ins, outs = [""] * len(shape), [""] * len(target)
    if 0 in shape:
        return tuple(ins), tuple(outs)
    i = j = 0
    while i < len(shape) and j < len(target):
        first_i, first_j, p, q = i, j, shape[i], target[j]
        i, j = i + 1, j + 1
        while p != q:
            if p < q:
                p *= shape[i]
                i += 1
            else:
                q *= target[j]
                j += 1
        a = next((d for d in range(first_i, i) if shape[d] > 1), first_i)
        b = next((d for d in range(first_j, j) if target[d] > 1), first_j)
        ins[a] = outs[b] = f"o{a}"
    return tuple(ins), tuple(outs)


def _view_dtype(call: Call) -> Rule:
    """The bytes seen as another dtype: a last dim that changes its length must be whole."""
    x, target = call.specs[0], _target(call)
    tied = names(x.ndim)
    if x.shape != target:
        tied = without(tied, x.ndim - 1)
    return Rule((tied,), (tied,))


@rule("alias_copy", "view_copy", "detach_copy")
def view_copy(call: Call) -> Rule | None:
    """Copying forms that keep the shape."""
    if call.specs[0].shape != _target(call):
        return None
    tied = names(call.specs[0].ndim)
    return _one(call, tied, tied, local=_sizes_local("size") if call.stem == "view_copy" else None)


@rule("permute", "permute_copy")
def permute(call: Call) -> Rule:
    """Dims in another order."""
    i = names(call.specs[0].ndim)
    return _one(call, i, tuple([i[d] for d in call.arg("dims")]))


@rule("t", "t_copy")
def t(call: Call) -> Rule:
    """The two dims exchanged."""
    i = names(call.specs[0].ndim)
    return _one(call, i, i[::-1])


@rule("transpose", "transpose_copy")
def transpose(call: Call) -> Rule:
    """Two dims exchanged."""
    n = call.specs[0].ndim
    i = names(n)
    if not n:
        return _one(call, i, i)
    a, b = [call.args[k] % n for k in (1, 2)]
    o = list(i)
    o[a], o[b] = o[b], o[a]
    return _one(call, i, tuple(o))


@rule("unsqueeze", "unsqueeze_copy")
def unsqueeze(call: Call) -> Rule:
    """A new dim of size 1."""
    n = call.specs[0].ndim
    i, d = names(n), call.arg("dim") % (n + 1)
    return _one(call, i, (*i[:d], "", *i[d:]))


@rule("squeeze", "squeeze_copy")
def squeeze(call: Call) -> Rule:
    """Dims of global size 1 vanish; a dim that is 1 only on one rank must not."""
    x = call.specs[0]
    dim = call.arg("dim")
    dims = () if call.overload == "dims" and not dim else dims_of(dim, x.ndim)
    gone = [d for d in dims if x.shape[d] == 1]
    i = without(names(x.ndim), *gone)
    op = f"{call.sig.op.rpartition('.')[0]}.dims"

    def local(at: Local) -> None:
        at.use(op, In(0), gone)

    return _one(call, i, tuple([f for d, f in enumerate(i) if d not in gone]), local=local)


@rule("expand", "expand_copy")
def expand(call: Call) -> Rule:
    """Dims that grow must be whole (they have one row), all others are tied."""
    x, target = call.specs[0], _target(call)
    lead = len(target) - x.ndim
    i = tuple([f if x.shape[d] == target[lead + d] else "" for d, f in enumerate(names(x.ndim))])
    return _one(call, i, untied(lead) + i, local=_sizes_local("size"))


@rule("diagonal", "diagonal_copy")
def diagonal(call: Call) -> Rule:
    """The two dims whose diagonal is taken must be whole; the diagonal comes last."""
    n = call.specs[0].ndim
    a, b = call.arg("dim1", 0) % n, call.arg("dim2", 1) % n
    i = without(names(n), a, b)
    return _one(call, i, (*[f for d, f in enumerate(i) if d not in (a, b)], ""))


@rule("diag_embed")
def diag_embed(call: Call) -> Rule:
    """The last dim becomes a diagonal of two new dims; the others are tied."""
    n = call.specs[0].ndim + 1
    a, b = call.arg("dim1", -2) % n, call.arg("dim2", -1) % n
    i = names(n - 2)
    rest = iter(i)
    out = tuple(["" if d in (a, b) else next(rest) for d in range(n)])
    return Rule(((*i, ""),), (out,), flows=linear((0,)) if call.specs[0].dtype.is_floating_point else ())


@rule("unfold", "unfold_copy")
def unfold(call: Call) -> Rule:
    """The dim whose windows are taken must be whole."""
    n = call.specs[0].ndim
    i = without(names(n), call.arg("dimension") % n) if n else ()
    return _one(call, i, (*i, ""), why="The dim that unfold slides along must be whole on every rank.")


@rule("flip", "roll")
def turn(call: Call) -> Rule:
    """Dims that are turned round must be whole. Roll without dims turns all of them."""
    x, dims = call.specs[0], call.arg("dims")
    turned = dims_of(dims, x.ndim) if dims or call.stem == "roll" else ()
    i = without(names(x.ndim), *turned)
    return _one(call, i, i, why=f"A dim that {call.stem} turns must be whole on every rank.")


@rule("rot90")
def rot90(call: Call) -> Rule:
    """Of the two dims that turn, by a quarter, each keeps its shards where it is not read backwards."""
    x, quarters = call.specs[0], call.arg("k", 1) % 4
    i = names(x.ndim)
    a, b = (d % x.ndim for d in call.arg("dims", [0, 1]))
    backwards = {0: (), 1: (b,), 2: (a, b), 3: (a,)}[quarters]
    i = without(i, *backwards)
    out = list(i)
    if quarters % 2:
        out[a], out[b] = out[b], out[a]
    return _one(call, i, tuple(out), why="A dim that rot90 reads backwards must be whole on every rank.")


@rule("repeat")
def repeat(call: Call) -> Rule:
    """Dims that are repeated must be whole."""
    times = call.arg("repeats")
    lead = len(times) - call.specs[0].ndim
    i = tuple([f if times[lead + d] == 1 else "" for d, f in enumerate(names(call.specs[0].ndim))])
    return _one(call, i, untied(lead) + i)


@rule("view_as_real", "view_as_real_copy")
def view_as_real(call: Call) -> Rule:
    """Real and imaginary part side by side in a new last dim."""
    i = names(call.specs[0].ndim)
    return Rule((i,), ((*i, ""),), flows=linear((0,)))


@rule("view_as_complex", "view_as_complex_copy")
def view_as_complex(call: Call) -> Rule:
    """The last dim, of size 2, becomes one number."""
    i = names(call.specs[0].ndim - 1)
    return Rule(((*i, ""),), (i,), flows=linear((0,)))


@rule("constant_pad_nd", free=("value",))
def constant_pad(call: Call) -> Rule:
    """Padded dims must be whole. Into a sum one rank alone pads the value."""
    x, pad = call.specs[0], call.arg("pad")
    padded = [x.ndim - 1 - k for k in range(len(pad) // 2) if pad[2 * k] or pad[2 * k + 1]]
    i = without(names(x.ndim), *padded)

    def local(at: Local) -> None:
        if not at.lead():
            at.set("value", 0)

    return _one(call, i, i, local=local, why="A padded dim must be whole on every rank.")


_PADDING = [f"{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3)]


@rule(*_PADDING, *[f"{name}_backward" for name in _PADDING])
def edge_pad(call: Call) -> Rule:
    """Padded dims, the last ones, must be whole; batch and channels are tied."""
    padded = int(call.stem[call.stem.index("_pad") + 4])
    n = call.specs[-1].ndim
    i = (*names(n - padded), *untied(padded))
    flows = linear((0,)) if call.specs[0].dtype.is_floating_point else ()
    return Rule((i,) * len(call.specs), (i,), flows=flows, why="A padded dim must be whole on every rank.")


@rule("trace")
def trace(call: Call) -> Rule:
    """The sum of the diagonal, which in a piece begins elsewhere."""
    x = call.specs[0]
    flows = linear((0,)) if x.dtype.is_floating_point else partials(("sum",), (0,))

    def local(at: Local) -> None:
        row, column = at.span(x.shape[0], "r")[0], at.span(x.shape[1], "c")[0]
        at.use("dtorch.trace_piece", In(0), row, column)

    return Rule((("r", "c"),), ((),), reduce={"r": "sum", "c": "sum"}, flows=flows, local=local)


@rule("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle")
def shuffle(call: Call) -> Rule:
    """Pixels of a block become channels, or come out of them: a dim stays sharded where blocks stay whole.

    channel_shuffle deals the channels anew, so that those must be whole.
    """
    i = names(call.specs[0].ndim)
    if "channel" in call.stem:
        i = without(i, 1)
    return _one(call, i, i)
