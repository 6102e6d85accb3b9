"""Files of checkpoints: what is written is read, and what is damaged is refused in one line. No process is started."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed.checkpoint as torch_dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dtorch.checkpoint import dcp, files, reading
from dtorch.checkpoint import safetensors as ours
from dtorch.checkpoint.loading import open_checkpoint
from dtorch.checkpoint.pieces import BLOCK, Piece, Source, Stored, checksums
from dtorch.checkpoint.safetensors import Entry, FileLayout
from dtorch.checkpoint.tree import decode, encode
from dtorch.errors import CheckpointError

# torch says that it takes no process group for what it was told to do without.
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning", "ignore:ComplexHalf support is experimental:UserWarning"
)

FUZZ = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool,    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of any dtype whose bytes are all different, as far as they can be."""
    g = torch.Generator().manual_seed(len(shape))
    n = max(1, torch.Size(shape).numel()) * dtype.itemsize
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (n,), dtype=torch.uint8, generator=g)
    return data.view(dtype)[: torch.Size(shape).numel()].reshape(shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes."""
    raw = [t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(*raw)


def put(directory: Path, layouts: list[tuple[FileLayout, dict[str, torch.Tensor]]]) -> None:
    """Write files as executors do."""
    for layout, tensors in layouts:
        checks: list[int] = []
        with open(directory / layout.name, "wb") as file:
            for name, t in tensors.items():
                data = memoryview(t.contiguous().reshape(-1).view(torch.uint8).numpy())
                file.seek(layout.offset(name))
                file.write(data)
                at = 0
                for n in RUNS.get(name, (len(data),)):
                    checks += checksums(data[at : at + n])
                    at += n
            file.seek(0)
            file.write(layout.render(checks))
            file.truncate(layout.size)


# How some tensors were cut when they were written: by rows, unevenly.
RUNS: dict[str, tuple[int, ...]] = {"cut": (3 * 80, 2 * 80), "large": (BLOCK + 8000, BLOCK // 2 + 8000)}


def layout_of(name: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> FileLayout:
    entries = [
        Entry(n, t.dtype, tuple(t.shape), RUNS.get(n) or ((t.nbytes,) if t.nbytes else ())) for n, t in tensors.items()
    ]
    return FileLayout.of(name, entries, metadata)


STATE: dict[str, Any] = {
    "model": {"cut": filled(torch.float32, 5, 20), "b.c": filled(torch.bfloat16, 3)},
    "step": 17,
    "rates": [0.1, float("inf"), {"t": filled(torch.int64)}],
    "none": filled(torch.uint8, 0, 4),
}


def write_file(path: Path, state: Any) -> None:
    tree, leaves = encode(state, lambda t: True)
    tensors = {leaf.name: leaf.tensor for leaf in leaves}
    put(path.parent, [(layout_of(path.name, tensors, {"dtorch.tree": json.dumps(tree)}), tensors)])


def write_directory(path: Path, state: Any, count: int = 2) -> None:
    path.mkdir(exist_ok=True)
    tree, leaves = encode(state, lambda t: True)
    layouts = []
    for k in range(count):
        tensors = {leaf.name: leaf.tensor for leaf in leaves[k::count]}
        layouts.append((layout_of(f"model-{k}.safetensors", tensors, {}), tensors))
    put(path, layouts)
    (path / ours.INDEX).write_bytes(ours.index([layout for layout, _ in layouts], tree))


def write_dcp(path: Path, state: Any) -> None:
    path.mkdir(exist_ok=True)
    tree, leaves = encode(state, lambda t: True)
    pieces, written = [], {}
    with open(path / "__0_0.distcp", "wb") as file:
        for n, leaf in enumerate(leaves):
            start, shape = (0,) * leaf.tensor.ndim, tuple(leaf.tensor.shape)
            pieces.append(Piece(n, 0, 0, 0, "__0_0.distcp", 0, leaf.name, start, shape))
            at = file.tell()
            torch.save(leaf.tensor.clone(), file)
            written[n] = (at, file.tell() - at)
    data = (path / "__0_0.distcp").read_bytes()
    items = {n: ("__0_0.distcp", at, size, checksums(data[at : at + size])[0]) for n, (at, size) in written.items()}
    shapes = {leaf.name: (leaf.tensor.dtype, tuple(leaf.tensor.shape)) for leaf in leaves}
    dcp.write_metadata(str(path), tree, shapes, pieces, items, "__0_1.distcp")


def box(stored: Stored, region: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Read part of a tensor, as an executor does."""
    if stored.value is not None:
        return stored.value
    out = torch.empty([n for _, n in region], dtype=stored.dtype)
    opened: dict[str, int] = {}

    def fd(path: str) -> int:
        return opened.setdefault(path, os.open(path, os.O_RDONLY))

    try:
        done = sum(reading.copy_overlap(out, region, chunk, fd) for chunk in stored.chunks)
    finally:
        for found in set(opened.values()):
            os.close(found)
    assert done == out.numel()
    return out


def read(source: Source) -> Any:
    """The whole state of a checkpoint."""

    def tensor(node: dict[str, Any]) -> torch.Tensor:
        stored = source.tensors[node["tensor"]]
        return box(stored, tuple((0, n) for n in stored.shape))

    return decode(source.tree, tensor)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and same(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if type(a) in (list, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


WRITERS: dict[str, Callable[[Path, Any], None]] = {
    "x.safetensors": write_file,
    "directory": write_directory,
    "dcp": write_dcp,
}


# -- trees ------------------------------------------------------------------------------------------------------------

keys = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.tuples(st.integers(), st.text(max_size=3)))
values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=9), st.complex_numbers(),
        st.sampled_from([torch.float32, torch.device("cpu"), torch.Size([2, 3])]),
        st.sampled_from(DTYPES).map(lambda d: filled(d, 2)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(values)
def test_a_tree_is_the_state_it_was_made_of(state: Any) -> None:
    tree, leaves = encode(state, lambda t: True)
    tensors = {leaf.name: leaf.tensor for leaf in leaves}
    assert len(tensors) == len(leaves) and not tensors.keys() & {"", "__metadata__"}
    # 1 and True are one key of a dict, and are so in the state.
    assert equal(decode(json.loads(json.dumps(tree, allow_nan=False)), lambda node: tensors[node["tensor"]]), state)


def test_names_are_the_keys_on_the_way_and_never_collide() -> None:
    t = torch.zeros(1)
    _, leaves = encode({"a": {"b": t}, "a.b": t, "l": [t, (t,)], 3: t, "3": t, "": t}, lambda t: False)
    assert [leaf.name for leaf in leaves] == ["a.b", "a.b#2", "l.0", "l.1.0", "3", "3#2", "#2"]


def test_modules_and_optimizers_stand_for_their_state() -> None:
    m = torch.nn.Linear(2, 2)
    o = torch.optim.SGD(m.parameters(), lr=0.5)
    tree, leaves = encode({"m": m, "o": o}, lambda t: True)
    assert [leaf.name for leaf in leaves] == ["m.weight", "m.bias"]
    made = decode(tree, lambda node: None)
    assert type(made["m"]) is OrderedDict and made["m"]._metadata == m.state_dict()._metadata
    assert made["o"]["param_groups"][0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("state", "where"),
    [({"a": [1, object()]}, "a.1 is a object"), ({"a": {1, 2}}, "a is a set"), ({"a": {frozenset(): 1}}, "a key of a")],
)
def test_what_no_tree_holds_is_refused_by_name(state: Any, where: str) -> None:
    with pytest.raises(TypeError, match=where):
        encode(state, lambda t: True)


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["a"] = state
    with pytest.raises(TypeError, match="contains itself"):
        encode(state, lambda t: True)


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"no": 1},
        {"dict": [1]},
        {"list": 5},
        {"dtype": "Tensor"},
        {"device": "x"},
        {"bytes": "*"},
        {"size": ["a"]},
        [],
    ],
)
def test_a_tree_that_is_none_is_refused(tree: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        decode(tree, lambda node: None)
    assert "\n" not in str(caught.value)


# -- whole files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_what_was_written_is_read(tmp_path: Path, name: str) -> None:
    state = {**STATE, **{str(d): filled(d, 3, 4) for d in DTYPES}}
    WRITERS[name](tmp_path / name, state)
    source = open_checkpoint(tmp_path / name)
    assert source is not None and equal(read(source), state)


def test_safetensors_reads_what_was_written(tmp_path: Path) -> None:
    flat = {"cut": STATE["model"]["cut"], "b": filled(torch.float8_e5m2, 7), "c": filled(torch.bool, 2, 2)}
    write_file(tmp_path / "x.safetensors", flat)
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == flat.keys() and all(same(found[k], flat[k]) for k in flat)
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_what_safetensors_wrote_is_read(tmp_path: Path) -> None:
    flat = {str(d): filled(d, 2, 3) for d in ours._FROM_TORCH}
    save_file(flat, tmp_path / "x.safetensors")
    for path in (tmp_path / "x.safetensors", tmp_path):
        source = open_checkpoint(path)
        assert source is not None
        found = read(source)
        assert found.keys() == flat.keys() and all(same(found[k], flat[k]) for k in flat)


def test_torch_reads_a_directory_of_its_format(tmp_path: Path) -> None:
    state = {"a": {"w": filled(torch.float32, 3, 2), "n": 3, "l": [1, 2]}, "t": [filled(torch.int8, 2), {"k": "v"}]}
    write_dcp(tmp_path / "x", state)
    into: dict[str, Any] = {
        "a": {"w": torch.zeros(3, 2), "n": 0, "l": []},
        "t": [torch.zeros(2, dtype=torch.int8), {"k": ""}],
    }
    torch_dcp.load(into, checkpoint_id=tmp_path / "x", no_dist=True)
    assert equal(into, state)


def test_what_torch_wrote_in_its_format_is_read(tmp_path: Path) -> None:
    state = {
        "a": {"w": filled(torch.float32, 3, 2), "n": 3},
        "t": [filled(torch.bool, 2), filled(torch.int8)],
        "x": (1, "y"),
    }
    torch_dcp.save(dict(state), checkpoint_id=tmp_path / "x", no_dist=True)
    source = open_checkpoint(tmp_path / "x")
    assert source is not None and equal(read(source), state)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_box_of_a_tensor_is_read(tmp_path: Path, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    cuts = data.draw(st.integers(1, shape[0]))
    t = torch.arange(torch.Size(shape).numel()).reshape(shape)
    row = t.nbytes // shape[0]
    sizes = [cuts] * (shape[0] // cuts) + [shape[0] % cuts] * bool(shape[0] % cuts)
    RUNS["t"] = tuple(n * row for n in sizes)
    spans = [data.draw(st.tuples(st.integers(0, n - 1), st.integers(1, n))) for n in shape]
    region = tuple((start, min(n, size - start)) for (start, n), size in zip(spans, shape, strict=True))
    write_file(tmp_path / "x.safetensors", {"t": t})
    del RUNS["t"]
    source = open_checkpoint(tmp_path / "x.safetensors")
    assert source is not None
    assert torch.equal(box(source.tensors["t"], region), t[tuple(slice(a, a + n) for a, n in region)])


def test_no_more_is_read_than_the_box_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    t = filled(torch.float32, 4096, 512)  # 8 MiB
    write_file(tmp_path / "x.safetensors", {"t": t})
    source = open_checkpoint(tmp_path / "x.safetensors")
    assert source is not None
    total = 0
    plain = os.preadv

    def counted(fd: int, buffers: Any, at: int) -> int:
        nonlocal total
        n = plain(fd, buffers, at)
        total += n
        return n

    monkeypatch.setattr(os, "preadv", counted)
    assert same(box(source.tensors["t"], ((1024, 1024), (0, 512))), t[1024:2048])
    assert total == 2 * BLOCK
    assert same(box(source.tensors["t"], ((1000, 10), (7, 3))), t[1000:1010, 7:10])
    assert total == 3 * BLOCK


# -- damage -----------------------------------------------------------------------------------------------------------


def refused(path: Path) -> str:
    """The one line in which the checkpoint at `path` is refused."""
    with pytest.raises(CheckpointError) as caught:
        source = open_checkpoint(path)
        assert source is not None
        read(source)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


def raw(path: Path, header: Any, data: bytes, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "length", "says"),
    [
        ({"a": ENTRY}, b"1234567", None, "truncated: "),
        ({"a": ENTRY}, b"123456789", None, "too long: "),
        ({"a": ENTRY}, b"12345678", 1 << 40, "not a header's length"),
        ({"a": ENTRY}, b"12345678", 90_000_000, "truncated: its header has 90,000,000 bytes"),
        ({"a": ENTRY}, b"12345678", 20, "is no JSON"),
        (b"[]", b"", None, "is no object"),
        (b"[" * 100_000, b"", None, "is no JSON"),
        (b"\xff{}", b"", None, "is no JSON"),
        ({"a": 1}, b"", None, "the entry of 'a'"),
        ({"a": {**ENTRY, "shape": [-2]}}, b"12345678", None, "the entry of 'a'"),
        ({"a": {**ENTRY, "shape": [2.0]}}, b"12345678", None, "the entry of 'a'"),
        ({"a": {**ENTRY, "shape": [3]}}, b"12345678", None, "which are 12 bytes, and has 8"),
        ({"a": {**ENTRY, "shape": [1 << 62, 1 << 62]}}, b"12345678", None, "and has 8"),
        ({"a": {**ENTRY, "dtype": "F33"}}, b"12345678", None, "dtype 'F33'"),
        ({"a": ENTRY, "b": ENTRY}, b"12345678", None, "begins at byte 0 of the data, and not at 8"),
        ({"a": {**ENTRY, "data_offsets": [4, 12]}}, b"123456789abc", None, "begins at byte 4"),
        ({"__metadata__": {"a": 1}}, b"", None, "__metadata__"),
        ({"__metadata__": {"dtorch.tree": "1"}}, b"", None, "damaged"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused(tmp_path: Path, header: Any, data: bytes, length: int | None, says: str) -> None:
    assert says in refused(raw(tmp_path / "x.safetensors", header, data, length))


def test_an_empty_file_and_a_foreign_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"")
    assert "begins with b''" in refused(tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").write_bytes(b"\x89PNG\r\n\x1a\n" * 100)
    assert "no safetensors file: it begins with" in refused(tmp_path / "x.safetensors")


@pytest.mark.parametrize("name", ["directory", "dcp"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / "x", STATE)
    for file in os.listdir(tmp_path / "x"):
        if file in (ours.INDEX, dcp.METADATA):
            continue
        shutil.copytree(tmp_path / "x", tmp_path / "y", dirs_exist_ok=True)
        (tmp_path / "y" / file).unlink()
        assert f"{file}: the file is missing" in refused(tmp_path / "y")


def test_directories_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    assert "it is empty" in refused(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    assert "it holds 'notes.txt'" in refused(tmp_path)
    for name in "ab":
        save_file({"t": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    assert "2 .safetensors files and no" in refused(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_checkpoint(tmp_path / "nothing")


def test_a_directory_whose_index_is_lost_is_refused(tmp_path: Path) -> None:
    write_directory(tmp_path / "x", STATE, count=1)
    (tmp_path / "x" / ours.INDEX).unlink()
    assert f"{ours.INDEX} is missing" in refused(tmp_path / "x")


def test_files_of_two_saves_are_no_checkpoint(tmp_path: Path) -> None:
    write_directory(tmp_path / "x", STATE)
    write_directory(tmp_path / "y", {**STATE, "none": filled(torch.uint8, 2, 4)})
    shutil.copy(tmp_path / "y" / "model-1.safetensors", tmp_path / "x" / "model-1.safetensors")
    assert "of another checkpoint" in refused(tmp_path / "x")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", ""])
def test_an_index_names_no_file_outside(tmp_path: Path, name: str) -> None:
    index = {"metadata": {}, "weight_map": {"a": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "outside its directory" in refused(tmp_path)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


@pytest.mark.parametrize("what", [Evil(), {"a": Evil()}, b"no pickle"])
def test_metadata_runs_nothing(tmp_path: Path, what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(what if isinstance(what, bytes) else pickle.dumps(what))
    refused(tmp_path)
    assert not (tmp_path / "evil").exists()


def damaged(path: Path, data: st.DataObject) -> None:
    """Change the bytes of one of the files at `path`."""
    several = sorted(path.iterdir()) if path.is_dir() else [path]
    file = data.draw(st.sampled_from(several))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(len(content) - 1, 0)))
        match data.draw(st.sampled_from(["flip", "set", "cut", "insert", "remove", "swap"])):
            case "flip" if content:
                content[at] ^= 1 << data.draw(st.integers(0, 7))
            case "set" if content:
                content[at] = data.draw(st.integers(0, 255))
            case "cut":
                del content[at:]
            case "insert":
                content[at:at] = data.draw(st.binary(min_size=1, max_size=9))
            case "remove":
                del content[at : at + data.draw(st.integers(1, 40))]
            case "swap" if content:
                other = data.draw(st.integers(0, len(content) - 1))
                content[at], content[other] = content[other], content[at]
    file.write_bytes(content)


@pytest.mark.parametrize("name", WRITERS)
@FUZZ
@given(data=st.data())
def test_damage_is_refused_or_harmless(tmp_path: Path, name: str, data: st.DataObject) -> None:
    whole, path = tmp_path / f"whole-{name}", tmp_path / name
    if not whole.exists():
        WRITERS[name](whole, STATE)
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    (shutil.copytree if whole.is_dir() else shutil.copy)(whole, path)
    damaged(path, data)
    try:
        source = open_checkpoint(path)
        assert source is not None
        found = read(source)
    except CheckpointError as error:
        assert "\n" not in str(error)
        return
    assert equal(found, STATE)


@FUZZ
@given(data=st.data())
def test_damage_to_foreign_files_is_refused_or_read(tmp_path: Path, data: st.DataObject) -> None:
    """Where there are no checksums, what is damaged may be read as it stands; nothing else may happen."""
    kind = data.draw(st.sampled_from(["safetensors", "dcp"]))
    path = tmp_path / "x"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    flat = {"a": filled(torch.float32, 3, 4), "b": filled(torch.int8, 5)}
    if kind == "dcp":
        torch_dcp.save({**flat, "n": 5}, checkpoint_id=path, no_dist=True)
    else:
        save_file(flat, path / "x.safetensors")
    damaged(path, data)
    try:
        source = open_checkpoint(path)
        assert source is not None
        read(source)
    except CheckpointError as error:
        assert "\n" not in str(error)


# -- putting it in place ----------------------------------------------------------------------------------------------


def test_a_directory_takes_the_place_of_a_checkpoint(tmp_path: Path) -> None:
    target = tmp_path / "x"
    for step in range(3):
        staging = files.stage(target, is_directory=True)
        write_directory(Path(staging.path), {"step": step, "t": torch.full((step + 1,), step)}, count=1)
        if step:
            (target / "config.json").write_text("{}")
        files.commit(staging.path, staging.target, is_directory=True)
        staging.close()
        source = open_checkpoint(target)
        assert source is not None and read(source)["step"] == step
        assert os.listdir(tmp_path) == ["x"]
        assert (target / "config.json").exists() == (step > 0)


@pytest.mark.parametrize("crash", [False, True])
def test_where_two_names_cannot_be_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: bool) -> None:
    def cannot(a: str, b: str) -> None:
        raise OSError(22, "Invalid argument")

    write_directory(tmp_path / "x", {"step": 0, "t": torch.zeros(1)}, count=1)
    staging = files.stage(tmp_path / "x", is_directory=True)
    write_directory(Path(staging.path), {"step": 1, "t": torch.zeros(1)}, count=1)
    monkeypatch.setattr(files, "_exchange", cannot)
    if crash:
        real, calls = os.rename, 0

        def once(a: str, b: str) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise KeyboardInterrupt
            real(a, b)

        monkeypatch.setattr(os, "rename", once)
        with pytest.raises(KeyboardInterrupt):
            files.commit(staging.path, staging.target, is_directory=True)
        monkeypatch.undo()
        assert not (tmp_path / "x").exists()
    else:
        files.commit(staging.path, staging.target, is_directory=True)
    staging.close()
    source = open_checkpoint(tmp_path / "x")
    assert source is not None and read(source)["step"] == (not crash)
    # What is left is put right by the next save.
    staging = files.stage(tmp_path / "x", is_directory=True)
    write_directory(Path(staging.path), {"step": 2, "t": torch.zeros(1)}, count=1)
    files.commit(staging.path, staging.target, is_directory=True)
    assert os.listdir(tmp_path) == ["x"]


def test_leftovers_are_removed_unless_in_use(tmp_path: Path) -> None:
    used = files.stage(tmp_path / "x", is_directory=True)
    left = files.stage(tmp_path / "x", is_directory=True)
    other = files.stage(tmp_path / "x2", is_directory=True)
    left.close()
    other.close()
    (tmp_path / ".x.notes.partial").mkdir()
    files.sweep(str(tmp_path / "x"))
    assert sorted(os.listdir(tmp_path)) == sorted([".x.notes.partial", *(Path(s.path).name for s in (used, other))])
    used.discard()


def test_a_link_is_followed(tmp_path: Path) -> None:
    write_directory(tmp_path / "real", {"step": 0, "t": torch.zeros(1)}, count=1)
    (tmp_path / "link").symlink_to("real")
    staging = files.stage(tmp_path / "link", is_directory=True)
    write_directory(Path(staging.path), {"step": 1, "t": torch.zeros(1)}, count=1)
    files.commit(staging.path, staging.target, is_directory=True)
    source = open_checkpoint(tmp_path / "real")
    assert source is not None and read(source)["step"] == 1 and (tmp_path / "link").is_symlink()


def test_places_where_nothing_can_be_saved(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    write_directory(tmp_path / "deep", {"t": torch.zeros(1)}, count=1)
    (tmp_path / "deep" / "inside").mkdir()
    for name, is_directory, says in (
        ("file", True, "is a file"),
        ("full", True, "holds 'thesis.tex' and no checkpoint"),
        ("deep", True, "holds the directory 'inside'"),
        ("full", False, "is a directory"),
        ("no/where", True, "does not exist"),
        ("file/x", False, "cannot be written: Not a directory"),
        ("n" * 300, True, "cannot be written: File name too long"),
    ):
        with pytest.raises(CheckpointError, match=says) as caught:
            files.stage(tmp_path / name, is_directory=is_directory)
        assert "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["deep", "file", "full"]
