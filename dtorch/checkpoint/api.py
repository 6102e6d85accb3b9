"""``dtorch.save`` and ``dtorch.load``; their awaitable forms are in :mod:`dtorch.aio.checkpoints`."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from typing import Any

import torch

from ..errors import CheckpointError
from ..mesh import DeviceMesh
from ..nn.placing import plain_factories
from ..runtime.client import client
from . import files
from .loading import TRIES, is_replaced, load_state, open_checkpoint, open_state
from .pieces import Source
from .saving import save_state

__all__ = ["format_of", "is_directory", "load", "opened", "save"]

FORMATS = ("safetensors", "dcp", "torch")

# What torch's reader raises where a file holds noise.
_NOISE = (RuntimeError, EOFError, zipfile.BadZipFile, LookupError, ValueError, OSError, TypeError, AttributeError,
          AssertionError, OverflowError, MemoryError, struct.error)  # fmt: skip
_MAGIC = 0x1950A86A20F9469CFC6C.to_bytes(10, "little")  # in the head of files that torch wrote before zip files


def save(obj: Any, f: Any, *args: Any, format: str | None = None, **kwargs: Any) -> None:
    """Save `obj` at `f`, whole or not at all; waits until it is on disk.

    The executors write, each its own part, and nothing is gathered. What was at `f` is there until the new checkpoint
    takes its place, in one step.

    Args:
        obj: dicts, lists and tuples of tensors (dtorch's or plain), numbers and strings. Modules and optimizers in it
            stand for their ``state_dict()``. In the format "torch", anything that pickle takes.
        f: a path. A file that is open, or a buffer, is written as ``torch.save`` does.
        format: "safetensors": a directory of such files with the index that Hugging Face's libraries read, or, where
            `f` ends in ``.safetensors``, one file. "dcp": the directory of ``torch.distributed.checkpoint``. "torch":
            a file that ``torch.load`` reads; it is put together in this process. By default, a name that ends in
            ``.safetensors`` is such a file, one with another ending is torch's, and one without is a directory of
            safetensors.
        args, kwargs: of ``torch.save``, in the format "torch".

    Raises:
        CheckpointError: it cannot be written there, and why; what was there stands.
        TypeError: something in `obj` is no part of a checkpoint; the message names where it is.
    """
    if not isinstance(f, (str, os.PathLike)):
        if format not in (None, "torch"):
            raise ValueError(f"dtorch.save: format={format!r} needs a path, and this is a {type(f).__name__}")
        torch.save(obj, f, *args, **kwargs)
        return
    kind = format_of(f, format)
    if kind == "torch":
        _torch_save(obj, f, args, kwargs)
        return
    if args or kwargs:
        named = ", ".join([*map(repr, args), *kwargs])
        raise TypeError(f"dtorch.save: {named}: of torch.save, and means nothing for format={kind!r}")
    # However soon it is done: whoever runs an event loop is told before anything happens.
    client().waiting.on_block()
    save_state(obj, f, kind, is_directory=is_directory(f, kind)).get()


def load(
    f: Any,
    map_location: Any = None,
    pickle_module: Any = None,
    *,
    into: Any = None,
    device_mesh: DeviceMesh | None = None,
    placements: Any = None,
    weights_only: bool | None = None,
    **kwargs: Any,
) -> Any:
    """The state that :func:`dtorch.save`, ``torch.save``, safetensors or ``torch.distributed.checkpoint`` has saved at
    `f`; waits.

    Each executor reads what its ranks hold, whatever the mesh and the placements were when it was saved. Tensors that
    were plain when they were saved are plain again. Nothing is unpickled but values of known types.

    Args:
        f: a path; or a file or buffer that ``torch.save`` has written.
        into: a state to fill: tensors in place, with their own meshes and placements, and numbers in their
            dicts and lists. Modules and optimizers stand for their state. Shapes and dtypes must be those saved. Keys
            that the checkpoint has besides are passed over. It is returned. Tensors that were lost with their pool
            have values again.
        device_mesh: where fresh tensors go; the default mesh by default.
        placements: how: of every tensor alike; or name -> placements, Replicate for those not named; or a function of
            name and shape that gives them.
        map_location, pickle_module, weights_only, kwargs: of ``torch.load``, for files that are torch's. Such a file
            gives plain tensors, unless `into`, `device_mesh` or `placements` say where they are to be.

    Raises:
        FileNotFoundError: there is nothing at `f`.
        CheckpointError: it is truncated, damaged or no checkpoint, or not of the state `into`.
    """
    options = {"map_location": map_location, "pickle_module": pickle_module, "weights_only": weights_only, **kwargs}
    options = {name: value for name, value in options.items() if value is not None}
    placed = device_mesh is not None or placements is not None
    for left in reversed(range(TRIES)):
        source = opened(f, options, into is not None, placed)
        if not isinstance(source, Source):
            return source[0]
        client().waiting.on_block()
        try:
            return load_state(source, into, device_mesh, placements).get()
        except CheckpointError:
            # A save has put the next one in its place: nothing was written yet, and that one is whole.
            if not left or not is_replaced(source):
                raise
    raise AssertionError


def format_of(path: str | os.PathLike[str], format: str | None) -> str:
    if format is None:
        name = os.fspath(path)
        if name.endswith(".safetensors") or name.endswith(os.sep) or os.path.isdir(name):
            return "safetensors"
        return "torch" if os.path.splitext(name)[1] else "safetensors"
    if format not in FORMATS:
        raise ValueError(f"dtorch.save: format={format!r}: write one of {', '.join(map(repr, FORMATS))}")
    return format


def is_directory(path: str | os.PathLike[str], kind: str) -> bool:
    return kind == "dcp" or (kind == "safetensors" and not os.fspath(path).endswith(".safetensors"))


def _torch_save(obj: Any, path: str | os.PathLike[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``torch.save`` to a path, whole or not at all."""
    name = os.fspath(path)
    if os.path.exists(name) and not os.path.isfile(name) and not os.path.isdir(name):
        torch.save(obj, path, *args, **kwargs)  # a pipe or a device: there is nothing to put in its place
        return
    staging = files.stage(path, is_directory=False)
    try:
        with open(os.path.join(staging.path, os.path.basename(staging.target)), "wb") as file:
            torch.save(obj, file, *args, **kwargs)
            file.flush()
            os.fsync(file.fileno())
        files.commit(staging.path, staging.target, is_directory=False)
    except (OSError, RuntimeError) as error:
        found = files.of_system(error)
        if found is None:
            raise
        raise CheckpointError(f"dtorch.save: {name!r}: {files.said(found)}") from None
    finally:
        staging.discard()


def opened(f: Any, options: dict[str, Any], filling: bool, placed: bool) -> Source | tuple[Any]:
    """A checkpoint whose tensors are to be read; or, in a tuple, what torch has read of a file of its own, unless that
    is to fill a state or to be `placed`."""
    path = os.fspath(f) if isinstance(f, (str, os.PathLike)) else ""
    source = open_checkpoint(path) if path else None
    if source is None:
        loaded = _torch_load(f, path, options)
        return open_state(loaded, path or "the buffer", plain=not placed) if filling or placed else (loaded,)
    if options:
        raise TypeError(f"dtorch.load: {', '.join(options)}: of torch.load, and {path!r} is no file of torch's")
    return source


def _torch_load(f: Any, path: str, options: dict[str, Any]) -> Any:
    with plain_factories():
        if not path:
            return torch.load(f, **options)
        whole = _is_torchs(path)
        try:
            return torch.load(path, **options)
        except FileNotFoundError:
            raise
        except pickle.UnpicklingError as error:
            if whole and "Unsupported global" in str(error):
                raise  # torch says how to load what it does not load by default
            raise CheckpointError(f"{path}: no checkpoint, truncated or damaged") from error
        except _NOISE as error:
            raise CheckpointError(f"{path}: no checkpoint, truncated or damaged: {_line(error)}") from None


def _is_torchs(path: str) -> bool:
    """Whether the file at `path` is one that torch has written: a zip file, its checksums right (torch itself does not
    look at them), or one of the time before, which has none."""
    try:
        if not zipfile.is_zipfile(path):
            with open(path, "rb") as file:
                return _MAGIC in file.read(32)
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except FileNotFoundError:
        raise
    except Exception as error:  # damaged bytes raise anything
        raise CheckpointError(f"{path}: truncated or damaged: {_line(error)}") from None
    if bad is not None:
        raise CheckpointError(f"{path}: damaged: the checksum of {bad!r} in it is wrong")
    return True


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
