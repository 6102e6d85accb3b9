"""Calls that stop a running event loop while they wait: told once per place, or refused.

``item()``, ``to_torch()``, ``print`` and their kin wait in the calling thread. Inside a coroutine that stops every
other task of the loop as well, and an ``await`` would not have.
"""

from __future__ import annotations

import concurrent.futures._base
import sys
import warnings
from types import CodeType, FrameType

import torch

from ..errors import BlockingCallError, BlockingCallWarning
from .ambient import Ambient
from .failures import site_of, user_frame
from .waiting import in_event_loop

__all__ = ["on_block", "strict"]

strict: Ambient[bool] = Ambient("dtorch_strict", False)
"""Whether a blocking call inside a running event loop is an error in this context."""

# Function of dtorch that the user called -> what to write instead.
_INSTEAD = {
    "item": "(await t).item()",
    "tolist": "(await t).tolist()",
    "numpy": "(await t).numpy()",
    "__array__": "(await t).numpy()",
    "__repr__": "print(await t)",
    "__format__": 'f"{await t}"',
    "__bool__": "if await t:",
    "__float__": "float(await t)",
    "__int__": "int(await t)",
    "__index__": "int(await t)",
    "__complex__": "complex(await t)",
    "__contains__": "x in await t",
    "to_torch": "await t",
    "full_tensor": "await t",
    "__deepcopy__": "await t",
    "__reduce_ex__": "torch.save(await t, …)",
    "get": "await future",
    "result": "await future",
    "wait": "await future",
    "wait_for": "with anyio.move_on_after(seconds): await future",
    "exception": "await future",
    "sync": "await Graph.sync_async()",
    "save": "await dtorch.aio.save(state, path)",
    "load": "await dtorch.aio.load(path)",
    # Random states come from the executors: for activation checkpoints that draw, and for these two.
    "backward": "await dtorch.aio.call(loss.backward), or checkpoint(…, preserve_rng_state=False)",
    "get_rng_state": "await dtorch.aio.call(torch.get_rng_state)",
    "set_rng_state": "await dtorch.aio.call(torch.set_rng_state, state)",
}
# Operators whose result's shape, or whose result, is known with the values of its inputs only -> what to write instead.
_OPERATORS = {
    "_local_scalar_dense": ("item", "(await t).item()"),
    "equal": ("equal", "await dtorch.aio.equal(a, b)"),
    "allclose": ("allclose", "await dtorch.aio.allclose(a, b)"),
    "_histogramdd_bin_edges": ("histogramdd", "await dtorch.aio.histogramdd(t, …)"),
    "repeat_interleave": ("repeat_interleave", "t.repeat_interleave(await repeats)"),
    "index": ("t[mask]", "t[await mask]"),
    "index_put": ("t[mask] = value", "t[await mask] = value"),
    "_unique2": ("unique", "await dtorch.aio.unique(t, …)"),
    "unique_dim": ("unique", "await dtorch.aio.unique(t, …)"),
}
# Those among them with an awaitable form of their own name.
_AWAITABLE = frozenset("argwhere bincount masked_select nonzero unique_consecutive".split())
# The functions of dtorch that run them; each has the operator as `func`.
_RUNNERS = frozenset({"on_client", "_item", "_equal", "by_mask", "verdict"})
# Functions of the standard library that wait for futures of dtorch's -> what to write instead.
_TOOLS = {
    "wait": "await dtorch.aio.gather(*futures)",
    "as_completed": "async for i, value in dtorch.aio.as_completed(*futures):",
}
_TOOLS_FILE = concurrent.futures._base.__file__
_told: set[tuple[CodeType, int]] = set()


def on_block() -> None:
    """The calling thread is about to wait: where it runs an event loop, warn once per call site.

    Raises:
        BlockingCallError: in strict mode.
    """
    if not in_event_loop() or (_in_notebook() and not strict.get()):
        return
    frame = user_frame(sys._getframe(1))
    tool = ""
    while frame.f_code.co_filename == _TOOLS_FILE and frame.f_back is not None:
        tool, frame = frame.f_code.co_name, frame.f_back
    key = (frame.f_code, frame.f_lasti)
    if not strict.get() and key in _told:
        return
    if tool:
        called, instead = f"concurrent.futures.{tool}()", _TOOLS.get(tool, "await future")
    else:
        called, instead = _called(frame)
    text = (
        f"{called} waits for a value and stops the running event loop meanwhile, and all its tasks with it.\n"
        f"  Write:  {instead}\n  {site_of(frame.f_code, frame.f_lasti)}"
    )
    if strict.get():
        raise BlockingCallError(text)
    warnings.warn_explicit(text, BlockingCallWarning, frame.f_code.co_filename, frame.f_lineno)
    _told.add(key)


def _called(user: FrameType) -> tuple[str, str]:
    """What `user` called, and what to write instead."""
    frame: FrameType | None = sys._getframe(1)
    known = name = ""
    operator: tuple[str, str] | None = None
    decomposition: tuple[str, str] | None = None
    while frame is not None and frame is not user:
        name = frame.f_code.co_name
        known = name if name in _INSTEAD else known
        if name in _RUNNERS:
            operator = _operator(str(frame.f_locals["func"]._schema.name.partition("::")[2]))
        if name == "linalg_check":
            decomposition = _decomposition(str(frame.f_locals["args"][1]))
        frame = frame.f_back
    if decomposition is not None:
        return decomposition
    if operator is not None and known in ("", "get"):
        return operator
    return f"{known or name}()", _INSTEAD.get(known or name, "await t")


def _operator(stem: str) -> tuple[str, str]:
    """The call of the operator `stem`, and what to write instead."""
    stem = stem.removeprefix("_unsafe_").rstrip("_")
    form = f"await dtorch.aio.{stem}(t, …)" if stem in _AWAITABLE else f"await dtorch.aio.call(torch.{stem}, t, …)"
    name, instead = _OPERATORS.get(stem, (stem, form))
    return (name if "[" in name else f"{name}()"), instead


def _decomposition(checked: str) -> tuple[str, str]:
    """The call of torch.linalg that has the operator `checked` ("linalg.inv") look for an error, and what to write."""
    name = checked.rpartition(".")[2].removesuffix("_ex")
    if hasattr(torch.linalg, f"{name}_ex"):
        return f"linalg.{name}()", f"torch.linalg.{name}_ex(…), and await its info"
    form = f"torch.linalg.{name}" if hasattr(torch.linalg, name) else f"torch.{name}"
    return f"{name}()", f"await dtorch.aio.call({form}, …)"


def _in_notebook() -> bool:
    """Whether IPython runs: its cells are plain code, though a loop may be running around them."""
    ipython = sys.modules.get("IPython")
    get = getattr(ipython, "get_ipython", None)
    return get is not None and get() is not None
