"""Operators of the user's own, as executors come to know them.

An executor has torch's operators, not those that the program defined. Before the first plan that runs one is defined,
its definition is sent: the schema and Python functions of a ``torch.library.custom_op``, by value, the paths of the
libraries that ``torch.ops.load_library`` loaded, and the module that ``register_sharding`` was told.
"""

from __future__ import annotations

import inspect
import io
import itertools
import pickle
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from torch._library.custom_ops import CustomOpDef, _maybe_get_opdef

from ..executor.operators import OURS, named
from ..sharding.register import modules
from .command import DefineOperator

if TYPE_CHECKING:
    from .client import Client

__all__ = ["Operators"]


class Operators:
    """Which operators the executors of one pool were told of."""

    def __init__(self, client: Client) -> None:
        self._client = client
        # Qualified name -> (what defines it here, the executors that were told)
        self._told: dict[str, tuple[Any, tuple[int, ...]]] = {}
        self._serials = itertools.count(1)

    def need(self, func: str) -> None:
        """See to it that executors know `func`, as a local call names it ("mylib.f.default")."""
        namespace, _, rest = func.partition(".")
        if namespace not in OURS:
            self._need(f"{namespace}::{rest.rpartition('.')[0]}")

    def _need(self, name: str) -> None:
        defined = _maybe_get_opdef(name)
        readers = self._client.writer.readers
        source = defined if defined is not None else (modules.get(name), len(torch.ops.loaded_libraries))
        told = self._told.get(name)
        if told is not None and told[0] == source and set(readers) <= set(told[1]):
            return
        self._told[name] = (source, tuple(readers))
        functions: bytes | None = None
        if defined is not None:
            functions, others = _pickled(name, _kernels(defined))
            for other in others - {name}:
                self._need(other)
        self._client.send(
            DefineOperator(
                name,
                next(self._serials),
                None if defined is None else defined._schema,
                functions,
                modules.get(name),
                tuple(sorted(torch.ops.loaded_libraries)),
            )
        )


def _kernels(defined: CustomOpDef) -> dict[str | None, Any]:
    """Device type, or None for all, -> the function the user wrote for it."""
    found = {}
    for device, wrapped in defined._backend_fns.items():
        # What torch keeps is a closure over the definition itself, and the user's function.
        inner = inspect.unwrap(wrapped)
        cells = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True))
        found[device] = cells["fn"].cell_contents if "fn" in cells else defined._init_fn
    return found


def _pickled(name: str, functions: dict[str | None, Any]) -> tuple[bytes, set[str]]:
    """The functions by value, and the operators that they call."""
    others: set[str] = set()

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, CustomOpDef):
                others.add(obj._qualname)
                return named, (obj._qualname,)
            if isinstance(obj, torch._ops.OpOverload):
                schema = obj._schema
                others.add(schema.name)
                return named, (schema.name, schema.overload_name or "default")
            if isinstance(obj, torch._ops.OpOverloadPacket):
                others.add(obj._qualified_op_name)
                return named, (obj._qualified_op_name,)
            return super().reducer_override(obj)

    into = io.BytesIO()
    try:
        Pickler(into, pickle.HIGHEST_PROTOCOL).dump(functions)
    except Exception as error:
        raise TypeError(
            f"{name}: its function cannot be sent to the executors ({error}). Define it in a module that they can "
            f'import, and name it: dtorch.register_sharding("{name}", ..., module="...")'
        ) from error
    return into.getvalue(), {o for o in others if o.partition("::")[0] not in OURS}
