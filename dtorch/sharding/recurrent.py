"""Rules of the fused LSTM layer that torch's composite picks on a CPU: batches are free."""

from __future__ import annotations

from .rule import Call, Dims, Local, Rule, rule

__all__: list[str] = []

_WHY = "A recurrent layer wants whole sequences, features and weights on every rank."
_ROWS: Dims = ("", "b", "")  # sequences are time first


def _state(ndim: int) -> Dims:
    return ("b", "") if ndim == 2 else ("", "b", "")


def _portable(local: Local) -> None:
    """The operator itself keeps no workspace in inference mode, in which executors run; its backward wants one."""
    name = "dtorch.portable_rnn_layer"
    local.func = f"{name}_backward" if local.func.endswith("_backward.default") else name


@rule("mkldnn_rnn_layer", always=True)
def layer(call: Call) -> Rule:
    """Input [t, b, i], four weights and biases, two states, to output [t, b, h], two states and a workspace."""
    weights = [("",) * s.ndim for s in call.specs[1:5]]
    states = [_state(s.ndim) for s in call.specs[5:7]]
    return Rule(
        (_ROWS, *weights, *states),
        (_ROWS, *[_state(len(m.shape)) if m else None for m in call.outs[1:3]], ("",)),
        reduce={"b": (None, None, None, "same")},
        local=_portable,
        why=_WHY,
    )


@rule("mkldnn_rnn_layer_backward", always=True)
def layer_backward(call: Call) -> Rule:
    """Gradients of input, weights and biases (sums over the batch) and states."""
    ins: list[Dims] = [_ROWS, *[("",) * s.ndim for s in call.specs[1:5]]]
    for name in ("hx_", "cx_tmp", "output", "hy_", "cy_", "grad_output", "grad_hy", "grad_cy"):
        spec = call.arg(name)
        if spec is not None:
            ins.append(_ROWS if name.endswith("output") else _state(spec.ndim))
    outs = [_ROWS, *[("",) * len(m.shape) if m else None for m in call.outs[1:5]]]
    outs += [_state(len(m.shape)) if m else None for m in call.outs[5:7]]
    return Rule(
        (*ins, ("",)),
        tuple(outs),
        reduce={"b": (None, "sum", "sum", "sum", "sum", None, None)},
        local=_portable,
        why=_WHY,
    )
