"""``torch.nn.utils.rnn``: padded and packed sequences on meshes, as torch's, forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn.utils import rnn

import dtorch
from dtorch import Partial, PlacementError, Replicate, Shard, init_device_mesh

from .traps import same

LENGTHS = {True: [5, 4, 2, 1], False: [2, 5, 1, 4]}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("RNN", {}),
    ("GRU", {"bidirectional": True}),
    ("LSTM", {"num_layers": 2, "bidirectional": True}),
    ("LSTM", {"proj_size": 2, "bias": False}),
]
MESHES: list[tuple[tuple[int, ...], list[Any]]] = [
    ((1,), [Replicate()]),
    ((2,), [Replicate()]),
    ((2,), [Shard(0)]),
    ((3,), [Shard(1)]),
    ((2, 2), [Shard(0), Shard(2)]),
]


def through(layer: Any, x: torch.Tensor, lengths: Any, batch_first: bool, is_sorted: bool) -> list[torch.Tensor]:
    """What a model does with a batch of sequences of different lengths."""
    packed = rnn.pack_padded_sequence(x, lengths, batch_first=batch_first, enforce_sorted=is_sorted)
    out, state = layer(packed)
    padded, again = rnn.pad_packed_sequence(out, batch_first, padding_value=-7.0, total_length=6)
    assert type(packed.batch_sizes) is torch.Tensor and type(again) is torch.Tensor
    assert again.tolist() == (lengths if isinstance(lengths, list) else lengths.tolist())
    return [padded, *(state if isinstance(state, tuple) else [state])]


@pytest.mark.parametrize(("shape", "placements"), MESHES, ids=str)
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
@pytest.mark.parametrize("is_sorted", [True, False])
def test_recurrent_layers_of_packed_sequences(
    kind: str, options: dict[str, Any], shape: tuple[int, ...], placements: list[Any], is_sorted: bool
) -> None:
    torch.manual_seed(0)
    plain = getattr(torch.nn, kind)(3, 4, **options).double()
    batch_first = kind != "GRU"
    x = torch.randn(*((4, 5) if batch_first else (5, 4)), 3, dtype=torch.float64, requires_grad=True)
    wanted = through(plain, x, LENGTHS[is_sorted], batch_first, is_sorted)
    sum((t**2).sum() for t in wanted).backward()  # type: ignore[union-attr]

    mesh = init_device_mesh("cpu", shape)
    ours = getattr(dtorch.nn, kind)(3, 4, dtype=torch.float64, **options)
    ours = dtorch.distributed.tensor.distribute_module(ours, mesh)
    ours.load_state_dict(plain.state_dict())
    leaf = dtorch.distribute_tensor(x.detach(), mesh, placements).requires_grad_()
    with dtorch.auto_redistribute():
        got = through(ours, leaf, LENGTHS[is_sorted], batch_first, is_sorted)
        sum((t**2).sum() for t in got).backward()  # type: ignore[union-attr]
    for t, w in zip(got, wanted, strict=True):
        same(t.detach(), w.detach())
    assert leaf.grad is not None and x.grad is not None
    same(leaf.grad, x.grad, 1e-10)
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None, name
        same(p.grad, q.grad, 1e-10)


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("form", [list, torch.tensor, dtorch.tensor])
def test_lengths_and_batch_sizes_stay_in_this_process(form: Callable[[list[int]], Any], guarded: bool) -> None:
    mesh = init_device_mesh("cpu", 2)
    x = torch.randn(4, 5, 3)
    layer = torch.nn.LSTM(3, 4, batch_first=True)
    wanted = through(layer, x, LENGTHS[False], True, False)
    state = {k: dtorch.distribute_tensor(v.detach(), mesh, [Replicate()]) for k, v in layer.named_parameters()}
    with dtorch.device_mesh(mesh) if guarded else contextlib.nullcontext():
        ours = dtorch.distribute_tensor(x, mesh, [Replicate()])
        lengths = form(LENGTHS[False])
        got = through(lambda p: torch.func.functional_call(layer, state, (p,)), ours, lengths, True, False)
        packed = rnn.pack_padded_sequence(ours, lengths, True, False)
        again = rnn.PackedSequence(packed.data, dtorch.tensor(packed.batch_sizes))
    for t, w in zip(got, wanted, strict=True):
        same(t.detach(), w.detach(), 1e-5)
    reference = rnn.pack_padded_sequence(x, LENGTHS[False], True, False)
    for name in ("batch_sizes", "sorted_indices", "unsorted_indices"):
        mine, theirs = getattr(packed, name), getattr(reference, name)
        assert type(mine) is torch.Tensor and torch.equal(mine, theirs), name
    same(packed.data, reference.data)
    assert type(again.batch_sizes) is torch.Tensor


@pytest.mark.parametrize("batch_first", [False, True])
def test_strict_placements_are_right_or_refused(batch_first: bool) -> None:
    mesh = init_device_mesh("cpu", 2)
    x = torch.randn(4, 4, 6)
    wanted = rnn.pack_padded_sequence(x, [4, 3, 3, 1], batch_first).data
    for at in (0, 1, 2):
        ours = dtorch.distribute_tensor(x, mesh, [Shard(at)])
        try:
            packed = rnn.pack_padded_sequence(ours, [4, 3, 3, 1], batch_first)
        except PlacementError:
            assert at < 2
            continue
        same(packed.data, wanted)
        padded, _ = rnn.pad_packed_sequence(packed, batch_first)
        same(padded, rnn.pad_packed_sequence(rnn.pack_padded_sequence(x, [4, 3, 3, 1], batch_first), batch_first)[0])


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("weights", [Replicate(), Shard(0), Partial()], ids=str)
def test_strict_layers_are_right_or_refused(kind: str, weights: Any) -> None:
    torch.manual_seed(0)
    mesh, x = init_device_mesh("cpu", 2), torch.randn(5, 4, 3, dtype=torch.float64)
    layer = getattr(torch.nn, kind)(3, 4, bidirectional=True).double()
    wanted = through(layer, x, LENGTHS[False], False, False)

    def put(t: torch.Tensor, placement: Any) -> dtorch.Tensor:
        return dtorch.distribute_tensor(t.detach(), mesh, [Replicate()]).redistribute(placements=[placement])

    state = {name: put(p, weights) for name, p in layer.named_parameters()}
    legal = 0
    for placement in (Replicate(), Shard(0), Shard(1), Shard(2), Partial()):
        try:
            got = through(
                lambda p: torch.func.functional_call(layer, state, (p,)),
                put(x, placement),
                LENGTHS[False],
                False,
                False,
            )
        except PlacementError:
            continue
        legal += 1
        for t, w in zip(got, wanted, strict=True):
            same(t.detach(), w.detach())
    assert legal == (1 if weights == Replicate() else 0)


SEQUENCES: list[tuple[Sequence[int], torch.dtype, float]] = [
    ((3, 5, 2), torch.float64, -1.5),
    ((2, 2), torch.float32, 0.0),
    ((1, 4), torch.int64, 3.7),
    ((2, 1), torch.bool, 1.0),
]


@pytest.mark.parametrize(("lengths", "dtype", "value"), SEQUENCES, ids=str)
@pytest.mark.parametrize("placement", [Replicate(), Shard(1)], ids=str)
def test_padding_stays_on_the_mesh(lengths: Sequence[int], dtype: torch.dtype, value: float, placement: Any) -> None:
    mesh = init_device_mesh("cpu", 2)
    plain = [torch.randn(n, 5).to(dtype) for n in lengths]
    grads = dtype.is_floating_point
    for batch_first in (False, True):
        for side in ("right", "left"):
            leaves = [t.clone().requires_grad_(grads) for t in plain]
            ours = [dtorch.distribute_tensor(t, mesh, [placement]).requires_grad_(grads) for t in plain]
            wanted = rnn.pad_sequence(leaves, batch_first, value, side)
            got = dtorch.nn.utils.rnn.pad_sequence(ours, batch_first, value, side)
            assert isinstance(got, dtorch.Tensor) and got.device_mesh == mesh and got.dtype == wanted.dtype
            same(got.detach(), wanted.detach())
            if grads:
                (wanted * wanted.detach()).sum().backward()
                (got * got.detach()).sum().backward()
                for a, b in zip(ours, leaves, strict=True):
                    assert a.grad is not None and b.grad is not None
                    same(a.grad, b.grad)


def test_sequences_of_both_kinds_and_wrong_ones() -> None:
    mesh = init_device_mesh("cpu", 2)
    a, b = torch.randn(2, 3), torch.randn(4, 3)
    mixed = rnn.pad_sequence([a, dtorch.distribute_tensor(b, mesh, [Replicate()])])
    same(mixed, rnn.pad_sequence([a, b]))
    wide = rnn.pad_sequence([dtorch.from_torch(a), dtorch.from_torch(b[:, :1])])
    same(wide, rnn.pad_sequence([a, b[:, :1]]))
    for wrong in ([a, torch.randn(2, 4)], [torch.tensor(1.0), a]):
        with pytest.raises(RuntimeError) as plain:
            rnn.pad_sequence(wrong)
        with pytest.raises(RuntimeError) as ours:
            rnn.pad_sequence([dtorch.distribute_tensor(t, mesh, [Replicate()]) for t in wrong])
        assert str(ours.value) == str(plain.value)
    x = dtorch.distribute_tensor(torch.randn(3, 5, 4), mesh, [Replicate()])
    for lengths in ([5, 4], [4, 5, 2], [5, 4, 0], [5, 4, -1]):
        with pytest.raises(RuntimeError) as plain:
            rnn.pack_padded_sequence(torch.randn(3, 5, 4), lengths, True)
        with pytest.raises(RuntimeError) as ours:
            rnn.pack_padded_sequence(x, lengths, True)
        assert str(ours.value) == str(plain.value)


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("guarded", [False, True])
def test_sequences_packed_and_cut_again(is_sorted: bool, guarded: bool) -> None:
    mesh = init_device_mesh("cpu", 2)
    plain = [torch.randn(n, 3, requires_grad=True) for n in LENGTHS[is_sorted]]
    ours = [dtorch.distribute_tensor(t.detach(), mesh, [Replicate()]).requires_grad_() for t in plain]
    with dtorch.device_mesh(mesh) if guarded else contextlib.nullcontext():
        packed = rnn.pack_sequence(ours, is_sorted)
        back = rnn.unpack_sequence(packed)
        sum((t * t.detach()).sum() for t in back).backward()  # type: ignore[union-attr]
    same(packed.data.detach(), rnn.pack_sequence(plain, is_sorted).data.detach())
    unpacked: list[Any] = back
    for t, w in zip(unpacked, plain, strict=True):
        assert isinstance(t, dtorch.Tensor) and t.device_mesh == mesh
        same(t.detach(), w.detach())
    for t, w in zip(ours, plain, strict=True):
        assert t.grad is not None
        same(t.grad, w.detach())


@pytest.mark.parametrize("batch_first", [False, True])
def test_unpadding_copies_and_turns_the_batch_as_torch_does(batch_first: bool) -> None:
    x = torch.randn(4, 4, 3)
    plain, ours = x.clone(), dtorch.from_torch(x)
    lengths = torch.tensor([4, 0, 9, 2])
    wanted, got = rnn.unpad_sequence(plain, lengths, batch_first), rnn.unpad_sequence(ours, lengths, batch_first)
    got[0].zero_()
    wanted[0].zero_()
    for t, w in zip([ours, *got], [plain, *wanted], strict=True):
        same(t, w)
    for t in (x, dtorch.from_torch(x)):
        with pytest.raises(ValueError, match="shorter"):
            rnn.unpad_sequence(t, lengths[:2], True)


def test_what_is_packed_moves_with_its_data() -> None:
    x, mesh = torch.randn(3, 5, 4), init_device_mesh("cpu", 2)
    plain = rnn.pack_padded_sequence(x, [2, 5, 4], True, False)
    ours = rnn.pack_padded_sequence(dtorch.from_torch(x), [2, 5, 4], True, False)
    moves: list[tuple[Any, Any]] = [
        (lambda p: p.to(mesh), lambda p: p),
        (lambda p: p.to(mesh).to(torch.float64), lambda p: p.double()),
        (lambda p: p.to(mesh).cpu(), lambda p: p.cpu()),
        (lambda p: p.half(), lambda p: p.half()),
    ]
    for move, wanted in moves:
        got, want = move(ours), wanted(plain)
        assert isinstance(got, rnn.PackedSequence) and isinstance(got.data, dtorch.Tensor)
        same(got.data, want.data)
        for a, b in zip(got[1:], want[1:], strict=True):
            assert type(a) is torch.Tensor and torch.equal(a, b)
    moved: Any = ours.to(mesh).data
    assert moved.device_mesh == mesh
    assert ours.to(torch.float32) is ours


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_still_compiles_them() -> None:
    for name in ("pack_padded_sequence", "pad_packed_sequence", "pad_sequence", "unpad_sequence", "pack_sequence"):
        torch.jit.script(getattr(rnn, name))
    torch.jit.script(torch.nn.LSTM(3, 4))
