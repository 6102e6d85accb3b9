"""safetensors: one file, or a directory of several with the index that Hugging Face's libraries read.

A file is eight bytes of length, a header in JSON, and the tensors' bytes one after the other. dtorch keeps in the
header's ``__metadata__``, beside "format": "pt":

    dtorch.version  "1"
    dtorch.checks   CRC-32 of the data, block by block in the order of the file, eight hex digits each
    dtorch.runs     JSON: tensor name -> bytes of each run of rows that one executor wrote, where there are several;
                    blocks are counted anew in each run
    dtorch.tree     the structure of the state (`tree`); in a directory the index has it
    dtorch.crc32    CRC-32 of the header with this at "00000000"

and in the index's "metadata" a key "dtorch": {"version", "tree", "files": name -> [bytes, CRC-32 of the header],
"crc32"}. A name that is tied to another is in the metadata as safetensors.torch.save_model has it: name -> the other.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import torch

from ..errors import CheckpointError
from .files import said
from .pieces import Chunk, Source, Stored, blocks, checksum
from .tree import dtype_of, leaves_of

__all__ = ["INDEX", "Entry", "FileLayout", "index", "is_file", "open_directory", "open_file", "parse_tree"]

INDEX = "model.safetensors.index.json"
_NO_CRC = "00000000"
_MOST = 100_000_000  # bytes of a header, as safetensors has it
_TREE = "dtorch.tree"
_KEYS = ("dtorch.version", "dtorch.checks", "dtorch.runs", "dtorch.crc32")

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "BOOL": "bool",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
_TO_TORCH = {name: getattr(torch, dtype) for name, dtype in _DTYPES.items() if hasattr(torch, dtype)}
_FROM_TORCH = {dtype: name for name, dtype in _TO_TORCH.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file that is to be written; `runs` are the bytes that each executor writes of it, in order."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    runs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Where everything goes in one file.

    Attributes:
        name: of the file.
        header: as it will be, but for the checksums.
        checks: how many of these the header will have.
        data: where the tensors begin.
        size: bytes of the whole file.
    """

    name: str
    header: dict[str, Any]
    checks: int
    data: int
    size: int

    @staticmethod
    def of(name: str, entries: Sequence[Entry], metadata: dict[str, str]) -> FileLayout:
        """The layout of file `name` with `entries` in this order."""
        runs = {e.name: list(e.runs) for e in entries if len(e.runs) > 1}
        checks = sum(blocks(n) for e in entries for n in e.runs)
        header: dict[str, Any] = {
            "__metadata__": {
                "format": "pt",
                **metadata,
                "dtorch.version": "1",
                "dtorch.runs": json.dumps(runs, separators=(",", ":")),
                "dtorch.checks": "0" * 8 * checks,
                "dtorch.crc32": _NO_CRC,
            }
        }
        at = 0
        for e in entries:
            dtype, shape = _stored_as(e.dtype, e.shape)
            end = at + prod(e.shape) * e.dtype.itemsize
            header[e.name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
            at = end
        data = len(_bytes(header))
        return FileLayout(name, header, checks, data, data + at)

    def offset(self, name: str) -> int:
        """Where tensor `name` begins in the file."""
        return self.data + self.header[name]["data_offsets"][0]

    def render(self, checks: Sequence[int]) -> bytes:
        """The first bytes of the file, up to the tensors."""
        metadata = self.header["__metadata__"]
        metadata["dtorch.checks"] = "".join(f"{c:08x}" for c in checks)
        metadata["dtorch.crc32"] = _NO_CRC
        metadata["dtorch.crc32"] = checksum(self.header)
        made = _bytes(self.header)
        assert len(made) == self.data, "a header's length depends on its checksums"
        return made


def index(layouts: Sequence[FileLayout], tree: Any) -> bytes:
    """The index of files that are written, their headers rendered."""
    weights = {name: f.name for f in layouts for name in f.header if name != "__metadata__"}
    files = {f.name: [f.size, f.header["__metadata__"]["dtorch.crc32"]] for f in layouts}
    ours = {"version": 1, "tree": tree, "files": files, "crc32": _NO_CRC}
    total = sum(f.size - f.data for f in layouts)
    made = {"metadata": {"total_size": total, "dtorch": ours}, "weight_map": weights}
    ours["crc32"] = checksum(made)
    return json.dumps(made, indent=1).encode()


def is_file(path: str) -> bool:
    """Whether the file at `path` is to be read as safetensors, by its name or its first bytes."""
    if path.endswith(".safetensors"):
        return True
    try:
        with open(path, "rb") as file:
            head = file.read(9)
    except OSError:
        return False
    return len(head) == 9 and head[8:] == b"{" and int.from_bytes(head[:8], "little") <= _MOST


def open_file(path: str) -> Source:
    """The checkpoint in one file.

    Raises:
        CheckpointError: it is no whole safetensors file.
    """
    header, tensors = _read(path)
    metadata = header["__metadata__"]
    if _TREE not in metadata:
        return Source(path, _flat_tree(tensors), tensors)
    return _with_tree(path, _json(metadata[_TREE], path, "the structure of the state"), tensors)


def open_directory(path: str, names: Sequence[str]) -> Source:
    """The checkpoint in the directory `path`, which holds `names`.

    Raises:
        CheckpointError: it is none, or not whole.
    """
    found = sorted(n for n in names if n.endswith(".safetensors.index.json"))
    if not found:
        files = sorted(n for n in names if n.endswith(".safetensors"))
        if len(files) != 1:
            raise CheckpointError(f"{path}: {len(files)} .safetensors files and no {INDEX} to say which belong to it")
        where = os.path.join(path, files[0])
        _refuse_part(_read(where)[0], where, f"{os.path.join(path, INDEX)} is missing")
        return open_file(where)
    if len(found) > 1:
        raise CheckpointError(f"{path}: {found[0]} and {found[1]} are two checkpoints; give the name of one file")
    where = os.path.join(path, found[0])
    try:
        with open(where, "rb") as file:
            data = file.read()
    except OSError as error:
        raise CheckpointError(f"{where}: {said(error)}") from None
    return _from_index(path, where, _json(data, where, "the index"))


def _from_index(path: str, where: str, read: Any) -> Source:
    weights = read.get("weight_map") if type(read) is dict else None
    metadata = read.get("metadata", {}) if type(read) is dict else None
    if type(weights) is not dict or type(metadata) is not dict:
        raise CheckpointError(f'{where}: no index of safetensors files: "weight_map" and "metadata" were expected')
    if any(type(n) is not str or os.path.basename(n) != n or not n for n in weights.values()):
        raise CheckpointError(f"{where}: names a file outside its directory")
    ours = metadata.get("dtorch")
    if ours is None and any("dtorch" in str(key) for key in (*metadata, *read)):
        _damaged(where)
    if ours is not None:
        try:
            told, ours["crc32"] = ours["crc32"], _NO_CRC
            files, tree = dict(ours["files"]), ours["tree"]
            if ours["version"] != 1:
                raise CheckpointError(f"{where}: of version {ours['version']!r}; this dtorch reads version 1")
        except (TypeError, KeyError, ValueError):
            _damaged(where)
        if checksum(read) != told:
            _damaged(where)
        names = sorted(files)
    else:
        files, tree, names = {}, None, sorted(set(weights.values()))
    tensors: dict[str, Stored] = {}
    for name in names:
        header, inside = _read(os.path.join(path, name), missing=f"which {where} names")
        if ours is None:
            _refuse_part(header, os.path.join(path, name), f"{where} is damaged")
        else:
            told = files[name]
            if header["__metadata__"].get("dtorch.crc32") != told[1]:
                raise CheckpointError(f"{os.path.join(path, name)}: of another checkpoint than {where}, or damaged")
        tensors.update({n: t for n, t in inside.items() if weights.get(n) == name})
    lacking = next((n for n in weights if n not in tensors), None)
    if lacking is not None:
        raise CheckpointError(f"{os.path.join(path, weights[lacking])}: has no tensor {lacking!r}, which {where} names")
    if ours is None:
        return Source(path, _flat_tree({n: tensors[n] for n in weights}), tensors)
    return _with_tree(path, tree, tensors)


def _refuse_part(header: dict[str, Any], path: str, problem: str) -> None:
    """Refuse a file that belongs to an index of ours, where there is none."""
    metadata = header["__metadata__"]
    if "dtorch.version" in metadata and _TREE not in metadata:
        raise CheckpointError(f"{path}: part of a checkpoint, and {problem}")


def parse_tree(tree: Any, tensors: dict[str, Stored], path: str) -> dict[str, Stored]:
    """`tensors` with the dtypes and shapes that `tree` gives them.

    Raises:
        CheckpointError: it names others, or what it says of one does not fit its bytes.
    """
    found = dict(tensors)
    for node in leaves_of(tree):
        name, dtype = node["tensor"], dtype_of(node.get("dtype"))
        stored = tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{path}: the tensor {name!r} of the state is missing")
        if dtype is stored.dtype:
            continue
        told, shape = _stored_as(dtype, stored.shape[:-1])
        if _TO_TORCH.get(told) is not stored.dtype or shape != stored.shape:
            raise CheckpointError(f"{path}: {name!r} is {stored.dtype} {list(stored.shape)}, and was to be {dtype}")
        chunks = tuple(c._replace(start=c.start[:-1], sizes=c.sizes[:-1]) for c in stored.chunks)
        found[name] = Stored(dtype, stored.shape[:-1], chunks)
    return found


def _with_tree(path: str, tree: Any, tensors: dict[str, Stored]) -> Source:
    return Source(path, tree, parse_tree(tree, tensors, path))


def _flat_tree(tensors: dict[str, Stored]) -> Any:
    return {"dict": [[n, {"tensor": n, "dtype": str(t.dtype).removeprefix("torch.")}] for n, t in tensors.items()]}


def _stored_as(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """As what a tensor is stored: where safetensors lacks its dtype, with one more dim, of parts or of bytes."""
    if dtype in _FROM_TORCH:
        return _FROM_TORCH[dtype], shape
    if dtype.is_complex:
        return _FROM_TORCH[dtype.to_real()], (*shape, 2)
    return "U8", (*shape, dtype.itemsize)


def _bytes(header: dict[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _damaged(path: str) -> NoReturn:
    raise CheckpointError(f"{path}: damaged: its checksum is not that of its contents")


def _json(data: bytes | str, path: str, what: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {what} is no JSON: {str(error)[:120]}") from None


def _read(path: str, missing: str = "") -> tuple[dict[str, Any], dict[str, Stored]]:
    """The header of a file, and its tensors as they are stored."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length > _MOST:
                raise CheckpointError(f"{path}: no safetensors file: it begins with {head!r}, not a header's length")
            if 8 + length > size:
                raise CheckpointError(f"{path}: truncated: its header has {length:,} bytes, and the file {size:,}")
            text = file.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing{missing and ', ' + missing}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {said(error)}") from None
    header = _json(text, path, "the header of a safetensors file")
    if type(header) is not dict:
        raise CheckpointError(f"{path}: no safetensors file: its header is no object")
    metadata = header.pop("__metadata__", {})
    if type(metadata) is not dict or not all(type(v) is str for v in metadata.values()):
        raise CheckpointError(f"{path}: no safetensors file: its __metadata__ are no strings")
    tensors = _tensors(path, header, 8 + length, size)
    header["__metadata__"] = metadata
    if any("dtorch" in key for key in metadata):
        if any(key not in metadata for key in _KEYS):
            _damaged(path)
        told, metadata["dtorch.crc32"] = metadata["dtorch.crc32"], _NO_CRC
        if checksum(header) != told:
            _damaged(path)
        metadata["dtorch.crc32"] = told
        if metadata["dtorch.version"] != "1":
            raise CheckpointError(f"{path}: of version {metadata['dtorch.version']!r}; this dtorch reads version 1")
        tensors = _checked(path, tensors, metadata)
    return header, tensors


def _tensors(path: str, header: dict[str, Any], data: int, size: int) -> dict[str, Stored]:
    """The tensors of a header, in the order of the file; they must fill it."""
    found: list[tuple[int, int, str, torch.dtype, tuple[int, ...]]] = []
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            numbers = (*shape, begin, end)
            if len(entry) != 3 or any(type(n) is not int or not 0 <= n < 1 << 63 for n in numbers):
                raise ValueError
        except (TypeError, KeyError, ValueError):
            raise CheckpointError(f"{path}: the entry of {name!r} is none of a safetensors file") from None
        if dtype not in _TO_TORCH:
            raise CheckpointError(f"{path}: {name!r} is of dtype {str(dtype)[:40]!r}, which torch has not")
        known = _TO_TORCH[dtype]
        if end - begin != prod(shape) * known.itemsize:
            raise CheckpointError(
                f"{path}: {name!r} is {dtype} {list(shape)}, which are {prod(shape) * known.itemsize:,} bytes, and has "
                f"{end - begin:,}"
            )
        found.append((begin, end, name, known, shape))
    found.sort(key=lambda f: f[:2])
    at = 0
    for begin, end, name, _, _ in found:
        if begin != at:
            raise CheckpointError(f"{path}: {name!r} begins at byte {begin:,} of the data, and not at {at:,}")
        at = end
    if data + at != size:
        raise CheckpointError(
            f"{path}: {'truncated' if size < data + at else 'too long'}: {data + at:,} bytes were expected, and there "
            f"are {size:,}"
        )
    return {
        name: Stored(dtype, shape, (Chunk(path, data + begin, end - begin, (0,) * len(shape), shape),))
        for begin, end, name, dtype, shape in found
    }


def _checked(path: str, tensors: dict[str, Stored], metadata: dict[str, str]) -> dict[str, Stored]:
    """`tensors`, cut as they were written, with the checksums of every block."""
    runs, checks = _json(metadata["dtorch.runs"], path, "the list of runs"), metadata["dtorch.checks"]
    out: dict[str, Stored] = {}
    at = 0
    try:
        for name, t in tensors.items():
            whole = t.chunks[0]
            sizes = runs.get(name) or ([whole.nbytes] if whole.nbytes else [])
            chunks: list[Chunk] = []
            done = 0
            row = whole.nbytes // t.shape[0] if len(sizes) > 1 else 0
            for n in sizes:
                count = blocks(n)
                digits = checks[8 * at : 8 * (at + count)]
                words = tuple(int(digits[i : i + 8], 16) for i in range(0, 8 * count, 8))
                start, box = whole.start, whole.sizes
                if row:
                    start, box = (done // row, *start[1:]), (n // row, *box[1:])
                chunks.append(Chunk(path, whole.offset + done, n, start, box, words))
                at, done = at + count, done + n
            if done != whole.nbytes:
                _damaged(path)
            out[name] = Stored(t.dtype, t.shape, tuple(chunks))
    except (TypeError, ValueError, ZeroDivisionError, AttributeError, IndexError):
        _damaged(path)
    if 8 * at != len(checks):
        _damaged(path)
    return out
