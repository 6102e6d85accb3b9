"""The format of ``torch.distributed.checkpoint``: ``.metadata``, and ``__R_N.distcp`` files of saved tensors.

What dtorch writes, ``torch.distributed.checkpoint.load`` reads, in one process or in many. Beside it lies
``dtorch.json``: the structure of the state with its types, and the CRC-32 of ``.metadata`` and of every item.

``.metadata`` is a pickle. It is read by an unpickler that knows the classes named here and calls nothing else, in
Python, whose memory an index out of all bounds does not exhaust.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zlib
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NoReturn, cast

import torch

from ..errors import CheckpointError
from .files import said
from .pieces import Chunk, Piece, Source, Stored, checksum
from .safetensors import parse_tree
from .tree import decode, encode, shown

__all__ = ["METADATA", "OURS", "flat_values", "open_directory", "write_metadata"]

METADATA, OURS = ".metadata", "dtorch.json"
_NO_CRC = "00000000"
_SAVED_BY = "dtorch-1"


# -- writing ------------------------------------------------------------------------------------------------------


def flat_values(tree: Any) -> tuple[list[tuple[tuple[Any, ...], str]], list[tuple[tuple[Any, ...], Any]]]:
    """The tensors of a tree as (path, name), and its other values as (path, node), as torch flattens a state:
    keys become strings, and a list stays whole where it holds neither tensors nor dicts."""
    tensors: list[tuple[tuple[Any, ...], str]] = []
    values: list[tuple[tuple[Any, ...], Any]] = []

    def kind(node: Any) -> str:
        return next(iter(node)) if type(node) is dict else ""

    def is_terminal(node: Any) -> bool:
        if kind(node) in ("dict", "odict"):
            return False
        if kind(node) != "list":
            return True
        return all(kind(v) != "tensor" and is_terminal(v) for v in node["list"])

    def walk(path: tuple[Any, ...], node: Any) -> None:
        if kind(node) in ("dict", "odict"):
            for key, value in node[kind(node)]:
                walk((*path, str(decode(key, cast("Any", None)))), value)
        elif not is_terminal(node):
            for i, value in enumerate(node["list"]):
                walk((*path, i), value)
        elif kind(node) == "tensor":
            tensors.append((path, node["tensor"]))
        elif not _holds_tensors(node):
            values.append((path, node))

    walk((), tree)
    if kind(tree) not in ("dict", "odict"):
        raise CheckpointError("the format of torch.distributed.checkpoint holds dicts alone: write {'name': tensor}")
    names: set[str] = set()
    for path, _ in (*tensors, *values):
        name = shown(path)
        if name in names:
            raise CheckpointError(
                f"the format of torch.distributed.checkpoint joins keys: two values are called {name!r}"
            )
        names.add(name)
    return tensors, values


def _holds_tensors(node: Any) -> bool:
    found: list[Any] = []
    decode(node, found.append)
    return bool(found)


def write_metadata(
    directory: str,
    tree: Any,
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    pieces: Iterable[Piece],
    written: dict[int, tuple[str, int, int, int]],
    values_file: str,
) -> list[str]:
    """Write what says where everything is, once all pieces are written; the names of the files.

    Args:
        tensors: dtype and shape of each.
        pieces: all of them.
        written: number of a piece -> file, offset, length and CRC-32 of what was written.
        values_file: where the values go that are no tensors.
    """
    # Loading it takes a second, which only a program that writes this format has to spend.
    from torch.distributed.checkpoint import filesystem  # noqa: PLC0415
    from torch.distributed.checkpoint import metadata as m  # noqa: PLC0415

    by_name: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    placed, values = flat_values(tree)
    state: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    paths: dict[str, Any] = {}
    checks: dict[str, dict[str, int]] = {}
    for path, name in placed:
        dtype, shape = tensors[name]
        flat = shown(path)
        paths[flat] = path
        chunks: list[Any] = []
        for i, piece in enumerate(by_name[name]):
            file, offset, length, crc = written[piece.number]
            chunks.append(m.ChunkStorageMetadata(torch.Size(piece.start), torch.Size(piece.sizes)))
            storage[m.MetadataIndex(flat, piece.start, i)] = filesystem._StorageInfo(file, offset, length)
            checks.setdefault(file, {})[str(offset)] = crc
        state[flat] = m.TensorStorageMetadata(m.TensorProperties(dtype=dtype), torch.Size(shape), chunks)
    with open(os.path.join(directory, values_file), "wb") as out:
        for path, node in values:
            flat = shown(path)
            paths[flat] = path
            buffer = io.BytesIO()
            torch.save(decode(node, cast("Any", None)), buffer)
            data = buffer.getvalue()
            state[flat] = m.BytesStorageMetadata()
            storage[m.MetadataIndex(flat)] = filesystem._StorageInfo(values_file, out.tell(), len(data))
            checks.setdefault(values_file, {})[str(out.tell())] = zlib.crc32(data)
            out.write(data)
    meta = m.StorageMeta(save_id=_SAVED_BY)
    whole = m.Metadata(state_dict_metadata=state, planner_data=paths, storage_data=storage, storage_meta=meta)
    whole.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    data = pickle.dumps(whole)
    ours: dict[str, Any] = {"version": 1, "tree": tree, "metadata": f"{zlib.crc32(data):08x}", "checks": checks}
    ours["crc32"] = _NO_CRC
    ours["crc32"] = checksum(ours)
    for name, content in ((METADATA, data), (OURS, json.dumps(ours).encode())):
        with open(os.path.join(directory, name), "wb") as out:
            out.write(content)
    return [values_file, METADATA, OURS]


# -- reading ------------------------------------------------------------------------------------------------------


class _Plain:
    """Stands for a class of torch's: holds what was pickled of an instance."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(cast("dict[str, Any]", state))
        else:
            self.state = state


class _MemoryFormat:
    """Stands for an enum of torch's, which says nothing that is needed here."""

    def __init__(self, value: int) -> None:
        self.value = value


def _said_only(*parts: Any) -> str:
    """Stands for a layout or a path, of which nothing is needed."""
    return "/".join(map(str, parts))


_METADATA_CLASSES = {
    name: type(name, (_Plain,), {})
    for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex",
        "TensorProperties", "StorageMeta", "_StorageInfo",
    )
}  # fmt: skip
_PLACES = {
    "torch.distributed.checkpoint.metadata": _METADATA_CLASSES,
    "torch.distributed.checkpoint.filesystem": _METADATA_CLASSES,
    "torch.distributed._shard.sharded_tensor.metadata": _METADATA_CLASSES,
}


class _Unpickler(pickle._Unpickler):  # type: ignore[name-defined,misc]  # pyright: ignore
    """Reads ``.metadata``: values, the classes above as dead records, and nothing that runs."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _PLACES:
            if name in ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"):
                return _MemoryFormat
            if name in _PLACES[module]:
                return _PLACES[module][name]
        if module == "torch":
            if name == "Size":
                return torch.Size
            if isinstance(found := getattr(torch, name, None), torch.dtype):
                return found
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _said_only
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):
            return _said_only
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise pickle.UnpicklingError(f"names {module}.{name}, which is no part of such a file")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("names objects outside the file")


def open_directory(path: str) -> Source:
    """The checkpoint in the directory `path`.

    Raises:
        CheckpointError: it is none, or not whole.
    """
    where = os.path.join(path, METADATA)
    data = _read_file(where)
    ours = _ours(path, data)
    try:
        metadata: Any = _Unpickler(io.BytesIO(data)).load()
        by_box, infos = _storage(metadata)
        checks = None if ours is None else ours["checks"]
        tensors: dict[str, Stored] = {}
        plain: dict[str, tuple[str, int, int]] = {}
        for name, entry in metadata.state_dict_metadata.items():
            if type(name) is not str:
                raise TypeError(f"the name {name!r}")
            if type(entry).__name__ == "TensorStorageMetadata":
                tensors[name] = _tensor(path, name, entry, by_box, checks)
            else:
                file, offset, length = plain[name] = infos[name]
                _check_size(os.path.join(path, file), offset + length)
        saved_by = getattr(getattr(metadata, "storage_meta", None), "save_id", None)
        paths = _paths(metadata, list(metadata.state_dict_metadata))
    except CheckpointError:
        raise
    except Exception as error:  # an unpickler of damaged bytes raises anything
        raise CheckpointError(f"{where}: no metadata of a checkpoint, or damaged: {_said(error)}") from None
    if saved_by == _SAVED_BY and ours is None:
        raise CheckpointError(f"{os.path.join(path, OURS)}: the file is missing, which belongs to {where}")
    if ours is not None:
        tree = ours["tree"]
        known = {name: tensors[shown(p)] for p, name in flat_values(tree)[0] if shown(p) in tensors}
        return Source(path, tree, parse_tree(tree, known, path))
    tree, inside = _foreign_tree(path, paths, tensors, plain)
    return Source(path, tree, {**tensors, **inside})


def _ours(path: str, metadata: bytes) -> dict[str, Any] | None:
    where = os.path.join(path, OURS)
    if not os.path.lexists(where):
        return None
    try:
        ours: Any = json.loads(_read_file(where))
        told, ours["crc32"] = ours["crc32"], _NO_CRC
        if checksum(ours) != told or ours["version"] != 1:
            raise ValueError
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{where}: damaged: its checksum is not that of its contents") from None
    if f"{zlib.crc32(metadata):08x}" != ours["metadata"]:
        raise CheckpointError(f"{os.path.join(path, METADATA)}: of another checkpoint than {where}, or damaged")
    return cast("dict[str, Any]", ours)


def _storage(metadata: Any) -> tuple[dict[Any, tuple[str, int, int]], dict[str, tuple[str, int, int]]]:
    """Where the items are: by name and offset of tensors' chunks, and by name of others."""
    boxes: dict[Any, tuple[str, int, int]] = {}
    others: dict[str, tuple[str, int, int]] = {}
    for index, info in metadata.storage_data.items():
        file, offset, length = info.relative_path, info.offset, info.length
        if type(file) is not str or os.path.basename(file) != file or not file:
            raise CheckpointError(f"{METADATA} names the file {file!r}, outside its directory")
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            raise ValueError("an item lies nowhere")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{METADATA}: items are transformed ({info.transform_descriptors}): not supported")
        if getattr(index, "offset", None) is None:
            others[index.fqn] = (file, offset, length)
        else:
            boxes[index.fqn, tuple(index.offset)] = (file, offset, length)
    return boxes, others


def _tensor(path: str, name: str, entry: Any, boxes: dict[Any, Any], checks: Any) -> Stored:
    shape, properties = tuple(entry.size), entry.properties
    dtype = properties.state[0] if hasattr(properties, "state") else properties.dtype
    if not isinstance(dtype, torch.dtype) or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"{name!r} is no tensor")
    chunks: list[Chunk] = []
    for chunk in entry.chunks:
        start, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        numbers = (*start, *sizes)
        if len(start) != len(shape) or len(sizes) != len(shape) or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"a chunk of {name!r} is no box of it")
        if any(a + n > size for a, n, size in zip(start, sizes, shape, strict=True)):
            raise ValueError(f"a chunk of {name!r} lies outside of it")
        file, offset, length = boxes[name, start]
        crc = None if checks is None else (int(checks[file][str(offset)]),)
        where = os.path.join(path, file)
        _check_size(where, offset + length)
        chunks.append(Chunk(where, offset, length, start, sizes, crc, True))
    if sum(prod(c.sizes) for c in chunks) != prod(shape) or not _disjoint(chunks):
        raise ValueError(f"the chunks of {name!r} do not make up the whole of it")
    return Stored(dtype, shape, tuple(c for c in chunks if prod(c.sizes)))


def _disjoint(chunks: Sequence[Chunk]) -> bool:
    boxes = [(c.start, c.sizes) for c in chunks if prod(c.sizes)]
    if len(boxes) > 300:
        return len(set(boxes)) == len(boxes)  # their volumes add up: enough, where all pairs are too many
    return not any(
        all(a < b + m and b < a + n for a, n, b, m in zip(*first, *second, strict=True))
        for i, first in enumerate(boxes)
        for second in boxes[:i]
    )


def _paths(metadata: Any, names: list[str]) -> dict[str, tuple[Any, ...]]:
    given = getattr(metadata, "planner_data", None)
    known: dict[Any, Any] = given if isinstance(given, dict) else {}
    paths: dict[str, tuple[Any, ...]] = {}
    for name in names:
        path: Any = known.get(name)
        whole = type(path) is tuple and path and all(type(k) in (str, int) for k in path)
        paths[name] = tuple(path) if whole else (name,)
    return paths


def _foreign_tree(
    path: str, paths: dict[str, tuple[Any, ...]], tensors: dict[str, Stored], plain: dict[str, tuple[str, int, int]]
) -> tuple[Any, dict[str, Stored]]:
    """The tree of a checkpoint that torch wrote, and the tensors that its other values hold."""
    inside: dict[str, Stored] = {}
    root: dict[Any, Any] = {}
    for name, keys in paths.items():
        if name in tensors:
            node: Any = {"tensor": name, "dtype": str(tensors[name].dtype).removeprefix("torch.")}
        else:
            node = _value(path, name, plain[name], inside)
        at = root
        for key in keys[:-1]:
            at = at.setdefault(key, {})
            if type(at) is not dict:
                raise CheckpointError(f"{os.path.join(path, METADATA)}: {name!r} lies inside of another value")
        at[keys[-1]] = _Node(node)
    return _nest(root), inside


class _Node:
    """A finished node, among the dicts of those that are not."""

    def __init__(self, node: Any) -> None:
        self.node = node


def _nest(found: Any) -> Any:
    if isinstance(found, _Node):
        return found.node
    if found and all(type(k) is int for k in found):
        return {"list": [_nest(found[k]) for k in sorted(found)]}
    return {"dict": [[k, _nest(v)] for k, v in found.items()]}


def _value(path: str, name: str, item: tuple[str, int, int], inside: dict[str, Stored]) -> Any:
    file, offset, length = item
    where = os.path.join(path, file)
    _check_size(where, offset + length)
    data = _read_file(where, offset, length)
    try:
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        node, leaves = encode(value, lambda t: True)
    except Exception:
        raise CheckpointError(
            f"{where}: the value {name!r} is damaged, or of a type that is not read without running code"
        ) from None
    return _renamed(node, leaves, name, inside)


def _renamed(node: Any, leaves: Any, name: str, inside: dict[str, Stored]) -> Any:
    """`node`, whose tensors are called after the value they are in, and added to `inside`."""
    for leaf in leaves:
        inside[f"{name}.{leaf.name}"] = Stored(leaf.tensor.dtype, tuple(leaf.tensor.shape), value=leaf.tensor)

    def rename(n: dict[str, Any]) -> None:
        n["tensor"] = f"{name}.{n['tensor']}"

    decode(node, rename)
    return node


def _check_size(path: str, end: int) -> None:
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing, which {METADATA} names") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {said(error)}") from None
    if end > size:
        raise CheckpointError(f"{path}: truncated: {end:,} bytes were expected, and there are {size:,}")


def _read_file(path: str, offset: int = 0, length: int = -1) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: {said(error)}") from None


def _said(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
