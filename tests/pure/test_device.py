"""How calls become those of another device, and that the stand-ins for the CPU's own operators compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtorch.executor import kernels
from dtorch.executor.compiler import compile_call, resolve
from dtorch.executor.device import CPU, TRANSLATED, Accelerator
from dtorch.runtime.command import In, LocalCall, NumberIn

CPU_CALLS = torch.ops.aten


class Meta(Accelerator):
    """A device that torch always has and that is not the CPU."""

    name = "meta"
    torch_device = torch.device("meta")


def call(func: str, *args: Any, outs: Any = (), **kwargs: Any) -> LocalCall:
    return LocalCall(func, args, kwargs, (None,) * 4, outs)


def test_the_cpu_changes_nothing() -> None:
    device, given = CPU(), call("aten.zeros.default", [2], device=torch.device("cuda:3"))
    assert device.translate(given) is given
    assert device.here(len) is len
    assert device.transfers(None, 0, print) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "device"),
    [
        (call("aten.zeros.default", [2], dtype=torch.float32), True),
        (call("aten.arange.start_step", 0, 4, 1), True),
        (call("aten.full.default", [2], NumberIn(0)), True),
        (call("dtorch.factory_slice", "aten.arange.default", ((0, 2),), 4), True),
        (call("aten._to_copy.default", In(0), device=torch.device("cpu")), True),
        (call("aten._to_copy.default", In(0), dtype=torch.float64), False),
        (call("aten.new_zeros.default", In(0), [2]), False),
        (call("aten.stack.default", [In(0), In(1)]), False),
        (call("aten.add.Tensor", In(0), In(1), alpha=2), False),
    ],
    ids=lambda x: x.func if isinstance(x, LocalCall) else "",
)
def test_what_is_made_from_nothing_is_made_on_the_device(given: LocalCall, device: bool) -> None:
    made = Meta().translate(given)
    assert (made.kwargs.get("device") == torch.device("meta")) is device
    assert {k: v for k, v in made.kwargs.items() if k != "device"} == {
        k: v for k, v in given.kwargs.items() if k != "device"
    }


def test_devices_among_positional_arguments_and_pinning() -> None:
    made = Meta().translate(call("aten.empty.memory_format", [2], None, None, torch.device("cuda"), pin_memory=True))
    assert made.args == ([2], None, None, torch.device("meta"))
    assert "pin_memory" not in made.kwargs


@pytest.mark.parametrize(
    "given",
    [
        call("dtorch.random_slice", "normal_", (4, 2), (2, 1), ((0, 2), (0, 2)), (2, 1), torch.float32, 0.0, 1.0),
        call("dtorch.eye_slice", ((0, 2), (0, 2)), torch.float32),
        call("dtorch.factory_slice", "aten.arange.default", ((0, 2),), 4),
        call("aten.rand.default", [3]),
    ],
    ids=lambda c: c.func,
)
def test_kernels_make_their_tensors_on_the_device(given: LocalCall) -> None:
    device = Meta()
    (made,) = compile_call(device.translate(given), 0, 0, None, False, device)()
    assert made.device == torch.device("meta")


def test_outputs_of_empty_calls_and_other_strides() -> None:
    device = Meta()
    layout = ((0, 3), None, torch.float32)
    empty = LocalCall("aten.zeros.default", (), {}, (), (layout,), True)
    (made,) = compile_call(empty, 0, 0, None, False, device)()
    assert made.device == torch.device("meta") and made.shape == (0, 3)
    other = device.restride(torch.empty(2, 3, device="meta"), ((2, 3), (1, 2), torch.float32))
    assert other.stride() == (1, 2) and other.device == torch.device("meta")


def test_every_name_in_the_table_exists() -> None:
    for name, instead in TRANSLATED.items():
        assert callable(resolve(name)) and callable(resolve(instead))
        if instead.startswith("aten."):
            args = [getattr(CPU_CALLS, n.split(".")[1]).default._schema.arguments for n in (name, instead)]
            assert [a.name for a in args[0]][1:] == [a.name for a in args[1]][1:]


def test_statistics_of_normalizations_may_be_of_another_type() -> None:
    given = call("aten.native_layer_norm.default", In(0), [4], None, None, 1e-5)
    assert [Meta().may_differ(given, i) for i in range(3)] == [False, True, True]
    assert not CPU().may_differ(given, 1)
    assert not Meta().may_differ(call("aten.max.dim", In(0), 0), 1)
    assert Meta().may_differ(call("dtorch.on_contiguous", "aten.native_layer_norm.default", In(0)), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"masked": True}],
    ids=lambda o: next(iter(o), "plain"),
)
def test_attention_is_the_cpus(dtype: torch.dtype, options: dict[str, Any]) -> None:
    q, k, v = (torch.randn(2, 3, n, 8, dtype=dtype) for n in (5, 7, 7))
    named = {name: value for name, value in options.items() if name == "scale"}
    if "masked" in options:
        named["attn_mask"] = torch.randn(5, 7, dtype=dtype)
    causal = options.get("is_causal", False)
    want = CPU_CALLS._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, **named)
    grad = torch.randn_like(want[0])
    want_grads = CPU_CALLS._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, *want, 0.0, causal, **named
    )
    with torch.inference_mode():
        got = kernels.find("portable_attention")(q, k, v, 0.0, causal, **named)
        grads = kernels.find("portable_attention_backward")(grad, q, k, v, *got, 0.0, causal, **named)
    for a, b in zip(want, got, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    torch.testing.assert_close(got[0], want[0])
    for a, b in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(
            a, b, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=2e-2 if dtype is torch.bfloat16 else 1e-5
        )


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_an_lstm_layer_is_the_cpus(reverse: bool, bias: bool) -> None:
    x, h, c = torch.randn(5, 2, 4), torch.randn(1, 2, 6), torch.randn(1, 2, 6)
    weights = [torch.randn(24, 4), torch.randn(24, 6)] + ([torch.randn(24), torch.randn(24)] if bias else [])
    four = weights if bias else [*weights, torch.zeros(24), torch.zeros(24)]
    inputs = [t.requires_grad_() for t in (x, *weights, h, c)]
    steps = x.flip(0) if reverse else x
    out, hy, cy = torch.lstm(steps, (h, c), weights, bias, 1, 0.0, False, False, False)
    out = out.flip(0) if reverse else out
    grads = [torch.randn_like(t) for t in (out, hy, cy)]
    want_grads = torch.autograd.grad([out, hy, cy], inputs, grads)
    x, h, c, *four = (t.detach() for t in (x, h, c, *four))
    shape = (2, 6, 1, bias)
    with torch.inference_mode():
        got = kernels.find("portable_rnn_layer")(x, *four, h, c, reverse, [], *shape, False, False, True)
        back = kernels.find("portable_rnn_layer_backward")(
            x, *four, h, c, *got[:3], *grads, reverse, *shape, True, False, [], False, got[3]
        )
    for a, b in zip(got, (out, hy, cy), strict=False):
        torch.testing.assert_close(a, b.detach())
    kept = [*back[: 1 + len(weights)], *back[5:]]
    for a, b in zip(kept, want_grads, strict=True):
        torch.testing.assert_close(a, b)
