"""Tensor: the torch.Tensor subclass that users hold. It wraps, unwraps and delegates; there is no logic here.

A proxy has a *spec* (everything known without the values) and a *ref* (the name of the value on the executors).
Whatever copies, pickles or replaces one of the two must do so with the other.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from .autograd import redistribute, watch_leaf
from .errors import DeviceMeshError
from .future import TensorFuture
from .graph import Graph, as_mesh, default_device_mesh
from .mesh import DeviceMesh
from .placement import Placement, Replicate, as_placements
from .runtime import dispatch, miss, moves, special
from .runtime.client import client
from .runtime.copies import settled, untracked
from .runtime.refs import Ref
from .spec import TensorSpec, resolve

__all__ = ["Placements", "Tensor"]


class Placements(tuple[Placement, ...]):
    """Placements of a tensor, one per mesh dim: a tuple that also equals a list of the same."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, tuple(other)) if isinstance(other, (list, tuple)) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self))}]"


# As they were before factories.py routed them: inside ``with dtorch.device_mesh(…)`` these make plain tensors still.
_plain_tensor, _plain_array = torch.tensor, torch.from_numpy


def _no_memory(name: str, instead: str) -> Any:
    def refuse(self: Tensor, *args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(
            f"{name}: the memory of a dtorch tensor lies on its executors, not in this process.\n  Write:  {instead}"
        )

    refuse.__name__ = name
    return refuse


class Tensor(torch.Tensor):
    """A tensor whose values lie on the executors of a mesh. It is used like any torch.Tensor.

    Args:
        data: a plain torch tensor, copied now; or anything ``torch.tensor`` takes.
        device_mesh: where to place it; the default is :attr:`Graph.default_device_mesh`.
        placements: one per mesh dim; the default is Replicate everywhere.
        device: a single device instead of `device_mesh`.
        graph: accepted for programs written for the C++ system.

    Raises:
        ValueError: `device` and `device_mesh` are both given, or placements do not fit.
    """

    __slots__ = ("_ref", "_spec")

    _spec: TensorSpec
    _ref: Ref
    _watched = False

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    def __new__(
        cls,
        data: Any,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Any] | None = None,
        *,
        device: Any = None,
        requires_grad: bool = False,
        graph: Graph | None = None,
    ) -> Tensor:
        mesh = choose_mesh(device, device_mesh, graph)
        if isinstance(data, Tensor):
            out = data.redistribute(mesh, placements)
        else:
            plain = data if isinstance(data, torch.Tensor) else _plain_tensor(data)
            out = moves.lift(plain.detach(), *resolve(mesh, placements, plain.ndim))
        return out.requires_grad_() if requires_grad else out

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportInconsistentConstructor]
        """Everything is done by ``__new__``."""

    __torch_dispatch__ = classmethod(dispatch.dispatch)  # type: ignore  # pyright: ignore

    # -- where it lies ------------------------------------------------------------------------------------------

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh it lies on."""
        return self._spec.mesh

    @property
    def placements(self) -> Placements:
        """How each mesh dim holds it."""
        return Placements(self._spec.placements)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The mesh's device type."""
        kind = self._spec.mesh.device_type
        return torch.device("cpu") if kind == "cpu" else torch.device(kind, self._spec.mesh.ids[0])

    @property
    def is_dtensor(self) -> bool:
        """Whether its mesh has more than one device."""
        return self._spec.mesh.is_distributed

    @property
    def graph(self) -> Graph:
        """The graph in force."""
        return Graph.default_graph()

    def check_placement(self, dim_name: str, placement: Any) -> bool:
        """Whether the mesh dim `dim_name` holds it as `placement`."""
        return bool(self._spec.placements[self._spec.mesh.dim_index(dim_name)] == placement)

    # -- moving -------------------------------------------------------------------------------------------------

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Any] | None = None,
        *,
        async_op: bool = False,
    ) -> Tensor:
        """The same value on `device_mesh` with `placements`; a value of its own, differentiable.

        Args:
            device_mesh: where to; the default is its own mesh. May be any mesh.
            placements: one per mesh dim; the default keeps its own on its own mesh, and is Replicate on another.
            async_op: accepted; every call is asynchronous.
        """
        mesh = device_mesh or self._spec.mesh
        if placements is None:
            mesh = mesh.parent or mesh
            placed = self._spec.placements if mesh is self._spec.mesh else (Replicate(),) * mesh.ndim
        else:
            mesh, placed = resolve(mesh, placements, self.ndim, self._spec)
        return redistribute(self, mesh, placed)

    def redistribute_like(self, other: Tensor) -> Tensor:
        """The same value placed as `other` is."""
        return redistribute(
            self, other._spec.mesh, as_placements(other._spec.placements, other._spec.mesh.ndim, self.ndim)
        )

    def redistribute_by_dict(
        self,
        device_mesh: DeviceMesh | None = None,
        placements_dict: Mapping[str, Any] | None = None,
        default_placement_mode: str = "raise_error",
    ) -> Tensor:
        """The same value with placements given by mesh dim name; names that the mesh lacks are ignored.

        Args:
            device_mesh: where to; the default is its own mesh. Its dims must have names.
            placements_dict: mesh dim name → placement.
            default_placement_mode: for dims not named: "raise_error", "replicate" or "keep".

        Raises:
            ValueError: a dim is not named and the mode is "raise_error", or the mode is unknown.
        """
        mesh = device_mesh or self._spec.mesh
        given = placements_dict or {}
        if mesh.mesh_dim_names is None:
            raise DeviceMeshError(f"redistribute_by_dict: the dims of {mesh!r} have no names; give mesh_dim_names=")
        if default_placement_mode not in ("raise_error", "replicate", "keep"):
            raise ValueError(
                f"default_placement_mode={default_placement_mode!r}: write 'raise_error', 'replicate' or 'keep'"
            )
        own = dict(zip(self._spec.mesh.mesh_dim_names or (), self._spec.placements, strict=False))
        placed = []
        for name in mesh.mesh_dim_names:
            if name in given:
                placed.append(given[name])
            elif default_placement_mode == "replicate":
                placed.append(Replicate())
            elif default_placement_mode == "keep" and name in own:
                placed.append(own[name])
            else:
                raise ValueError(
                    f"redistribute_by_dict: no placement for mesh dim {name!r}; give one, or "
                    "default_placement_mode='replicate' or 'keep'"
                )
        return self.redistribute(mesh, placed)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """As ``torch.Tensor.to``; a mesh replicates there, a device gathers to the one-device mesh of that device."""
        if args and isinstance(args[0], DeviceMesh):
            return self.redistribute(args[0], [Replicate()] * args[0].ndim)
        device = kwargs.pop("device", None)
        if args and isinstance(args[0], (str, torch.device, int)):
            device, args = args[0], args[1:]
        elif args and isinstance(args[0], torch.Tensor):
            other = args[0]
            moved = self.redistribute_like(other) if isinstance(other, Tensor) else self
            return moved.to(other.dtype)
        moved = self
        if str(device) == "meta":
            return torch.Tensor.to(self, "meta", *args, **kwargs)  # type: ignore[return-value]
        if device is not None:
            mesh = as_mesh(f"cuda:{device}" if isinstance(device, int) else device)
            # t.to(t.device) is t, as everywhere in torch; to say "gather here", one writes the device as a string.
            own = isinstance(device, torch.device) and device == self.device
            if not own and (mesh.device_type != self._spec.mesh.device_type or self.is_dtensor):
                moved = self.redistribute(mesh)
        kwargs.pop("non_blocking", None)
        if not args and not kwargs:
            return moved
        return torch.Tensor.to(moved, *args, **kwargs)  # type: ignore[return-value]

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """Gathered to the mesh of one CPU."""
        return self.to("cpu")

    def cuda(self, device: Any = None, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """Gathered to the mesh of one GPU; as it is where it lies on GPUs and none is named."""
        if device is None and self._spec.mesh.device_type == "cuda":
            return self
        return self.to("cuda" if device is None else device)

    # -- reading ------------------------------------------------------------------------------------------------

    def to_torch_async(self) -> TensorFuture[torch.Tensor]:
        """A future of the global value as a plain tensor."""
        return moves.fetch(self)

    def to_torch(self) -> torch.Tensor:
        """The global value as a plain tensor, whatever the placements; waits."""
        return moves.fetch_now(self)

    full_tensor = to_torch

    def to_local(self, rank: int | None = None) -> torch.Tensor:
        """The piece of mesh rank `rank` as a plain tensor; waits.

        In one process there is no current rank: it may be left out only where all ranks hold the same.

        Raises:
            ValueError: the rank is out of range, or left out where ranks hold different pieces.
        """
        spec = self._spec
        if rank is None:
            if not spec.is_replicated and spec.mesh.nranks > 1:
                raise ValueError(
                    f"to_local(): the ranks of {spec.mesh.describe()} hold different pieces of {spec.describe()}.\n"
                    "  Write:  t.to_local(rank), or t.to_torch() for the global value"
                )
            rank = 0
        if not 0 <= rank < spec.mesh.nranks:
            raise ValueError(f"to_local({rank}): the mesh {spec.mesh.describe()} has ranks 0 to {spec.mesh.nranks - 1}")
        source = settled(self)
        c = client()
        c.waiting.on_block()
        return c.values.fetch(source._ref, source._spec, rank=rank).get()  # type: ignore[no-any-return]

    def __await__(self) -> Generator[Any, None, torch.Tensor]:
        return moves.fetch(self).__await__()  # type: ignore[return-value]

    async def ready(self) -> None:
        """Wait, without blocking, until the value exists; it is not fetched. Raises what its computation raised."""
        source = settled(self)
        await client().values.fetch(source._ref, source._spec, data=False)

    def item(self) -> Any:
        """The value of a one-element tensor; waits."""
        if self.numel() != 1:
            raise RuntimeError(f"a Tensor with {self.numel()} elements cannot be converted to Scalar")
        return self.to_torch().item()

    def tolist(self) -> Any:
        """The values as nested lists; waits."""
        return self.detach().to_torch().tolist()  # type: ignore[attr-defined]

    def numpy(self, *, force: bool = False) -> Any:
        """The values as a read-only numpy array; waits."""
        if self.requires_grad and not force:
            raise RuntimeError("numpy() of a tensor that requires grad.\n  Write:  t.detach().numpy()")
        array = self.to_torch().numpy()
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy()
        if dtype is not None and array.dtype != dtype:
            return array.astype(dtype)
        # numpy takes it at its word: np.array(t) is to be the caller's own, to write to.
        return array.copy() if copy else array

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Tensor:
        # What numpy computed of it comes back to its mesh, whole on every rank.
        return moves.lift(_plain_array(array), self._spec.mesh)

    def __setitem__(self, index: Any, value: Any) -> None:
        """As torch's; the value may be a numpy array, too."""
        torch.Tensor.__setitem__(self, index, _plain_array(value) if isinstance(value, np.ndarray) else value)

    def __bool__(self) -> bool:
        if self.numel() != 1:
            what = "no value" if self.numel() == 0 else "more than one value"
            raise RuntimeError(f"Boolean value of Tensor with {what} is ambiguous")
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return self.to_torch().__index__()

    def __complex__(self) -> complex:
        return complex(self.item())

    def __format__(self, spec: str) -> str:
        return self.to_torch().__format__(spec) if self.ndim == 0 else repr(self).__format__(spec)

    def __contains__(self, element: Any) -> bool:
        return bool((element == self).any().item())  # type: ignore[union-attr]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch.no_grad():
            text = repr(self.to_torch()) if tensor_contents is None else f"tensor({tensor_contents})"
        body = text.removesuffix(")")
        spec = self._spec
        if spec.mesh.is_distributed or not spec.is_replicated:
            body += f", device_mesh={spec.mesh.describe()}, placements={self.placements!r}"
        if self.grad_fn is not None:
            body += f", grad_fn=<{type(self.grad_fn).__name__}>"
        elif self.requires_grad:
            body += ", requires_grad=True"
        return body + ")"

    # -- copies: proxy and ref never part -----------------------------------------------------------------------

    def __copy__(self) -> Tensor:
        return _dressed(self.data, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
                "moment.\n  Write:  copy.deepcopy(t.detach())"
            )
        with torch.no_grad():
            copied = _dressed(torch.ops.aten.clone.default(self), self)
            memo[id(self)] = copied
            if self.grad is not None:
                copied.grad = self.grad.__deepcopy__(memo)  # type: ignore[operator]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A plain tensor: a saved value needs neither a pool nor dtorch to be read again.
        plain = self.detach().to_torch()  # type: ignore[attr-defined]
        if isinstance(self, torch.nn.Parameter):
            plain = torch.nn.Parameter(plain, self.requires_grad)
        elif self.requires_grad:
            plain.requires_grad_()
        return plain.__reduce_ex__(protocol)

    def set_(self, source: Any = None, *args: Any) -> Tensor:  # type: ignore[override]
        """Become `source`, as ``self.data = source``.

        Raises:
            RuntimeError: `source` is a storage, or nothing: a dtorch tensor has none in this process.
        """
        if args or not isinstance(source, torch.Tensor):
            raise RuntimeError("set_() of a dtorch tensor takes a tensor.\n  Write:  t.set_(other)  or  t.data = other")
        if source.dtype is not self.dtype:
            raise RuntimeError(f"set_(): could not set a tensor of {source.dtype} to a tensor of {self.dtype}")
        self.data = source
        return self

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The value without its history: shares memory with this tensor."""
        return untracked(self)

    @data.setter
    def data(self, value: Any) -> None:
        if not isinstance(value, Tensor):
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"t.data = {type(value).__name__}: assign a tensor")
            value = moves.lift(value.detach(), self._spec.mesh)
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._spec, self._ref = value._spec, value._ref

    # -- gradients ----------------------------------------------------------------------------------------------

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:  # type: ignore[override]
        """As torch's; gradients of a leaf arrive with the leaf's placements."""
        torch.Tensor.requires_grad_(self, requires_grad)
        if requires_grad and self.is_leaf:
            watch_leaf(self)
        return self

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether gradients are computed for this tensor."""
        return torch._C.TensorBase.requires_grad.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        torch._C.TensorBase.requires_grad.__set__(self, value)  # type: ignore[attr-defined]
        if value and self.is_leaf:
            watch_leaf(self)

    # -- functions that torch answers from memory of its own ----------------------------------------------------

    def new_tensor(  # type: ignore[override]
        self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
    ) -> Tensor:
        """As torch's: `data`, copied to this tensor's mesh; its dtype is this tensor's where none is given."""
        if isinstance(data, Tensor):
            out: Any = data.detach().clone().to(dtype or self.dtype)
        else:
            plain = data.detach() if isinstance(data, torch.Tensor) else _plain_tensor(data)
            mesh = self._spec.mesh if device is None else as_mesh(device)
            out = moves.lift(plain.to(dtype or self.dtype), mesh)
        return out.requires_grad_() if requires_grad else out

    def new(self, *args: Any, **kwargs: Any) -> Tensor:
        """As torch's legacy constructor, on this tensor's mesh: of sizes a tensor not filled, of data a copy."""
        sizes = args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args
        if kwargs.get("size") is not None:
            sizes = kwargs["size"]
        if all(isinstance(n, int) for n in sizes):
            return self.new_empty(tuple(sizes)) if sizes else self.new_empty(0)  # type: ignore[return-value]
        return self.new_tensor(args[0])

    def tensor_split(  # type: ignore[override]
        self, indices_or_sections: Any = None, dim: int = 0, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """As torch's; indices in a tensor are read, which waits."""
        for name in ("tensor_indices_or_sections", "indices", "sections"):
            indices_or_sections = kwargs.pop(name, indices_or_sections)
        if isinstance(indices_or_sections, Tensor):
            indices_or_sections = indices_or_sections.tolist()
        return torch.Tensor.tensor_split(self, indices_or_sections, dim, **kwargs)  # type: ignore[return-value]

    # -- what a proxy has not -----------------------------------------------------------------------------------

    data_ptr = _no_memory("data_ptr()", "t.to_torch().data_ptr()")
    const_data_ptr = _no_memory("const_data_ptr()", "t.to_torch().data_ptr()")
    untyped_storage = _no_memory("untyped_storage()", "t.to_torch().untyped_storage()")
    storage = _no_memory("storage()", "t.to_torch().storage()")
    __dlpack__ = _no_memory("__dlpack__()", "torch.utils.dlpack.to_dlpack(t.to_torch())")
    share_memory_ = _no_memory("share_memory_()", "t.to_torch().share_memory_()")
    apply_ = _no_memory("apply_()", "t.copy_(t.to_torch().apply_(f))")
    map_ = _no_memory("map_()", "t.copy_(t.to_torch().map_(other, f))")
    map2_ = _no_memory("map2_()", "t.copy_(t.to_torch().map2_(x, y, f))")

    def record_stream(self, s: Any) -> None:
        """Nothing to do: executors keep memory until what was issued has used it."""

    def pin_memory(self, device: Any = None) -> Tensor:  # type: ignore[override]
        """Itself: executors manage their own memory."""
        return self

    def is_shared(self) -> bool:
        """False: its memory is the executors'."""
        return False


def _dressed(new: Tensor, old: Tensor) -> Tensor:
    """`new` with the flags and attributes of `old`."""
    if old.requires_grad:
        new.requires_grad_()
    for name, value in vars(old).items():
        if name != "_watched":
            setattr(new, name, value)
    return new


def choose_mesh(device: Any, device_mesh: DeviceMesh | None, graph: Graph | None = None) -> DeviceMesh:
    """The mesh that a call's `device` or `device_mesh` means.

    Raises:
        ValueError: both are given.
    """
    if device is not None and device_mesh is not None:
        raise ValueError(f"device={device} and device_mesh={device_mesh!r} are given together: give one of them")
    if device_mesh is not None:
        return as_mesh(device_mesh)
    if device is not None:
        return as_mesh(device)
    return default_device_mesh() if graph is None else graph.default_device_mesh


dispatch.bind(Tensor, special.know, miss.miss)
