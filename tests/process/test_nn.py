"""dtorch.nn: torch's modules, whose parameters are made on a mesh and start with torch's bits."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh, nn

MAKERS: dict[str, Callable[[Any], torch.nn.Module]] = {
    "Linear": lambda nn: nn.Linear(5, 3),
    "Linear without bias": lambda nn: nn.Linear(5, 3, bias=False, dtype=torch.float64),
    "Bilinear": lambda nn: nn.Bilinear(3, 4, 5),
    "Embedding": lambda nn: nn.Embedding(7, 4, padding_idx=2),
    "EmbeddingBag": lambda nn: nn.EmbeddingBag(7, 4),
    "Conv1d": lambda nn: nn.Conv1d(2, 4, 3),
    "Conv2d": lambda nn: nn.Conv2d(2, 4, 3, padding_mode="reflect", padding=1),
    "ConvTranspose2d": lambda nn: nn.ConvTranspose2d(2, 4, 3),
    "LayerNorm": lambda nn: nn.LayerNorm(6),
    "RMSNorm": lambda nn: nn.RMSNorm(6),
    "GroupNorm": lambda nn: nn.GroupNorm(2, 6),
    "BatchNorm2d": lambda nn: nn.BatchNorm2d(6),
    "PReLU": lambda nn: nn.PReLU(3),
    "GRU": lambda nn: nn.GRU(3, 4, num_layers=2),
    "LSTMCell": lambda nn: nn.LSTMCell(3, 4),
    "MultiheadAttention": lambda nn: nn.MultiheadAttention(8, 2),
    "TransformerEncoderLayer": lambda nn: nn.TransformerEncoderLayer(8, 2, 16),
    "Sequential": lambda nn: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4, 2)),
}


def same_bits(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    mine, wanted = ours.state_dict(), theirs.state_dict()
    assert list(mine) == list(wanted)
    for name, value in mine.items():
        assert type(value) is dtorch.Tensor, name
        assert torch.equal(value.to_torch(), wanted[name]), name


@pytest.mark.parametrize("name", MAKERS)
def test_modules_start_with_torchs_bits(name: str) -> None:
    torch.manual_seed(5)
    theirs = MAKERS[name](torch.nn)
    dtorch.manual_seed(5)
    ours = MAKERS[name](nn)
    same_bits(ours, theirs)
    assert isinstance(ours, type(theirs))
    assert type(ours).__name__ == type(theirs).__name__
    assert all(isinstance(p, torch.nn.Parameter) and p.requires_grad for p in ours.parameters())


@pytest.mark.parametrize("name", ["Linear", "Embedding", "LayerNorm", "TransformerEncoderLayer"])
def test_sharded_modules_start_with_torchs_bits(name: str) -> None:
    torch.manual_seed(6)
    theirs = MAKERS[name](torch.nn)
    dtorch.manual_seed(6)
    with dtorch.device_mesh(init_device_mesh("cpu", 2)), dtorch.graph.placements_guard([Shard(0)]):
        ours = MAKERS[name](nn)
    same_bits(ours, theirs)
    assert all(p.placements == [Shard(0)] for p in ours.parameters())


def test_torchs_own_modules_are_made_on_the_mesh_in_force() -> None:
    mesh = init_device_mesh("cpu", 2)
    torch.manual_seed(7)
    theirs = MAKERS["TransformerEncoderLayer"](torch.nn)
    dtorch.manual_seed(7)
    with dtorch.device_mesh(mesh):
        ours = MAKERS["TransformerEncoderLayer"](torch.nn)
    same_bits(ours, theirs)
    assert all(p.device_mesh is mesh for p in ours.parameters())


def test_every_module_of_torch_has_its_name_here() -> None:
    for name in torch.nn.modules.__all__:
        ours, theirs = getattr(nn, name), getattr(torch.nn, name)
        assert issubclass(ours, theirs)
        assert name in nn.__all__
    assert nn.Module is torch.nn.Module
    assert nn.Parameter is torch.nn.Parameter
    assert nn.ReLU is torch.nn.ReLU
    assert nn.Linear is nn.Linear
    assert nn.modules is torch.nn.modules
    assert not hasattr(nn, "Nonsense")


def test_placements_are_those_of_the_parameters() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=["dp", "tp"])
    m = nn.Linear(6, 4, device_mesh=mesh, placements=[Replicate(), Shard(1)])
    assert m.weight.device_mesh is mesh
    assert m.weight.placements == [Replicate(), Shard(1)]
    assert m.bias.placements == [Replicate(), Replicate()]
    assert [tuple(m.weight.to_local(r).shape) for r in range(2)] == [(4, 3), (4, 3)]
    on_slice = nn.Linear(6, 4, device_mesh=mesh["tp"], placements=[Shard(0)])
    assert on_slice.weight.device_mesh is mesh
    assert on_slice.bias.placements == [Replicate(), Shard(0)]
    norm = nn.BatchNorm1d(4, device_mesh=mesh, placements=[Replicate(), Shard(0)])
    assert norm.running_mean.placements == [Replicate(), Shard(0)]
    assert norm.num_batches_tracked.placements == [Replicate(), Replicate()]


def test_arguments_are_checked() -> None:
    mesh = init_device_mesh("cpu", 2)
    with pytest.raises(ValueError, match="exclude each other"):
        nn.Linear(2, 2, device="cpu", device_mesh=mesh)
    with pytest.raises(ValueError, match=r"no parameter has the dim of Shard\(2\); it has weight \[4, 6\], bias \[4\]"):
        nn.Linear(6, 4, device_mesh=mesh, placements=[Shard(2)])
    with pytest.raises(ValueError, match="one placement per mesh dim"):
        nn.Linear(6, 4, device_mesh=mesh, placements=[Shard(0), Shard(1)])
    assert nn.Linear(2, 2, device="cpu").weight.device_mesh == dtorch.DeviceMesh("cpu")
    assert nn.Linear(2, 2, device="meta").weight.is_meta


def test_copies_and_pickles() -> None:
    mesh = init_device_mesh("cpu", 2)
    m = nn.Linear(6, 4, device_mesh=mesh, placements=[Shard(0)])
    twin = copy.deepcopy(m)
    assert type(twin) is nn.Linear
    assert twin.weight.placements == [Shard(0)]
    with torch.no_grad():
        twin.weight.zero_()
    assert m.weight.to_torch().abs().sum() > 0
    again = pickle.loads(pickle.dumps(m))
    assert type(again) is nn.Linear
    assert torch.equal(again.weight, m.weight.to_torch())
    file = io.BytesIO()
    torch.save(m.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert torch.equal(saved["weight"], m.weight.to_torch())
    m.load_state_dict({name: torch.ones_like(value) for name, value in saved.items()})
    assert m.weight.placements == [Shard(0)]
    assert (m.weight.to_torch() == 1).all()


def test_users_modules() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(dtorch.full((3,), 2.0))
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale

    m = Scale()
    assert [name for name, _ in m.named_parameters()] == ["scale", "linear.weight", "linear.bias"]
    m(dtorch.ones(2, 3)).sum().backward()
    expected = m.linear(dtorch.ones(2, 3)).sum(0)
    assert torch.allclose(m.scale.grad.to_torch(), expected.to_torch())


def image(lib: Any) -> Any:
    return lib.randn(3, 2, 8, 8)


def sequence(lib: Any) -> Any:
    return lib.randn(2, 5, 8)


FORWARD: dict[str, tuple[Callable[[Any], torch.nn.Module], Callable[[Any], Any]]] = {
    "convolution": (
        lambda nn: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
        ),
        image,
    ),
    "transposed convolution": (lambda nn: nn.ConvTranspose2d(2, 4, 3), image),
    "embedding": (
        lambda nn: nn.Sequential(nn.Embedding(7, 4, padding_idx=1), nn.Linear(4, 3)),
        lambda lib: lib.tensor([[1, 2], [3, 1]]),
    ),
    "norms": (
        lambda nn: nn.Sequential(nn.GroupNorm(2, 6), nn.PReLU(6), nn.InstanceNorm1d(6, affine=True)),
        lambda lib: lib.randn(2, 6, 5),
    ),
    "gru": (lambda nn: nn.GRU(8, 4, bidirectional=True), sequence),
    "dropout": (lambda nn: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 2)), sequence),
    "transformer": (lambda nn: nn.TransformerEncoderLayer(8, 2, 16, 0.1), sequence),
    "weight norm": (lambda nn: nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)), sequence),
}


@pytest.fixture
def one_executor() -> None:
    """A lone executor has as many threads as torch has here; several share them, and sum in another order."""
    dtorch.shutdown()


@pytest.mark.usefixtures("one_executor")
@pytest.mark.parametrize("name", FORWARD)
def test_forward_and_backward_give_torchs_bits(name: str) -> None:
    make, draw = FORWARD[name]
    results = []
    for lib in (torch, dtorch):
        lib.manual_seed(8)
        module = make(lib.nn)
        out = module(draw(lib))
        out = out[0] if isinstance(out, tuple) else out
        out.pow(2).sum().backward()
        values = [out.detach(), *(p.grad for p in module.parameters())]
        results.append([v.to_torch() if isinstance(v, dtorch.Tensor) else v for v in values])
    for ours, theirs in zip(*results[::-1], strict=True):
        assert torch.equal(ours, theirs)


# model.to(mesh).


def test_a_plain_model_moves_to_a_mesh() -> None:
    torch.manual_seed(0)
    m = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    m[2].weight = m[0].weight
    m[0].weight.note = "kept"
    before = {name: value.clone() for name, value in m.state_dict().items()}
    mesh = init_device_mesh("cpu", 2)
    assert m.to(mesh) is m
    for name, value in m.state_dict().items():
        assert value.device_mesh is mesh
        assert value.placements == [Replicate()]
        assert torch.equal(value.to_torch(), before[name])
    assert m[2].weight is m[0].weight
    assert m[0].weight.note == "kept"
    weight = m[0].weight
    assert m.to(mesh)[0].weight is weight
    m.to(mesh, torch.float64)
    assert m[0].weight.dtype == torch.float64
    assert m[0].weight.to_torch().dtype == torch.float64
    assert m[0].weight.device_mesh is mesh


def test_to_is_torchs_for_all_else() -> None:
    m = torch.nn.Linear(2, 2)
    assert m.to(torch.float64).weight.dtype == torch.float64
    assert m.to("cpu").weight.device.type == "cpu"
    assert m.to(device="meta").weight.is_meta
    with pytest.raises(ValueError, match="no values to distribute"):
        m.to(init_device_mesh("cpu", 2))


def test_sharded_parameters_stay_when_the_model_is_already_there() -> None:
    mesh = init_device_mesh("cpu", 2)
    m = nn.Linear(4, 4, device_mesh=mesh, placements=[Shard(0)])
    assert m.to(mesh).weight.placements == [Shard(0)]


# Lazy modules.


def test_lazy_modules_take_shape_on_the_mesh() -> None:
    mesh = init_device_mesh("cpu", 2)
    torch.manual_seed(3)
    theirs = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyBatchNorm1d())
    dtorch.manual_seed(3)
    ours = torch.nn.Sequential(
        nn.LazyLinear(4, device_mesh=mesh, placements=[Shard(0)]),
        nn.LazyBatchNorm1d(device_mesh=mesh, placements=[Shard(0)]),
    )
    x = torch.arange(12.0).reshape(2, 6)
    theirs(x)
    ours(dtorch.distribute_tensor(x, mesh, [Replicate()]))
    assert type(ours[0]) is torch.nn.Linear
    assert ours[0].weight.placements == [Shard(0)]
    assert ours[1].running_mean.placements == [Shard(0)]
    assert torch.allclose(ours[1].running_mean.to_torch(), theirs[1].running_mean)
    assert torch.equal(ours[0].weight.to_torch(), theirs[0].weight)


# The rest of the namespace.


def test_functional_init_and_utils_are_torchs() -> None:
    assert nn.functional.relu is torch.nn.functional.relu
    assert nn.init.xavier_uniform_ is torch.nn.init.xavier_uniform_
    assert nn.utils.clip_grad_norm_ is torch.nn.utils.clip_grad_norm_
    assert nn.utils.rnn.pad_sequence is torch.nn.utils.rnn.pad_sequence
    assert nn.utils.parametrizations.weight_norm is torch.nn.utils.parametrizations.weight_norm
    assert set(dir(torch.nn.functional)) <= set(dir(nn.functional))


def test_wrappers_that_placements_replace_say_so() -> None:
    with pytest.raises(NotImplementedError, match=r"model\.to\(mesh\)"):
        nn.DataParallel(nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match="data-parallel by its placements"):
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2))


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "heads", "queries"])
def test_attention_where_a_rank_has_nothing(dim: int) -> None:
    """Torch's fused kernel ends the process when there are no heads, or no queries."""
    mesh = init_device_mesh("cpu", 3)
    torch.manual_seed(0)
    plain = [torch.randn(2, 2, 2, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    placements = [Shard(dim), *[Shard(dim) if dim < 2 else Replicate()] * 2]
    ours = [dtorch.distribute_tensor(t.detach(), mesh, [p]) for t, p in zip(plain, placements, strict=True)]
    expected = torch.nn.functional.scaled_dot_product_attention(*plain)
    out = nn.functional.scaled_dot_product_attention(*[t.requires_grad_() for t in ours])
    assert torch.allclose(out.detach().to_torch(), expected)
    expected.square().sum().backward()
    out.square().sum().backward()
    for t, p in zip(ours, plain, strict=True):
        assert torch.allclose(t.grad.to_torch(), p.grad)


def test_attention_of_nothing() -> None:
    for shape in [(2, 0, 3, 5), (2, 4, 0, 5), (0, 4, 3, 5)]:
        t = dtorch.zeros(*shape)
        assert nn.functional.scaled_dot_product_attention(t, t, t).to_torch().shape == shape


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"bidirectional": True, "num_layers": 2}], ids=repr)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "batch"])
def test_an_lstm_trains(options: dict[str, Any], ranks: int, shard: bool) -> None:
    """A model of torch's that moves to a mesh; on three ranks one has nothing of a batch of two."""
    mesh = init_device_mesh("cpu", ranks)
    torch.manual_seed(0)
    theirs = torch.nn.LSTM(8, 4, **options)
    ours = copy.deepcopy(theirs).to(mesh)  # type: ignore[arg-type]
    x = torch.randn(7, 2, 8)
    for step in range(2):
        expected, (h, c) = theirs(x)
        out, (our_h, our_c) = ours(dtorch.distribute_tensor(x, mesh, [Shard(1) if shard else Replicate()]))
        for a, b in [(out, expected), (our_h, h), (our_c, c)]:
            assert torch.allclose(a.detach().to_torch(), b, atol=1e-6)
        expected.square().sum().backward()
        out.square().sum().backward()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(p.grad.to_torch(), q.grad, atol=1e-6), step
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.1)
                q.sub_(q.grad, alpha=0.1)


def test_batch_norm_by_batches() -> None:
    mesh = init_device_mesh("cpu", 2)
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    for placement in (Shard(0), Shard(1), Replicate(), Partial()):
        theirs = torch.nn.BatchNorm1d(4)
        ours = copy.deepcopy(theirs).to(mesh)  # type: ignore[arg-type]
        theirs(x)
        with dtorch.auto_redistribute():
            ours(dtorch.distribute_tensor(x, mesh, [placement]))
        assert torch.allclose(ours.running_mean.to_torch(), theirs.running_mean), placement  # type: ignore[union-attr]
        assert torch.allclose(ours.running_var.to_torch(), theirs.running_var), placement  # type: ignore[union-attr]
    out = ours.eval()(dtorch.distribute_tensor(x, mesh, [Shard(0)]))
    assert out.placements == [Shard(0)]
    assert torch.allclose(out.detach().to_torch(), theirs.eval()(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 3])
def test_embedding_bags_are_torchs(mode: str, padding: int | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = torch.nn.EmbeddingBag(10, 8, mode=mode, padding_idx=padding, dtype=dtype)
    ours = copy.deepcopy(plain).to(dtorch.init_device_mesh("cpu", 2))
    tokens = torch.randint(0, 10, (5, 7))
    want, got = plain(tokens), ours(tokens)
    assert torch.equal(got.to_torch(), want)
    want.square().sum().backward()
    got.square().sum().backward()
    assert torch.allclose(ours.weight.grad.to_torch(), plain.weight.grad)
