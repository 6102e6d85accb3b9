"""Small calls of tensor methods, and of functions below ``torch``, that the operator database has no entry for."""

from __future__ import annotations

from typing import Any

import numpy as np

from .namespace_torch import Case

__all__ = ["REST"]


def _hooked(T: Any, x: Any, register: str) -> Any:
    t, seen = x(3).requires_grad_(), []
    getattr(t, register)(lambda g: seen.append(T.ones(1)) and None)
    (t * 2).sum().backward()
    return t.grad, seen


def _backward(T: Any, x: Any) -> Any:
    t = x(4, 3).requires_grad_()
    (t * t).sum().backward()
    return t.grad


def _retained(T: Any, x: Any) -> Any:
    t = x(4, 3).requires_grad_()
    middle = t * 2
    middle.retain_grad()
    (middle * middle).sum().backward()
    return middle.grad, middle.retains_grad


_METHODS: dict[str, Case] = {
    "as_subclass": lambda T, x: x(3).as_subclass(T.Tensor),
    "backward": _backward,
    "bernoulli_": lambda T, x: (x(4, 3).bernoulli_(0.3), x(4, 3).bernoulli_(x.positive(4, 3))),
    "copy_": lambda T, x: (x(4, 3).copy_(x(3)), x(4, 3).copy_(x.i(4, 1))),
    "cpu": lambda T, x: x(4, 3).cpu(),
    "detach": lambda T, x: x(4, 3).requires_grad_().detach(),
    "detach_": lambda T, x: (x(4, 3).requires_grad_() * 2).detach_(),
    "dim": lambda T, x: x(4, 3).dim(),
    "dim_order": lambda T, x: (x(4, 3).dim_order(), x(4, 3).t().dim_order()),
    "element_size": lambda T, x: (x(2).element_size(), x.i(2).element_size()),
    "fill_diagonal_": lambda T, x: (x(4, 3).fill_diagonal_(2.0), x(7, 3).fill_diagonal_(1.0, wrap=True)),
    "float_power_": lambda T, x: x(4, 3).double().float_power_(x.i(4, 3)),
    "get_device": lambda T, x: x(2).get_device(),
    "hardshrink": lambda T, x: x(4, 3).hardshrink(0.4),
    "is_complex": lambda T, x: (x(2).is_complex(), x.complex(2).is_complex()),
    "is_conj": lambda T, x: x.complex(2).is_conj(),
    "is_contiguous": lambda T, x: (x(4, 3).is_contiguous(), x(4, 3).t().is_contiguous()),
    "is_distributed": lambda T, x: x(2).is_distributed(),
    "is_floating_point": lambda T, x: (x(2).is_floating_point(), x.i(2).is_floating_point()),
    "is_inference": lambda T, x: x(2).is_inference(),
    "is_neg": lambda T, x: x(2).is_neg(),
    "is_nonzero": lambda T, x: x.positive(1).is_nonzero(),
    "is_pinned": lambda T, x: x(2).is_pinned(),
    "is_same_size": lambda T, x: x(2).is_same_size(x(2)),
    "is_set_to": lambda T, x: x(2).is_set_to(x(2)),
    "is_shared": lambda T, x: x(2).is_shared(),
    "is_signed": lambda T, x: x.i(2).is_signed(),
    "module_load": lambda T, x: x(4, 3).module_load(x(4, 3)),
    "ndimension": lambda T, x: x(4, 3).ndimension(),
    "nelement": lambda T, x: x(4, 3).nelement(),
    "new": lambda T, x: x(4, 3).new([1.0, 2.0]),
    "new_tensor": lambda T, x: (x(3).new_tensor([1, 2]), x.i(3).new_tensor(np.ones(2))),
    "numel": lambda T, x: x(4, 3).numel(),
    "numpy": lambda T, x: x(4, 3).numpy(),
    "pin_memory": lambda T, x: x(4, 3) if T.__name__ == "torch" else x(4, 3).pin_memory(),
    "prelu": lambda T, x: x(4, 3).prelu(x(3)),
    "random_": lambda T, x: (x(4, 3).random_(), x.i(4, 3).random_(5), x(4, 3).random_(2, 9)),
    "register_hook": lambda T, x: _hooked(T, x, "register_hook"),
    "register_post_accumulate_grad_hook": lambda T, x: _hooked(T, x, "register_post_accumulate_grad_hook"),
    "relu": lambda T, x: x(4, 3).relu(),
    "relu_": lambda T, x: x(4, 3).relu_(),
    "requires_grad_": lambda T, x: x(3).requires_grad_().requires_grad,
    "resize": lambda T, x: x(4, 3).resize(2, 6),
    "resize_as": lambda T, x: x(4, 3).resize_as(x(2, 6)),
    "retain_grad": _retained,
    "set_": lambda T, x: x(4, 3).set_(x(2, 2)),
    "size": lambda T, x: (x(4, 3).size(), x(4, 3).size(1)),
    "slogdet": lambda T, x: x.spd(3).slogdet(),
    "storage_offset": lambda T, x: x(4, 3).storage_offset(),
    "stride": lambda T, x: (x(4, 3).stride(), x(4, 3).t().stride(0)),
    "to_dense": lambda T, x: x(4, 3).to_dense(),
    "tolist": lambda T, x: (x(4, 3).tolist(), x.i().tolist()),
    "type": lambda T, x: (x(3).type(T.int64), x(3).type("torch.DoubleTensor"), x(3).type()),
    "type_as": lambda T, x: x(3).type_as(x.i(2)),
    "unsafe_split_with_sizes": lambda T, x: x(4, 3).unsafe_split_with_sizes([1, 3]),
}  # fmt: skip

_FUNCTIONAL: dict[str, Case] = {
    "adaptive_max_pool1d_with_indices": lambda F, x: F.adaptive_max_pool1d_with_indices(x(2, 3, 8), 4),
    "adaptive_max_pool2d_with_indices": lambda F, x: F.adaptive_max_pool2d_with_indices(x(2, 3, 8, 8), 4),
    "adaptive_max_pool3d_with_indices": lambda F, x: F.adaptive_max_pool3d_with_indices(x(2, 3, 4, 4, 4), 2),
    "affine_grid": lambda F, x: F.affine_grid(x(2, 2, 3), [2, 1, 3, 4], align_corners=False),
    "conv_tbc": lambda F, x: F.conv_tbc(x(6, 2, 3), x(2, 3, 4), x(4), 1),
    "dropout1d": lambda F, x: F.dropout1d(x(4, 3, 5), 0.5),
    "embedding": lambda F, x: (F.embedding(x.i(4, 2), x(5, 3)), F.embedding(x.i(4), x(5, 3), padding_idx=1)),
    "fold": lambda F, x: F.fold(x(2, 12, 4), (3, 3), (2, 2)),
    "fractional_max_pool2d_with_indices": lambda F, x: F.fractional_max_pool2d_with_indices(
        x(2, 3, 8, 8), 2, output_size=4, _random_samples=x.positive(2, 3, 2)
    ),
    "fractional_max_pool3d_with_indices": lambda F, x: F.fractional_max_pool3d_with_indices(
        x(2, 3, 8, 8, 8), 2, output_size=4, _random_samples=x.positive(2, 3, 3)
    ),
    "grouped_mm": lambda F, x: F.grouped_mm(x(2, 16, 16).bfloat16(), x(2, 16, 16).bfloat16()),
    "gumbel_softmax": lambda F, x: F.gumbel_softmax(x(4, 3), hard=True),
    "lp_pool1d": lambda F, x: F.lp_pool1d(x.positive(2, 3, 8), 2.0, 2),
    "lp_pool2d": lambda F, x: F.lp_pool2d(x.positive(2, 3, 8, 8), 2.0, 2),
    "lp_pool3d": lambda F, x: F.lp_pool3d(x.positive(2, 3, 4, 4, 4), 2.0, 2),
    "max_pool1d_with_indices": lambda F, x: F.max_pool1d_with_indices(x(2, 3, 8), 2),
    "max_pool2d_with_indices": lambda F, x: F.max_pool2d_with_indices(x(2, 3, 8, 8), 2),
    "max_pool3d_with_indices": lambda F, x: F.max_pool3d_with_indices(x(2, 3, 4, 4, 4), 2),
    "native_channel_shuffle": lambda F, x: F.native_channel_shuffle(x(2, 4, 3, 3), 2),
    "one_hot": lambda F, x: (F.one_hot(x.i(4), 6), F.one_hot(x.i(4))),
    "upsample": lambda F, x: F.upsample(x(2, 3, 4, 4), scale_factor=2),
}

_BELOW: dict[str, Case] = {
    "fft.fftfreq": lambda T, x: T.fft.fftfreq(5, 0.5),
    "fft.rfftfreq": lambda T, x: T.fft.rfftfreq(5, 0.5),
    "special.polygamma": lambda T, x: T.special.polygamma(2, x.positive(4, 3)),
    "special.gammainc": lambda T, x: T.special.gammainc(x.positive(4, 3), x.positive(4, 3)),
    "special.gammaincc": lambda T, x: T.special.gammaincc(x.positive(4, 3), x.positive(4, 3)),
    "autograd.backward": lambda T, x: (t := x(3).requires_grad_(), T.autograd.backward((t * t).sum()), t.grad)[2],
    "autograd.grad": lambda T, x: (t := x(3).requires_grad_(), T.autograd.grad((t * t).sum(), t))[1],
    "func.functional_call": lambda T, x: T.func.functional_call(T.nn.ReLU(), {}, (x(3),)),
    "func.grad": lambda T, x: T.func.grad(lambda t: (t * t).sum())(x(4, 3)),
    "func.grad_and_value": lambda T, x: T.func.grad_and_value(lambda t: (t * t).sum())(x(4, 3)),
    "func.hessian": lambda T, x: T.func.hessian(lambda t: (t**3).sum())(x(3)),
    "func.jacfwd": lambda T, x: T.func.jacfwd(lambda t: t * t)(x(3)),
    "func.jacrev": lambda T, x: T.func.jacrev(lambda t: t * t)(x(3)),
    "func.jvp": lambda T, x: T.func.jvp(lambda t: t.sin(), (x(3),), (x(3),)),
    "func.linearize": lambda T, x: T.func.linearize(lambda t: t.sin(), x(3))[0],
    "func.vjp": lambda T, x: (pair := T.func.vjp(lambda t: t.sin(), x(3)), pair[0], pair[1](x(3)))[1:],
    "func.vmap": lambda T, x: T.func.vmap(lambda a: a.sum(), in_dims=1)(x(4, 3)),
    "nn.utils.clip_grad_norm_": lambda T, x: _clipped(x, lambda t: T.nn.utils.clip_grad_norm_([t], 0.5)),
    "nn.utils.clip_grad_value_": lambda T, x: _clipped(x, lambda t: T.nn.utils.clip_grad_value_([t], 0.5)),
    "nn.utils.parameters_to_vector": lambda T, x: T.nn.utils.parameters_to_vector([x(4, 3), x(2)]),
    "nn.utils.get_total_norm": lambda T, x: T.nn.utils.get_total_norm([x(4, 3), x(2)]),
    "nn.init.xavier_uniform_": lambda T, x: T.nn.init.xavier_uniform_(x(4, 3)),
    "nn.init.orthogonal_": lambda T, x: T.nn.init.orthogonal_(x(4, 3)),
    "nn.init.trunc_normal_": lambda T, x: T.nn.init.trunc_normal_(x(4, 3)),
    "signal.windows.hann": lambda T, x: T.signal.windows.hann(6),
    "signal.windows.gaussian": lambda T, x: T.signal.windows.gaussian(6, std=2.0),
    "linalg.vander": lambda T, x: T.linalg.vander(x(4)),
    "amp.autocast": lambda T, x: _autocast(T, x),
}


def _clipped(x: Any, clip: Any) -> Any:
    t = x(4, 3).requires_grad_()
    (t**3).sum().backward()
    return clip(t), t.grad


def _autocast(T: Any, x: Any) -> Any:
    with T.amp.autocast("cpu", dtype=T.bfloat16):
        return x(4, 3) @ x(3, 4)


REST: dict[str, Case] = {
    **{f"Tensor.{name}": case for name, case in _METHODS.items()},
    **{
        f"nn.functional.{name}": (lambda T, x, case=case: case(T.nn.functional, x))
        for name, case in _FUNCTIONAL.items()
    },
    **_BELOW,
}
