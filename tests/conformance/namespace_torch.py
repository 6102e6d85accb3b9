"""Small calls of functions of ``torch`` that the operator database has no entry for.

Each takes the namespace, torch's or dtorch's, and a maker of tensors (:class:`.namespace_check.Maker`).
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["TORCH", "Case"]

Case = Callable[[Any, Any], Any]


def _state(T: Any, setting: str, *values: Any) -> Any:
    """What a setting reads after each value, put back at the end."""
    get, put = getattr(T, f"get_{setting}"), getattr(T, f"set_{setting}")
    before = get()
    found = []
    try:
        for value in values:
            put(value)
            found.append(get())
    finally:
        put(before)
    return found


def _saved(T: Any, value: Any) -> Any:
    file = io.BytesIO()
    T.save({"t": value}, file)
    file.seek(0)
    return T.load(file, weights_only=True)


def _from_file(T: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "numbers"
        path.write_bytes(np.arange(6, dtype=np.float32).tobytes())
        return T.from_file(str(path), size=6).clone()


def _printed(T: Any, x: Any) -> Any:
    T.set_printoptions(precision=2)
    try:
        return repr(x.of(T.ones(2) * 1.23456).to("cpu"))
    finally:
        T.set_printoptions(profile="default")


def _lstm(T: Any, x: Any) -> Any:
    weights = [x(16, 3), x(16, 4), x(16), x(16)]
    return T.lstm(x(5, 2, 3), (x(1, 2, 4), x(1, 2, 4)), weights, True, 1, 0.0, False, False, False)


def _rnn(name: str, gates: int) -> Case:
    def call(T: Any, x: Any) -> Any:
        weights = [x(gates * 4, 3), x(gates * 4, 4), x(gates * 4), x(gates * 4)]
        return getattr(T, name)(x(5, 2, 3), x(1, 2, 4), weights, True, 1, 0.0, False, False, False)

    return call


def _cell(name: str, gates: int) -> Case:
    def call(T: Any, x: Any) -> Any:
        hidden = (x(2, 4), x(2, 4)) if name == "lstm_cell" else x(2, 4)
        return getattr(T, name)(x(2, 3), hidden, x(gates * 4, 3), x(gates * 4, 4), x(gates * 4), x(gates * 4))

    return call


_RANDOM: dict[str, Case] = {
    "alpha_dropout": lambda T, x: T.alpha_dropout(x(4, 3), 0.5, True),
    "alpha_dropout_": lambda T, x: T.alpha_dropout_(x(4, 3), 0.5, True),
    "binomial": lambda T, x: T.binomial(x.i(4, 3).float(), x.positive(4, 3)),
    "dropout": lambda T, x: T.dropout(x(4, 3), 0.5, True),
    "dropout_": lambda T, x: T.dropout_(x(4, 3), 0.5, True),
    "feature_alpha_dropout": lambda T, x: T.feature_alpha_dropout(x(4, 3, 2), 0.5, True),
    "feature_alpha_dropout_": lambda T, x: T.feature_alpha_dropout_(x(4, 3, 2), 0.5, True),
    "feature_dropout": lambda T, x: T.feature_dropout(x(4, 3, 2), 0.5, True),
    "feature_dropout_": lambda T, x: T.feature_dropout_(x(4, 3, 2), 0.5, True),
    "get_rng_state": lambda T, x: T.get_rng_state(),
    "initial_seed": lambda T, x: T.initial_seed(),
    "manual_seed": lambda T, x: (T.manual_seed(7), T.rand(3))[1],
    "native_dropout": lambda T, x: T.native_dropout(x(4, 3), 0.5, True),
    "normal": lambda T, x: (
        T.normal(0.5, 2.0, (4, 3)),
        T.normal(x(4, 3), x.positive(4, 3)),
        T.normal(x(20), 2.0),
        T.normal(0.5, x.positive(20)),
    ),
    "poisson": lambda T, x: T.poisson(x.positive(4, 3)),
    "rand": lambda T, x: T.rand(4, 3),
    "randperm": lambda T, x: T.randperm(7),
    "rrelu": lambda T, x: T.rrelu(x(4, 3), training=True),
    "rrelu_": lambda T, x: T.rrelu_(x(4, 3), training=True),
    "seed": lambda T, x: type(T.seed()),
    "set_rng_state": lambda T, x: (s := T.get_rng_state(), T.rand(2), T.set_rng_state(s), T.rand(2))[-1],
}

_MADE: dict[str, Case] = {
    "as_tensor": lambda T, x: (T.as_tensor([1.5, 2]), T.as_tensor(x(3))),
    "asarray": lambda T, x: (T.asarray([1, 2]), T.asarray(np.ones(3)), T.asarray(x(4), dtype=T.float64)),
    "bartlett_window": lambda T, x: T.bartlett_window(5),
    "blackman_window": lambda T, x: T.blackman_window(5, periodic=False),
    "from_dlpack": lambda T, x: T.from_dlpack(np.arange(4.0)),
    "from_file": lambda T, x: _from_file(T),
    "from_numpy": lambda T, x: T.from_numpy(np.arange(5)),
    "frombuffer": lambda T, x: T.frombuffer(bytearray(b"abcdefgh"), dtype=T.int16, count=2, offset=2),
    "hamming_window": lambda T, x: T.hamming_window(6, dtype=T.float64),
    "hann_window": lambda T, x: T.hann_window(6),
    "kaiser_window": lambda T, x: T.kaiser_window(6, True, 9.0),
    "range": lambda T, x: T.range(0, 3),
    "tensor": lambda T, x: (T.tensor([[1, 2], [3, 4]]), T.tensor(2.5), T.tensor([True]), T.tensor(np.float64(2))),
    "tril_indices": lambda T, x: T.tril_indices(3, 4, 1),
    "triu_indices": lambda T, x: T.triu_indices(3, 4, -1),
    "save": lambda T, x: _saved(T, x(4, 3)),
    "load": lambda T, x: _saved(T, x(4, 3)),
}

_FACTS: dict[str, Case] = {
    "can_cast": lambda T, x: (T.can_cast(T.float32, T.int32), T.can_cast(T.int32, T.float32)),
    "compiled_with_cxx11_abi": lambda T, x: T.compiled_with_cxx11_abi(),
    "cudnn_is_acceptable": lambda T, x: T.cudnn_is_acceptable(x(3)),
    "get_device": lambda T, x: T.get_device(x(3)),
    "get_file_path": lambda T, x: T.get_file_path("torch", "__init__.py"),
    "is_complex": lambda T, x: (T.is_complex(x(2)), T.is_complex(x.complex(2))),
    "is_conj": lambda T, x: T.is_conj(x.complex(2)),
    "is_distributed": lambda T, x: T.is_distributed(x(2)),
    "is_floating_point": lambda T, x: (T.is_floating_point(x(2)), T.is_floating_point(x.i(2))),
    "is_inference": lambda T, x: T.is_inference(x(2)),
    "is_neg": lambda T, x: T.is_neg(x(2)),
    "is_nonzero": lambda T, x: (T.is_nonzero(x.i(1, high=1)), T.is_nonzero(x.positive(1))),
    "is_same_size": lambda T, x: (T.is_same_size(x(2), x(2)), T.is_same_size(x(2), x(3))),
    "is_signed": lambda T, x: T.is_signed(x.i(2)),
    "is_storage": lambda T, x: T.is_storage(x(2)),
    "is_tensor": lambda T, x: (T.is_tensor(x(2)), T.is_tensor(3)),
    "is_vulkan_available": lambda T, x: T.is_vulkan_available(),
    "numel": lambda T, x: T.numel(x(4, 3)),
    "promote_types": lambda T, x: T.promote_types(T.int32, T.float16),
    "result_type": lambda T, x: (T.result_type(x.i(3), 1.5), T.result_type(x(3), x.i()), T.result_type(x.i(2), x(3))),
    "sym_float": lambda T, x: T.sym_float(3),
    "sym_int": lambda T, x: T.sym_int(3.7),
    "sym_ite": lambda T, x: T.sym_ite(True, 1, 2),
    "sym_max": lambda T, x: T.sym_max(1, 2),
    "sym_min": lambda T, x: T.sym_min(1, 2),
    "sym_not": lambda T, x: T.sym_not(True),
    "sym_sqrt": lambda T, x: T.sym_sqrt(4.0),
    "sym_sum": lambda T, x: T.sym_sum([1, 2]),
    "sym_constrain_range": lambda T, x: T.sym_constrain_range(3, min=1, max=5),
    "sym_constrain_range_for_size": lambda T, x: T.sym_constrain_range_for_size(3, min=0, max=5),
    "typename": lambda T, x: T.typename(3),
}

_SETTINGS: dict[str, Case] = {
    "get_default_dtype": lambda T, x: _state(T, "default_dtype", T.float64, T.float32),
    "set_default_dtype": lambda T, x: (T.set_default_dtype(T.float64), T.ones(2), T.set_default_dtype(T.float32))[1],
    "get_num_threads": lambda T, x: T.get_num_threads(),
    "get_num_interop_threads": lambda T, x: T.get_num_interop_threads(),
    "set_num_threads": lambda T, x: _state(T, "num_threads", 1),
    "get_float32_matmul_precision": lambda T, x: _state(T, "float32_matmul_precision", "high"),
    "set_float32_matmul_precision": lambda T, x: _state(T, "float32_matmul_precision", "medium"),
    "get_deterministic_debug_mode": lambda T, x: _state(T, "deterministic_debug_mode", 0),
    "set_deterministic_debug_mode": lambda T, x: _state(T, "deterministic_debug_mode", 0),
    "are_deterministic_algorithms_enabled": lambda T, x: T.are_deterministic_algorithms_enabled(),
    "is_deterministic_algorithms_warn_only_enabled": lambda T, x: T.is_deterministic_algorithms_warn_only_enabled(),
    "use_deterministic_algorithms": lambda T, x: T.use_deterministic_algorithms(False),
    "get_default_device": lambda T, x: T.get_default_device(),
    "is_grad_enabled": lambda T, x: T.is_grad_enabled(),
    "is_inference_mode_enabled": lambda T, x: T.is_inference_mode_enabled(),
    "is_anomaly_enabled": lambda T, x: T.is_anomaly_enabled(),
    "is_anomaly_check_nan_enabled": lambda T, x: T.is_anomaly_check_nan_enabled(),
    "set_anomaly_enabled": lambda T, x: T.set_anomaly_enabled(False),
    "is_warn_always_enabled": lambda T, x: T.is_warn_always_enabled(),
    "set_warn_always": lambda T, x: T.set_warn_always(False),
    "set_flush_denormal": lambda T, x: T.set_flush_denormal(False),
    "set_printoptions": lambda T, x: _printed(T, x),
    "is_autocast_enabled": lambda T, x: T.is_autocast_enabled("cpu"),
    "is_autocast_cpu_enabled": lambda T, x: T.is_autocast_cpu_enabled(),
    "is_autocast_cache_enabled": lambda T, x: T.is_autocast_cache_enabled(),
    "set_autocast_cache_enabled": lambda T, x: T.set_autocast_cache_enabled(True),
    "set_autocast_enabled": lambda T, x: T.set_autocast_enabled("cpu", False),
    "set_autocast_cpu_enabled": lambda T, x: T.set_autocast_cpu_enabled(False),
    "get_autocast_dtype": lambda T, x: T.get_autocast_dtype("cpu"),
    "get_autocast_cpu_dtype": lambda T, x: T.get_autocast_cpu_dtype(),
    "set_autocast_dtype": lambda T, x: T.set_autocast_dtype("cpu", T.bfloat16),
    "set_autocast_cpu_dtype": lambda T, x: T.set_autocast_cpu_dtype(T.bfloat16),
    "clear_autocast_cache": lambda T, x: T.clear_autocast_cache(),
    "autocast_increment_nesting": lambda T, x: (T.autocast_increment_nesting(), T.autocast_decrement_nesting()),
    "autocast_decrement_nesting": lambda T, x: (T.autocast_increment_nesting(), T.autocast_decrement_nesting()),
}

_NEURAL: dict[str, Case] = {
    "adaptive_avg_pool1d": lambda T, x: T.adaptive_avg_pool1d(x(2, 3, 8), 4),
    "adaptive_max_pool1d": lambda T, x: T.adaptive_max_pool1d(x(2, 3, 8), 4),
    "affine_grid_generator": lambda T, x: T.affine_grid_generator(x(2, 2, 3), [2, 1, 3, 4], False),
    "avg_pool1d": lambda T, x: T.avg_pool1d(x(2, 3, 8), 2),
    "batch_norm": lambda T, x: T.batch_norm(x(4, 3, 2), x(3), x(3), x(3), x.positive(3), True, 0.1, 1e-5, False),
    "bilinear": lambda T, x: T.bilinear(x(4, 2), x(4, 3), x(5, 2, 3), x(5)),
    "binary_cross_entropy_with_logits": lambda T, x: T.binary_cross_entropy_with_logits(x(4, 3), x.positive(4, 3)),
    "celu": lambda T, x: T.celu(x(4, 3), 2.0),
    "celu_": lambda T, x: T.celu_(x(4, 3)),
    "channel_shuffle": lambda T, x: T.channel_shuffle(x(2, 4, 3, 3), 2),
    "native_channel_shuffle": lambda T, x: T.native_channel_shuffle(x(2, 4, 3, 3), 2),
    "conv_tbc": lambda T, x: T.conv_tbc(x(6, 2, 3), x(2, 3, 4), x(4), 1),
    "convolution": lambda T, x: T.convolution(
        x(2, 3, 6, 6), x(4, 3, 3, 3), x(4), [1, 1], [1, 1], [1, 1], False, [0], 1
    ),
    "cosine_embedding_loss": lambda T, x: T.cosine_embedding_loss(x(4, 3), x(4, 3), x.sign(4)),
    "cosine_similarity": lambda T, x: T.cosine_similarity(x(4, 3), x(4, 3)),
    "ctc_loss": lambda T, x: T.ctc_loss(
        x(6, 2, 5).log_softmax(-1), x.i(2, 3, high=4) + 1, T.tensor([6, 6]), T.tensor([3, 2])
    ),
    "embedding": lambda T, x: T.embedding(x(5, 3), x.i(4, 2)),
    "embedding_bag": lambda T, x: T.embedding_bag(x(5, 3), x.i(6), T.tensor([0, 2])),
    "embedding_renorm_": lambda T, x: T.embedding_renorm_(x(5, 3), x.i(4), 1.0, 2.0),
    "grid_sampler": lambda T, x: T.grid_sampler(x(2, 3, 4, 4), x.positive(2, 3, 3, 2), 0, 0, False),
    "gru": _rnn("gru", 3),
    "gru_cell": _cell("gru_cell", 3),
    "hardshrink": lambda T, x: T.hardshrink(x(4, 3), 0.4),
    "hinge_embedding_loss": lambda T, x: T.hinge_embedding_loss(x(4, 3), x.sign(4, 3)),
    "instance_norm": lambda T, x: T.instance_norm(x(4, 3, 5), x(3), x(3), x(3), x.positive(3), True, 0.1, 1e-5, False),
    "kl_div": lambda T, x: T.kl_div(x(4, 3), x.positive(4, 3)),
    "lstm": _lstm,
    "lstm_cell": _cell("lstm_cell", 4),
    "margin_ranking_loss": lambda T, x: T.margin_ranking_loss(x(4), x(4), x.sign(4), 0.5),
    "max_pool1d": lambda T, x: T.max_pool1d(x(2, 3, 8), 2),
    "max_pool1d_with_indices": lambda T, x: T.max_pool1d_with_indices(x(2, 3, 8), 2),
    "max_pool2d": lambda T, x: T.max_pool2d(x(2, 3, 8, 8), 2),
    "max_pool3d": lambda T, x: T.max_pool3d(x(2, 3, 4, 4, 4), 2),
    "norm_except_dim": lambda T, x: T.norm_except_dim(x(4, 3), 2, 0),
    "pairwise_distance": lambda T, x: T.pairwise_distance(x(4, 3), x(4, 3)),
    "pdist": lambda T, x: T.pdist(x(4, 3)),
    "pixel_shuffle": lambda T, x: T.pixel_shuffle(x(2, 4, 3, 3), 2),
    "pixel_unshuffle": lambda T, x: T.pixel_unshuffle(x(2, 1, 4, 4), 2),
    "poisson_nll_loss": lambda T, x: T.poisson_nll_loss(x(4, 3), x.positive(4, 3), True, False, 1e-8, 1),
    "prelu": lambda T, x: T.prelu(x(4, 3), x(3)),
    "relu": lambda T, x: T.relu(x(4, 3)),
    "relu_": lambda T, x: T.relu_(x(4, 3)),
    "rnn_relu": _rnn("rnn_relu", 1),
    "rnn_relu_cell": _cell("rnn_relu_cell", 1),
    "rnn_tanh": _rnn("rnn_tanh", 1),
    "rnn_tanh_cell": _cell("rnn_tanh_cell", 1),
    "selu": lambda T, x: T.selu(x(4, 3)),
    "selu_": lambda T, x: T.selu_(x(4, 3)),
    "threshold": lambda T, x: T.threshold(x(4, 3), 0.1, 2.0),
    "threshold_": lambda T, x: T.threshold_(x(4, 3), 0.1, 2.0),
    "triplet_margin_loss": lambda T, x: T.triplet_margin_loss(x(4, 3), x(4, 3), x(4, 3)),
    "fake_quantize_per_tensor_affine": lambda T, x: T.fake_quantize_per_tensor_affine(x(4, 3), 0.1, 0, -128, 127),
    "fake_quantize_per_channel_affine": lambda T, x: T.fake_quantize_per_channel_affine(
        x(4, 3), x.positive(3), x.i(3, high=1).int(), 1, -128, 127
    ),
}

_ALGEBRA: dict[str, Case] = {
    "chain_matmul": lambda T, x: T.chain_matmul(x(4, 3), x(3, 5), x(5, 2)),
    "cond": lambda T, x: T.cond((x.positive(3) > 0).all(), lambda t: t + 1, lambda t: t - 1, (x(3),)),
    "detach": lambda T, x: T.detach(x(4, 3)),
    "einsum": lambda T, x: (T.einsum("ij,kj->ik", x(4, 3), x(5, 3)), T.einsum("bij,bjk->bik", x(2, 4, 3), x(2, 3, 5))),
    "detach_": lambda T, x: T.detach_(x(4, 3)),
    "detach_copy": lambda T, x: T.detach_copy(x(4, 3)),
    "frobenius_norm": lambda T, x: T.frobenius_norm(x(4, 3), [0, 1]),
    "lobpcg": lambda T, x: T.lobpcg(x.spd(12), k=2, X=x(12, 2))[0],
    "nuclear_norm": lambda T, x: T.nuclear_norm(x(4, 3)),
    "pca_lowrank": lambda T, x: T.pca_lowrank(x(6, 4), q=3)[1],
    "polygamma": lambda T, x: T.polygamma(1, x.positive(4, 3)),
    "segment_reduce": lambda T, x: T.segment_reduce(x(6, 2), "sum", lengths=T.tensor([2, 4])),
    "select_copy": lambda T, x: T.select_copy(x(4, 3), 0, 1),
    "slice_copy": lambda T, x: T.slice_copy(x(4, 3), 0, 1, 3),
    "slogdet": lambda T, x: T.slogdet(x.spd(3)),
    "split_copy": lambda T, x: T.split_copy(x(4, 3), 2),
    "unsafe_split_with_sizes": lambda T, x: T.unsafe_split_with_sizes(x(4, 3), [1, 3]),
    "svd_lowrank": lambda T, x: T.svd_lowrank(x(6, 4), q=3)[1],
    "vander": lambda T, x: (T.vander(x(4), N=3), T.vander(x.i(4)), T.vander(x(3), 1), T.vander(x(3), increasing=True)),
    "view_as_complex_copy": lambda T, x: T.view_as_complex_copy(x(4, 3, 2)),
    "view_as_real_copy": lambda T, x: T.view_as_real_copy(x.complex(4, 3)),
    "vmap": lambda T, x: T.vmap(lambda a, b: (a * b).sum())(x(4, 3), x(4, 3)),
    "where": lambda T, x: (
        T.where(x(4, 3) > 0, x(4, 3), x.i(4, 3)),
        T.where(x(4, 3) > 0, 1.0, x(3)),
        T.where(x(4) > 0, 1, 0),
        T.where(x(4, 3) > 0),
    ),
    "while_loop": lambda T, x: T.while_loop(lambda i: i.sum() < 50, lambda i: (i + 1,), (x.i(3),)),
}

TORCH: dict[str, Case] = {
    f"torch.{name}": case
    for table in (_RANDOM, _MADE, _FACTS, _SETTINGS, _NEURAL, _ALGEBRA)
    for name, case in table.items()
}
