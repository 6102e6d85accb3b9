"""Functions that make tensors: zeros, randn, arange, tensor, …, each with ``device_mesh=`` and ``placements=``.

They stand in for torch's own of the same name where the program says ``dtorch.zeros``; and, inside
``with dtorch.device_mesh(mesh)``, also where it says ``torch.zeros``: see :mod:`.routing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import adapted, compiling, constants, graph, routing
from ._tensor import Tensor
from .mesh import DeviceMesh
from .options import Where, default_dtype, sizes
from .placement import Replicate, Shard
from .runtime import moves
from .runtime.client import client
from .runtime.command import MakeLocals, encode_function
from .runtime.dispatch import wrap
from .runtime.refs import next_ref, ref_type
from .spec import TensorSpec, contiguous_stride, resolve

__all__ = [
    "arange",
    "as_tensor",
    "distribute_tensor",
    "empty",
    "eye",
    "from_local",
    "from_numpy",
    "from_torch",
    "full",
    "get_rng_state",
    "linspace",
    "logspace",
    "manual_seed",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "set_rng_state",
    "tensor",
    "zeros",
]

_aten = torch.ops.aten
_torch = {
    name: getattr(torch, name)
    for name in (
        "empty zeros ones full rand randn randint arange eye linspace logspace randperm tensor as_tensor from_numpy "
        "manual_seed get_rng_state set_rng_state seed initial_seed"
    ).split()
}


def _filled(name: str, func: Any) -> Callable[..., Tensor]:
    def factory(*size: Any, **options: Any) -> Tensor:
        shape = sizes(size, options)
        where = Where(name, options)
        return where.make(func, len(shape), shape, dtype=where.dtype or default_dtype())

    factory.__name__ = factory.__qualname__ = name
    factory.__doc__ = f"""As ``torch.{name}``, on a mesh.

    Args:
        size: sizes, as arguments or as one sequence.
        dtype, layout, requires_grad, out: as torch's.
        device_mesh: the mesh; the default is ``Graph.default_device_mesh``.
        placements: one per mesh dim; the default is Replicate everywhere.
        device: a single device instead of `device_mesh`.

    Raises:
        ValueError: `device` and `device_mesh` are both given, or the placements do not fit.
    """
    return factory


empty = _filled("empty", _aten.empty.memory_format)
zeros = _filled("zeros", _aten.zeros.default)
ones = _filled("ones", _aten.ones.default)


def _random(name: str, func: Any) -> Callable[..., Tensor]:
    def factory(*size: Any, **options: Any) -> Tensor:
        shape = sizes(size, options)
        where = Where(name, options)
        where.dtype = where.dtype or default_dtype()
        if where.generator is not None:
            return where.own(_torch[name], shape)
        return where.make(func, len(shape), shape, dtype=where.dtype)

    factory.__name__ = factory.__qualname__ = name
    factory.__doc__ = f"""As ``torch.{name}``, on a mesh: the values depend on the seed alone, not on the mesh.

    Args:
        size: sizes, as arguments or as one sequence.
        generator: drawn from on the client, and advanced as torch's would be.
        dtype, layout, requires_grad, out, device_mesh, placements, device: as :func:`zeros`.
    """
    return factory


rand = _random("rand", _aten.rand.default)
randn = _random("randn", _aten.randn.default)


def full(size: Any, fill_value: Any, **options: Any) -> Tensor:
    """As ``torch.full``, on a mesh; see :func:`zeros`."""
    shape = sizes((size,), {})
    where = Where("full", options)
    value = fill_value.item() if isinstance(fill_value, torch.Tensor) else fill_value
    dtype = where.dtype
    if dtype is None:
        dtype = (
            torch.bool
            if isinstance(value, bool)
            else torch.int64
            if isinstance(value, int)
            else default_dtype()
            if isinstance(value, float)
            else None
        )
    return where.make(_aten.full.default, len(shape), shape, value, dtype=dtype)


def randint(*args: Any, **options: Any) -> Tensor:
    """As ``torch.randint(low=0, high, size)``, on a mesh; see :func:`rand`."""
    low = options.pop("low", None)
    high, size = options.pop("high", None), options.pop("size", None)
    rest = list(args)
    if size is None:
        size = rest.pop()
    if high is None:
        high = rest.pop()
    if low is None:
        low = rest.pop() if rest else 0
    where = Where("randint", options)
    where.dtype = where.dtype or torch.int64
    shape = sizes((size,), {})
    if where.generator is not None:
        return where.own(_torch["randint"], low, high, shape)
    return where.make(_aten.randint.low, len(shape), low, high, shape, dtype=where.dtype)


def randperm(n: int, **options: Any) -> Tensor:
    """As ``torch.randperm``, on a mesh; see :func:`rand`."""
    where = Where("randperm", options)
    where.dtype = where.dtype or torch.int64
    if where.generator is not None:
        return where.own(_torch["randperm"], n)
    return where.make(_aten.randperm.default, 1, n, dtype=where.dtype)


def arange(*args: Any, **options: Any) -> Tensor:
    """As ``torch.arange(start=0, end, step=1)``, on a mesh; see :func:`zeros`."""
    names = ("end",) if len(args) == 1 else ("start", "end", "step")
    given: dict[str, Any] = dict(zip(names, args, strict=False))
    for name in ("start", "end", "step"):
        if name in options:
            given[name] = options.pop(name)
    start, end, step = (_number(given.get(k, d)) for k, d in (("start", 0), ("end", None), ("step", 1)))
    where = Where("arange", options)
    dtype = where.dtype
    if dtype is None:
        dtype = default_dtype() if any(isinstance(x, float) for x in (start, end, step)) else torch.int64
    return where.make(_aten.arange.start_step, 1, start, end, step, dtype=dtype)


def _number(x: Any) -> Any:
    return x.item() if isinstance(x, torch.Tensor) else x


def linspace(start: Any, end: Any, steps: int, **options: Any) -> Tensor:
    """As ``torch.linspace``, on a mesh; see :func:`zeros`."""
    where = Where("linspace", options)
    dtype = where.dtype or default_dtype()
    return where.make(_aten.linspace.default, 1, _number(start), _number(end), steps, dtype=dtype)


def logspace(start: Any, end: Any, steps: int, base: float = 10.0, **options: Any) -> Tensor:
    """As ``torch.logspace``, on a mesh; see :func:`zeros`."""
    where = Where("logspace", options)
    dtype = where.dtype or default_dtype()
    return where.make(_aten.logspace.default, 1, _number(start), _number(end), steps, base, dtype=dtype)


def eye(n: int, m: int | None = None, **options: Any) -> Tensor:
    """As ``torch.eye``, on a mesh; see :func:`zeros`."""
    where = Where("eye", options)
    return where.make(_aten.eye.m, 2, n, n if m is None else m, dtype=where.dtype or default_dtype())


def tensor(data: Any, **options: Any) -> Tensor:
    """As ``torch.tensor``, on a mesh; see :func:`zeros`."""
    where = Where("tensor", options)
    if isinstance(data, Tensor):
        copied = data.detach().clone()
        return where.finish(copied.to(where.dtype) if where.dtype else copied)  # type: ignore[arg-type]
    dtype = where.dtype
    if dtype is None and not isinstance(data, torch.Tensor):
        plain = _torch["tensor"](_plain_data(data))
        if plain.dtype is torch.get_default_dtype() and not hasattr(data, "dtype"):
            plain = plain.to(default_dtype())
    else:
        plain = _torch["tensor"](_plain_data(data), dtype=dtype) if not isinstance(data, torch.Tensor) else data
        plain = plain.detach().to(dtype) if dtype else plain.detach()
    return where.lift(plain)


def _plain_data(data: Any) -> Any:
    """Nested data in which dtorch tensors have become numbers and lists."""
    if isinstance(data, Tensor):
        return data.tolist()
    if isinstance(data, (list, tuple)):
        return [_plain_data(x) for x in data]
    return data


def as_tensor(data: Any, **options: Any) -> Tensor:
    """As ``torch.as_tensor``, on a mesh. A dtorch tensor comes back itself, or as another dtype or where it is asked
    to be, with its autograd history."""
    if not isinstance(data, Tensor):
        return tensor(data, **options)
    given = {k: options.pop(k) for k in ("dtype", "device") if options.get(k) is not None}
    moved = data.to(**given) if given else data
    if options.keys() & {"device_mesh", "graph", "placements"}:
        return moved.redistribute(*Where("as_tensor", options).resolved(data.ndim))
    return moved


def from_numpy(array: Any, **options: Any) -> Tensor:
    """As ``torch.from_numpy``, on a mesh; the array is copied."""
    return from_torch(_torch["from_numpy"](array), **options)


def from_torch(tensor: torch.Tensor, **options: Any) -> Tensor:
    """A plain torch tensor, copied to a mesh; see :func:`zeros` for the options."""
    where = Where("from_torch", options)
    plain = tensor.detach() if where.dtype is None else tensor.detach().to(where.dtype)
    return where.lift(plain)


def distribute_tensor(
    tensor: torch.Tensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Any] | None = None, **_: Any
) -> Tensor:
    """`tensor` on a mesh with placements: a plain one is copied there, a dtorch one is redistributed.

    Args:
        tensor: any strided tensor. A plain leaf that requires grad gives a leaf that requires grad.
        device_mesh: the default is ``Graph.default_device_mesh``.
        placements: one per mesh dim; the default is Replicate everywhere.
    """
    mesh = device_mesh or graph.default_device_mesh()
    if isinstance(tensor, Tensor):
        return tensor.redistribute(mesh, placements)
    out = moves.lift(tensor.detach(), *resolve(mesh, placements, tensor.ndim))
    return out.requires_grad_() if tensor.requires_grad and tensor.is_leaf else out


def from_local(
    local: Sequence[torch.Tensor] | Callable[[int], torch.Tensor],
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Any] | None = None,
    *,
    run_check: bool = False,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A tensor from the pieces that its ranks hold.

    Args:
        local: one plain tensor per rank, in rank order; or a function of the rank that makes the piece, run on
            the executors.
        device_mesh, placements: how the pieces make up the whole.
        run_check: for Replicate, compare the pieces and raise if they differ (only for tensors given here).
        shape: the global shape; needed with a function, else taken from the pieces.
        stride: accepted for compatibility; pieces are packed.
        dtype: with a function, of its tensors; the default is the default dtype.

    Raises:
        ValueError: the pieces do not fit the placements; the message names the first rank that does not.
    """
    mesh = device_mesh or graph.default_device_mesh()
    if isinstance(local, torch.Tensor):
        if mesh.nranks != 1:
            raise ValueError(
                f"from_local: one tensor was given for the {mesh.nranks} ranks of {mesh.describe()}; in one process "
                "there is no current rank.\n  Write:  from_local([t0, t1, …], mesh, placements)"
            )
        local = [local]
    if callable(local):
        if shape is None:
            raise ValueError("from_local: with a function, give shape= of the whole tensor, and dtype= where not float")
        return _from_function(local, mesh, placements, tuple(shape), dtype or default_dtype())
    pieces = [t.detach() for t in local]
    if len(pieces) != mesh.nranks:
        raise ValueError(f"from_local: {len(pieces)} tensors for the {mesh.nranks} ranks of {mesh.describe()}")
    ndim = pieces[0].ndim
    mesh, placed = resolve(mesh, placements, ndim)
    whole = tuple(shape) if shape is not None else _global_shape(pieces, mesh, placed)
    spec = TensorSpec.of(whole, None, pieces[0].dtype, mesh, placed)
    first: dict[Any, torch.Tensor] = {}
    for rank, piece in enumerate(pieces):
        if tuple(piece.shape) != spec.local_shape(rank) or piece.dtype != spec.dtype:
            raise ValueError(
                f"from_local: rank {rank} of {mesh.describe()} must hold {spec.local_shape(rank)} of "
                f"{spec.describe()}, but its tensor is {piece.dtype} {tuple(piece.shape)}"
            )
        if run_check:
            coordinate = tuple(
                c if not isinstance(p, Replicate) else None for c, p in zip(mesh.coordinates[rank], placed, strict=True)
            )
            if not torch.equal(first.setdefault(coordinate, piece), piece):
                raise ValueError(f"from_local(run_check=True): rank {rank} differs from the rank it should replicate")
    made = wrap(spec, client().values.upload_pieces(pieces, spec))
    if client().blocking:
        client().wait_here()
    return made


def _from_function(
    function: Callable[[int], torch.Tensor],
    mesh: DeviceMesh,
    placements: Sequence[Any] | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Tensor:
    mesh, placed = resolve(mesh, placements, len(shape))
    spec = TensorSpec.of(shape, contiguous_stride(shape), dtype, mesh, placed)
    c = client()
    id, _, _ = c.mesh(mesh)
    ref = ref_type(spec)(next_ref())
    shapes = tuple(spec.local_shape(r) for r in range(mesh.nranks))
    at = c.send(MakeLocals(id, ref, encode_function(function), shapes, dtype, f"from_local({spec.describe()})"))
    if c.blocking:
        c.wait_here(at)
    return wrap(spec, ref)


def _global_shape(pieces: list[torch.Tensor], mesh: DeviceMesh, placements: tuple[Any, ...]) -> tuple[int, ...]:
    """The whole shape of which `pieces` are the cuts: sums along every sharded dim, innermost mesh dim first."""
    shapes = [list(p.shape) for p in pieces]
    for n, placement in reversed(list(zip(mesh.shape, placements, strict=True))):
        groups = [shapes[i : i + n] for i in range(0, len(shapes), n)]
        shapes = []
        for group in groups:
            whole = list(group[0])
            if isinstance(placement, Shard):
                whole[placement.dim] = sum(s[placement.dim] for s in group)
            shapes.append(whole)
    return tuple(shapes[0])


# -- random state -----------------------------------------------------------------------------------------------------


def manual_seed(seed: int) -> torch.Generator:
    """Seed the generators of the executors and of this process, as ``torch.manual_seed``."""
    generator = _torch["manual_seed"](seed)
    client().draws.seed(int(seed) & 0xFFFF_FFFF_FFFF_FFFF)
    return generator  # type: ignore[no-any-return]


def get_rng_state() -> torch.Tensor:
    """The state of the executors' generator, as ``torch.get_rng_state``; waits."""
    return torch.frombuffer(bytearray(client().draws.state()), dtype=torch.uint8)


def set_rng_state(new_state: torch.Tensor) -> None:
    """Have the executors' generators continue from `new_state`."""
    client().draws.set_state(new_state.numpy().tobytes())


# -- torch's own factories inside a guard -----------------------------------------------------------------------------

_ROUTED: dict[str, Callable[..., Any]] = {
    "empty": empty,
    "zeros": zeros,
    "ones": ones,
    "full": full,
    "rand": rand,
    "randn": randn,
    "randint": randint,
    "arange": arange,
    "eye": eye,
    "linspace": linspace,
    "logspace": logspace,
    "randperm": randperm,
    "tensor": tensor,
    "as_tensor": as_tensor,
    "from_numpy": from_numpy,
    # Not those that hand out memory (frombuffer, empty_strided, …): dtorch makes its plain tensors with them.
    **{
        name: getattr(constants, name)
        for name in (
            "asarray bartlett_window blackman_window empty_permuted hamming_window hann_window kaiser_window normal "
            "range scalar_tensor tril_indices triu_indices"
        ).split()
    },
}

routing.install(_ROUTED)
adapted.install()
compiling.install()
