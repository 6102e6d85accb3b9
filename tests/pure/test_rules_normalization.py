"""Rules of softmax and of layer, RMS, group and batch norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtorch.errors import PlacementError

from .harness import P, R, S, Sample, SimTensor, check, check_all, mesh_of, sweep

aten = torch.ops.aten
g = torch.Generator().manual_seed(0)


def rn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def _norms() -> list[Sample]:
    x, w, b = rn(5, 4, 6), rn(6), rn(6)
    _, mean, rstd = aten.native_layer_norm.default(x, [6], w, b, 1e-5)
    layer = aten.native_layer_norm_backward.default
    y, gw, gb = rn(3, 4, 2, 2), rn(4), rn(4)
    _, gm, gr = aten.native_group_norm.default(y, gw, gb, 3, 4, 4, 2, 1e-5)
    group = aten.native_group_norm_backward.default
    return [
        Sample(aten.native_layer_norm.default, (x, [6], w, b, 1e-5)),
        Sample(aten.native_layer_norm.default, (x, [4, 6], None, None, 1e-5)),
        Sample(layer, (rn(5, 4, 6), x, [6], mean, rstd, w, b, [True, True, True])),
        Sample(layer, (rn(5, 4, 6), x, [6], mean, rstd, w, None, [True, True, False])),
        Sample(layer, (rn(5, 4, 6), x, [6], mean, rstd, None, None, [True, False, False])),
        Sample(aten.native_group_norm.default, (y, gw, gb, 3, 4, 4, 2, 1e-5)),
        Sample(group, (rn(3, 4, 2, 2), y, gm, gr, gw, 3, 4, 4, 2, [True, True, True])),
    ]


def _softmaxes() -> list[Sample]:
    x, soft, logs = rn(5, 4), rn(5, 4).softmax(1), rn(5, 4).log_softmax(0)
    return [
        Sample(aten._softmax.default, (x, 1, False)),
        Sample(aten._log_softmax.default, (rn(3, 4, 2), -2, False)),
        Sample(aten._safe_softmax.default, (x, -1)),
        Sample(aten._softmax_backward_data.default, (rn(5, 4), soft, 1, torch.float64)),
        Sample(aten._log_softmax_backward_data.default, (rn(5, 4), logs, 0, torch.float64)),
    ]


SAMPLES = _norms() + _softmaxes()


def test_meshes() -> None:
    report = sweep(SAMPLES, cap=6)
    assert not report.wrong, str(report)
    assert len(report.checked) == 9, str(report)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_every_placement(sample: Sample) -> None:
    legal, wrong = check_all(sample, 2, kinds=("sum",), cap=150)
    assert legal and not wrong, wrong[:3]


@pytest.mark.parametrize("sample", _softmaxes(), ids=str)
def test_softmax_over_a_sharded_dim_is_refused(sample: Sample) -> None:
    dim = next(a for a in sample.args if type(a) is int)
    with pytest.raises(PlacementError, match="The softmax dim must be whole on every rank"):
        check(sample, (2,), [(S(dim % sample.args[0].ndim),)] * len(sample.tensors()))


@pytest.mark.parametrize("sample", [s for s in _softmaxes() if "safe" not in str(s)], ids=str)
def test_softmax_over_a_sharded_dim_runs_where_communication_is_allowed(sample: Sample) -> None:
    dim = next(a for a in sample.args if type(a) is int)
    for n in (2, 3):
        SimTensor.counts.clear()
        check(sample, (n,), [(S(dim % sample.args[0].ndim),)] * len(sample.tensors()), auto=True)
        # The maximum and the sum; the backward needs the sum alone.
        assert SimTensor.counts["redistribute"] == (1 if "backward" in str(sample) else 2)


def test_layer_norm_over_a_sharded_dim_is_refused() -> None:
    with pytest.raises(PlacementError, match="The normalized dims must be whole"):
        check(SAMPLES[0], (2,), [(S(2),), (S(0),), (S(0),)])


def test_gradient_of_a_replicated_weight_is_partial() -> None:
    plan = check(SAMPLES[2], (3,), [(S(0),), (S(0),), (S(0),), (S(0),), (R,), (R,)])
    assert [s.placements for s in plan.outs] == [(S(0),), (P(),), (P(),)]  # type: ignore[union-attr]


# ---- batch norm ------------------------------------------------------------------------------------------


def _batch_norms(training: bool) -> list[Sample]:
    x, w, b, mean, var = rn(5, 4, 3), rn(4), rn(4), rn(4), rn(4).abs() + 1
    _, sm, si = aten.native_batch_norm.default(x, w, b, mean.clone(), var.clone(), training, 0.1, 1e-5)
    back = aten.native_batch_norm_backward.default
    return [
        Sample(aten.native_batch_norm.default, (x, w, b, mean, var, training, 0.1, 1e-5)),
        Sample(back, (rn(5, 4, 3), x, w, mean, var, sm, si, training, 1e-5, [True, True, True])),
        Sample(back, (rn(5, 4, 3), x, w, mean, var, sm, si, training, 1e-5, [True, False, False])),
    ]


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_meshes(training: bool) -> None:
    report = sweep(_batch_norms(training), cap=8)
    assert not report.wrong, str(report)
    assert len(report.checked) == 2, str(report)


def test_batch_norm_of_a_sharded_batch_takes_statistics_of_the_whole() -> None:
    sample = _batch_norms(True)[0]
    x, w, b, mean, var = sample.args[:5]
    want = [x, w, b, mean.clone(), var.clone()]
    truth = aten.native_batch_norm.default(*want, True, 0.1, 1e-5)
    for shape, placed in (((2,), (S(0),)), ((3,), (S(0),)), ((2, 2), (S(0), R)), ((2, 2), (S(0), S(2)))):
        whole = (R,) * len(shape)
        mesh = mesh_of(shape)
        args: list[Any] = [SimTensor.distribute(x, mesh, placed)]
        args += [SimTensor.distribute(t.clone(), mesh, whole) for t in (w, b, mean, var)]
        SimTensor.counts.clear()
        got = aten.native_batch_norm.default(*args, True, 0.1, 1e-5)
        assert SimTensor.counts["redistribute"] == 2
        for a, t in zip([*got, args[3], args[4]], [*truth, want[3], want[4]], strict=True):
            torch.testing.assert_close(a.full(), t)


def test_batch_norm_backward_of_a_sharded_batch() -> None:
    for sample in _batch_norms(True)[1:]:
        check(sample, (3,), [(S(0),), (S(0),), *[(R,)] * 5])
        check(sample, (2, 2), [(S(0), R), (S(0), S(2)), *[(R, R)] * 5])


def test_running_statistics_are_never_moved_to_be_written() -> None:
    # Sharded channels with replicated statistics: a slice would be written and the rest left behind.
    sample = _batch_norms(True)[0]
    with pytest.raises(PlacementError):
        check(sample, (2,), [(S(1),), (R,), (R,), (R,), (R,)])
    check(sample, (2,), [(S(1),), (S(0),), (R,), (S(0),), (S(0),)])
