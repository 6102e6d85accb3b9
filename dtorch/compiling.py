"""``torch.compile``: what touches dtorch tensors runs as it stands.

Dynamo traces Python to find what this process computes. Here it computes nothing: a call on a dtorch tensor is planned
once and sent. Were Dynamo to trace that, it would trace dtorch.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from ._tensor import Tensor
from .standins import stand_in

__all__ = ["install"]

_WHY = "dtorch tensors are not traced: the function that has them runs as it stands"
# What stands in torch's own namespace, and is traced through where it is given plain tensors.
_IN_TORCH = ("routing.py", "adapted.py", "sequences.py")


@functools.cache
def _teach() -> None:
    """Tell Dynamo, once it is there: importing it takes seconds, which only those who compile should wait."""
    dynamo: list[Any] = [
        importlib.import_module(f"torch._dynamo.{name}")
        for name in ("config", "convert_frame", "exc", "trace_rules", "types", "variables.builder")
    ]
    config, convert_frame, exc, trace_rules, types, builder = dynamo

    def leave(at: object, value: object) -> NoReturn:
        raise exc.SkipFrame(_WHY)

    config.nontraceable_tensor_subclasses.add(Tensor)
    for numpy_traced in (False, True):
        builder.VariableBuilder._type_dispatch_impl(numpy_traced)[Tensor] = leave
    trace_rules.add(__name__.partition(".")[0])
    here = Path(__file__).parent
    trace_rules.BUILTIN_INLINE_WHEN_CALLED.update(str(here / name) for name in _IN_TORCH)
    compiled = convert_frame._compile

    @functools.wraps(compiled)
    def compile_frame(*args: Any, **kwargs: Any) -> Any:
        made = compiled(*args, **kwargs)
        if made.skip_reason is not None and _WHY in made.skip_reason:
            # All that it calls as well: else each function below it, torch's and dtorch's own, would be tried in turn.
            made.frame_exec_strategy = types.FrameExecStrategy(types.FrameAction.SKIP, types.FrameAction.SKIP)
        return made

    convert_frame._compile = compile_frame


def _taught(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile(model: Any = None, **kwargs: Any) -> Any:
        _teach()
        made = original(model, **kwargs)
        if isinstance(model, torch.nn.Module):
            if made is not model:
                made.forward = _unless_ours(model, model, made.forward)
        elif isinstance(owner := getattr(model, "__self__", None), torch.nn.Module):
            return _unless_ours(owner, model, made)
        return made

    return compile


def _unless_ours(owner: torch.nn.Module, plain: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, or `plain` while the parameters of `owner` lie on a mesh.

    Dynamo remembers what it left alone by its code, and all modules are called by the same code.
    """

    @functools.wraps(compiled)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        first: Any = next(owner.parameters(), None)
        return (plain if type(first) is Tensor else compiled)(*args, **kwargs)

    return chosen


def install() -> None:
    """Put it into torch's namespace."""
    stand_in((torch,), "compile", _taught)
    if "torch._dynamo" in sys.modules:
        _teach()
