"""What torch offers beside operators works on dtorch tensors, or refuses with the line to write instead."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import func, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import dtorch
from dtorch import Replicate, Shard, init_device_mesh

BOTH = pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)


def plain(**options: Any) -> torch.Tensor:
    return torch.arange(12.0, **options).reshape(4, 3)


def spread(placement: Any = None, requires_grad: bool = False, **options: Any) -> dtorch.Tensor:
    t = dtorch.distribute_tensor(plain(**options), init_device_mesh("cpu", (2,)), [placement or Shard(0)])
    return t.requires_grad_() if requires_grad else t


def same(ours: Any, theirs: torch.Tensor) -> None:
    assert type(ours) is dtorch.Tensor
    torch.testing.assert_close(ours.detach().to_torch(), theirs.detach(), rtol=1e-5, atol=1e-6)


# -- reading ----------------------------------------------------------------------------------------------------------


def test_python_reads_values() -> None:
    t, total = spread(), spread().sum()
    assert t.tolist() == plain().tolist() and total.tolist() == 66
    assert f"{total:.2f}" == "66.00" and f"{total}" == "66.0"
    assert (int(total), float(total), complex(total), math.floor(total)) == (66, 66.0, 66 + 0j, 66)
    assert [10, 20, 30][dtorch.tensor(1)] == 20 and list(range(dtorch.tensor(3))) == [0, 1, 2]
    assert len(t) == 4 and 3.0 in t and 99.0 not in t and len({t, t, spread()}) == 2
    assert [row.tolist() for row in spread(Replicate())] == plain().tolist()
    assert torch.tensor([total, t.mean().item()]).tolist() == [66, 5.5]
    assert torch.tensor([spread(Replicate()).sum(), spread(Replicate()).mean()]).tolist() == [66, 5.5]


def test_printing_shows_values_and_placements(capsys: pytest.CaptureFixture[str]) -> None:
    print(spread())
    print(spread(requires_grad=True), (spread(requires_grad=True) * 2))
    out = capsys.readouterr().out
    assert out.count("9., 10., 11.") == 2 and out.count("placements=[Shard(0)]") == 3
    assert "requires_grad=True" in out and "MulBackward0" in out


def test_numpy_meets_dtorch() -> None:
    t, array = spread(), plain().numpy()
    assert np.array_equal(t.numpy(), array) and not t.numpy().flags.writeable
    assert np.array_equal(np.asarray(t), array) and np.array(t, dtype=np.float64).dtype == np.float64
    same(t + np.float32(2), plain() + 2)
    same(np.float32(2) * t, plain() * 2)
    same(t * array, plain() * plain())
    same(np.sin(t), plain().sin())
    same(spread(Replicate()) @ np.ones((3, 2), dtype=np.float32), plain() @ torch.ones(3, 2))
    with pytest.raises(RuntimeError, match="detach"):
        spread(requires_grad=True).numpy()


NO_MEMORY: dict[str, Callable[[torch.Tensor], Any]] = {
    "data_ptr": lambda t: t.data_ptr(),
    "untyped_storage": lambda t: t.untyped_storage(),
    "share_memory_": lambda t: t.share_memory_(),
    "apply_": lambda t: t.apply_(abs),
    "__dlpack__": lambda t: t.__dlpack__(),
    "from_dlpack": torch.from_dlpack,
    "np.from_dlpack": np.from_dlpack,
    "to_dlpack": torch.utils.dlpack.to_dlpack,  # type: ignore[attr-defined]
    "resize_": lambda t: t.resize_(2, 2),
}


@pytest.mark.parametrize("name", NO_MEMORY)
def test_what_wants_memory_is_told_where_it_lies(name: str) -> None:
    with pytest.raises(RuntimeError, match="executors"):
        NO_MEMORY[name](spread())


def test_pinning_and_asking_of_memory_are_harmless() -> None:
    t = spread()
    assert t.pin_memory() is t and not t.is_pinned() and not t.is_shared()
    assert t.is_same_size(spread()) and t.is_set_to(t.detach()) and not t.is_set_to(spread())
    assert (t.element_size(), t.nbytes, t.storage_offset(), t.layout) == (4, 48, 0, torch.strided)


def test_to_its_own_device_is_itself_and_to_a_named_one_gathers() -> None:
    t = spread()
    assert t.to(t.device).placements == [Shard(0)] and t.to(torch.ones(1).device) is not None
    assert t.to("cpu").device_mesh.size() == 1 and t.cpu().device_mesh.size() == 1
    assert t.to("meta").device.type == "meta" and t.to("meta").shape == (4, 3)
    assert t.type(torch.float64).dtype == torch.float64 and t.double().placements == [Shard(0)]


def test_new_tensors_stay_on_the_mesh() -> None:
    t = spread()
    same(t.new_tensor([1, 2]), torch.tensor([1.0, 2.0]))
    same(t.new_tensor(torch.ones(2, dtype=torch.int64)), torch.ones(2))
    same(t.new_full((2,), 3.0), torch.full((2,), 3.0))
    assert t.new_tensor([1]).device_mesh is t.device_mesh


def test_splitting_by_a_tensor_of_indices() -> None:
    for indices in (torch.tensor([1, 2]), dtorch.tensor([1, 2])):
        for a, b in zip(spread(Shard(1)).tensor_split(indices), plain().tensor_split([1, 2]), strict=True):
            same(a, b)


def test_as_strided_counts_from_the_tensor_itself() -> None:
    t = spread(Replicate())
    same(t[1:].as_strided((2, 2), (3, 1), 1), plain()[1:].as_strided((2, 2), (3, 1), 4))
    wanted = plain()
    wanted[1:].fill_diagonal_(-1)
    t[1:].fill_diagonal_(-1)
    same(t, wanted)


def test_an_operator_of_unknown_shape_runs_on_the_client() -> None:
    for a, b in zip(torch.geqrf(spread()), torch.geqrf(plain()), strict=True):
        same(a, b)
    with pytest.raises(RuntimeError, match="to_dense"):
        spread().to_sparse()


@pytest.mark.parametrize("n", [1, 2])
def test_sparse_gradients_are_refused_in_words(n: int) -> None:
    mesh = init_device_mesh("cpu", (n,))
    table = dtorch.ones(10, 3, device_mesh=mesh, requires_grad=True)
    items, bags = (dtorch.tensor(v, device_mesh=mesh) for v in ([1, 2, 4, 5], [0, 2]))
    found = torch.nn.functional.embedding_bag(items, table, bags, sparse=True)
    assert found.shape == (2, 3)
    with pytest.raises(RuntimeError, match=r"layout torch\.sparse_coo.*sparse=False"):
        found.sum().backward()
    with pytest.raises(RuntimeError, match="sparse and nested layouts cannot be distributed"):
        torch.nn.functional.embedding(items, table, sparse=True).sum().backward()


# -- plain tensors among dtorch's -------------------------------------------------------------------------------------


def test_a_plain_target_stays_plain() -> None:
    target = torch.zeros(2, 4, 3)
    target[0] = spread()
    target[1].copy_(spread()).add_(spread())
    assert type(target) is torch.Tensor and torch.equal(target, torch.stack([plain(), plain() * 2]))
    rows = [spread(Replicate())[:2], spread(Replicate())]
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    assert torch.equal(torch.as_tensor(padded.tolist()), nn.utils.rnn.pad_sequence([plain()[:2], plain()], True))


def test_constants_of_composites_are_uploaded_once() -> None:
    t = spread()
    for _ in range(3):
        same(torch.where(t > 3, t, 0.0), torch.where(plain() > 3, plain(), 0.0))
        same(torch.where(t > 3, 1.0, 0.0), torch.where(plain() > 3, 1.0, 0.0))


def test_a_plain_tensor_that_requires_grad_is_refused_with_the_line_to_write() -> None:
    with pytest.raises(RuntimeError, match="distribute_tensor"):
        spread() * plain(requires_grad=True)


# -- saving -----------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_plain() -> None:
    file = io.BytesIO()
    torch.save({"t": spread(), "p": nn.Parameter(spread()), "v": spread().t()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert {k: type(v) for k, v in loaded.items()} == {"t": torch.Tensor, "p": nn.Parameter, "v": torch.Tensor}
    assert torch.equal(loaded["v"], plain().t())
    assert torch.equal(pickle.loads(pickle.dumps(spread())), plain())
    with pytest.raises(RuntimeError, match="detach"):
        copy.deepcopy(spread(requires_grad=True) * 2)


def test_the_star_import() -> None:
    names: dict[str, Any] = {}
    exec("from dtorch import *", names)
    assert names["Shard"] is Shard and names["randn"] is dtorch.randn and names["Tensor"] is dtorch.Tensor


# -- autograd ---------------------------------------------------------------------------------------------------------


@BOTH
def test_saved_tensors_pass_through_hooks(placement: Any) -> None:
    t, p = spread(placement, True), plain().requires_grad_()
    packed: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (packed.append(type(x)), x.clone())[1], lambda x: x):
        ours = (t.sin() * t).sum()
    ours.backward()
    (p.sin() * p).sum().backward()
    assert set(packed) == {dtorch.Tensor} and p.grad is not None
    same(t.grad, p.grad)


@BOTH
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(placement: Any, reentrant: bool) -> None:
    t, p = spread(placement, True), plain().requires_grad_()
    for x in (t, p):
        checkpoint(lambda x: (x.sin() * x).sum(), x, use_reentrant=reentrant).backward()  # type: ignore[union-attr]
    same(t.grad, p.grad)  # type: ignore[arg-type]


@BOTH
def test_hooks_retained_graphs_and_higher_derivatives(placement: Any) -> None:
    results = []
    for x in (spread(placement, True), plain().requires_grad_()):
        seen: list[Any] = []
        x.register_hook(lambda g, seen=seen: (seen.append(g.shape), g * 2)[1])
        x.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append("accumulated"))
        y = x * x
        y.retain_grad()
        total = y.sum()
        total.backward(retain_graph=True)
        total.backward()
        first = x.grad
        x.grad = None
        (second,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        (third,) = torch.autograd.grad(second.sum(), x)
        assert torch.autograd.grad((x * 1).sum(), y, allow_unused=True) == (None,)
        results.append((seen, [first, y.grad, second, third]))
    (ours_seen, ours), (seen, theirs) = results
    assert ours_seen == seen
    for a, b in zip(ours, theirs, strict=True):
        same(a, b)


@BOTH
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # forward AD compiles with it
def test_function_transforms(placement: Any) -> None:
    def cube(x: torch.Tensor) -> torch.Tensor:
        return (x**3).sum()

    t, p = spread(placement), plain()
    same(func.grad(cube)(t), func.grad(cube)(p))
    same(func.vmap(cube)(t), func.vmap(cube)(p))
    same(func.vmap(func.grad(cube))(t), func.vmap(func.grad(cube))(p))
    same(func.vjp(torch.sin, t)[1](t)[0], func.vjp(torch.sin, p)[1](p)[0])
    for a, b in zip(func.jvp(cube, (t,), (t,)), func.jvp(cube, (p,), (p,)), strict=True):
        same(a, b)
    row, plain_row = spread(Replicate())[1], p[1]
    same(func.hessian(cube)(row), func.hessian(cube)(plain_row))
    same(func.jacrev(torch.sin)(row), func.jacrev(torch.sin)(plain_row))
    same(func.jacfwd(torch.sin)(row), func.jacfwd(torch.sin)(plain_row))
    same(torch.autograd.functional.hessian(cube, row), torch.autograd.functional.hessian(cube, plain_row))
    with forward_ad.dual_level():
        same(forward_ad.unpack_dual(forward_ad.make_dual(t, t).sin()).tangent, p.cos() * p)


def test_gradcheck() -> None:
    assert torch.autograd.gradcheck(torch.sin, spread(Replicate(), True, dtype=torch.float64))


def test_batched_gradients_of_a_watched_leaf() -> None:
    t, p = spread(Replicate(), True), plain().requires_grad_()
    seeds = torch.ones(2, 4, 3)
    mine = dtorch.from_torch(seeds, device_mesh=t.device_mesh)
    (ours,) = torch.autograd.grad(t * t, t, mine, is_grads_batched=True)
    (theirs,) = torch.autograd.grad(p * p, p, seeds, is_grads_batched=True)
    same(ours, theirs)


def test_torchscript_still_knows_torchs_factories() -> None:
    assert torch.jit._builtins._find_builtin(torch.zeros) == "aten::zeros"  # type: ignore[attr-defined]


# -- modules ----------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, 0.1),
    "AdamW": lambda ps: torch.optim.AdamW(ps, 0.1),
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, 0.1, max_iter=3, line_search_fn="strong_wolfe"),
}
CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "": lambda m: m,
    "weight_norm": lambda m: parametrizations.weight_norm(m),
    "old weight_norm": lambda m: nn.utils.weight_norm(m),
    "spectral_norm": lambda m: parametrizations.spectral_norm(m),
    "orthogonal": lambda m: parametrizations.orthogonal(m),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("change", "optimizer"), [(c, "SGD") for c in CHANGES] + [("", o) for o in OPTIMIZERS])
def test_training_with(change: str, optimizer: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    trained = []
    for ours in (False, True):
        dtorch.manual_seed(0)
        module: nn.Module = nn.Linear(3, 4)
        if ours:
            module = dtorch.distribute_module(module, mesh)
        dtorch.manual_seed(1)
        module = CHANGES[change](module)
        data = dtorch.distribute_tensor(x, mesh, [Shard(0)]) if ours else x
        steps = OPTIMIZERS[optimizer](module.parameters())

        def closure(module: Any = module, data: Any = data, steps: Any = steps) -> Any:
            steps.zero_grad()
            loss = (module(data) ** 2).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            return loss

        for _ in range(2):
            steps.step(closure)
        trained.append(list(module.parameters()))
    for a, b in zip(trained[1], trained[0], strict=True):
        same(a, b)
        assert isinstance(a, nn.Parameter)


def test_modules_change_their_dtype_and_keep_proxy_and_value_together() -> None:
    module = dtorch.distribute_module(nn.Linear(3, 4), init_device_mesh("cpu", (2,)))
    before = [p.detach().clone() for p in module.parameters()]
    module.double()
    for p, old in zip(module.parameters(), before, strict=True):
        assert p.dtype == p._spec.dtype == torch.float64  # type: ignore[attr-defined]
        same(p, old.double().to_torch())  # type: ignore[attr-defined]
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(vector * 2, module.parameters())
    for p, old in zip(module.parameters(), before, strict=True):
        same(p, old.double().to_torch() * 2)  # type: ignore[attr-defined]
    other = copy.deepcopy(module)
    other.load_state_dict({k: v * 0 for k, v in module.state_dict().items()})
    assert all(p.abs().sum().item() == 0 for p in other.parameters())
    assert all(p.abs().sum().item() > 0 for p in module.parameters())


def test_views_in_place_change_the_proxy_and_no_other() -> None:
    t, p = spread(Replicate()), plain()
    alias = t.detach()
    for step in (
        lambda x: x.transpose_(0, 1),
        lambda x: x.t_(),
        lambda x: x.swapaxes_(0, -1),
        lambda x: x.unsqueeze_(0),
        lambda x: x.squeeze_(0),
        lambda x: x.unsqueeze_(1).squeeze_(),
        lambda x: x.as_strided_((2, 2), (1, 2)),
        lambda x: x.add_(1),
    ):
        assert step(t) is t
        step(p)
        same(t, p)
        assert t.stride() == p.stride()
    assert alias.shape == (4, 3) and alias[0, 0].item() == 1


def test_results_lie_in_memory_as_torchs_do_across_a_sharded_dim() -> None:
    with dtorch.auto_redistribute():
        for f in (lambda x: x.t().log_softmax(1), lambda x: x.t().softmax(1), lambda x: x.t().var(1)):
            ours, theirs = f(spread()), f(plain())
            same(ours, theirs)
            assert ours.stride() == theirs.stride()


@BOTH
def test_composites_in_inference_mode_do_what_they_do_outside(placement: Any) -> None:
    t = spread(placement)
    with torch.inference_mode():
        for f in (lambda x: nn.functional.dropout(x, 0.5), lambda x: nn.functional.linear(x, torch.ones(2, 3)),
                  lambda x: nn.functional.layer_norm(x, (3,)), lambda x: x.matmul(torch.ones(3)),
                  lambda x: torch.native_dropout(x[:0], 0.5, True)[1]):  # fmt: skip
            values = []
            for x in (t, plain()):
                dtorch.manual_seed(5)
                try:
                    values.append(f(x))
                except dtorch.PlacementError:
                    assert placement == Shard(0)
                    break
            else:
                same(*values)


def test_dropout_in_inference_mode_draws_for_shards_too() -> None:
    with torch.inference_mode():
        dtorch.manual_seed(5)
        ours = nn.functional.dropout(spread(), 0.5)
        dtorch.manual_seed(5)
        same(ours, nn.functional.dropout(plain(), 0.5))
