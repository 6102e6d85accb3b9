"""The device an executor owns. One interface, two classes: :class:`CPU` and :class:`CUDA`.

**Which executor owns what.** An executor is told its device when it is forked and keeps it. Executors from 0 on serve
"cpu" meshes; GPU `d` (in the order of ``CUDA_VISIBLE_DEVICES``) belongs to executor ``first + d``, where `first` is how
many CPU executors the pool may have. So the index alone says which kind an executor is, ranks of a mesh share one
kind, and a redistribution between kinds is one between executors. In simulation one executor hosts all ranks:
executor 0, or for a "cuda" mesh, where there is a GPU, the one of GPU 0.

**What the two do differently.** On a CPU an operator has run when its call returns. CUDA is only told of it: kernels
and copies queue on one stream of the executor's own, and what must happen after them hangs on events
(:mod:`dtorch.executor.transfers`). Nothing here synchronises with the GPU, with three exceptions that the program asks
for: collectives that cross to CPU executors, ``from_local``, and operators that synchronise in torch itself.

**Names.** The client's proxies are CPU tensors to torch, so torch's composites send CPU operators, and factories no
device. :meth:`Device.translate` puts this right when a plan is defined; nothing is looked up when it runs. The one
table of names is :data:`TRANSLATED`.

**Errors that stay.** After an error of the GPU itself (a device-side assertion, an illegal access) every later call on
it fails in this process, so its values are gone and no retry helps: :meth:`Device.is_lost_by` knows such errors. The
executor ends with a :class:`DeviceError` that says so, which is the last line of its stderr, and the pool reports its
death as any other. Running out of memory is not one of them.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..runtime.command import In, LocalCall, OutLayout
from ..runtime.shared import SharedState
from .transfers import Event, Transfers

__all__ = ["CPU", "CUDA", "TRANSLATED", "Device", "DeviceError", "open_device"]

F = TypeVar("F", bound=Callable[..., Any])

TRANSLATED: dict[str, str] = {
    # Operators without a counterpart of the same arguments: see kernels_portable.
    "aten._scaled_dot_product_flash_attention_for_cpu.default": "dtorch.portable_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": "dtorch.portable_attention_backward",
    "aten.mkldnn_rnn_layer.default": "dtorch.portable_rnn_layer",
    "aten.mkldnn_rnn_layer_backward.default": "dtorch.portable_rnn_layer_backward",
    # The same operator under another name.
    "aten._grid_sampler_2d_cpu_fallback.default": "aten.grid_sampler_2d.default",
    "aten._convert_weight_to_int4pack_for_cpu.default": "aten._convert_weight_to_int4pack.default",
    "aten._weight_int4pack_mm_for_cpu.default": "aten._weight_int4pack_mm.default",
}
"""What the client's composites call on a CPU → what runs on other devices."""

# Outputs that only the operator's own backward reads, and that GPUs keep in float32 where CPUs keep the input's type.
_STATISTICS = frozenset(
    f"aten.{name}"
    for name in (
        "native_layer_norm.default",
        "native_group_norm.default",
        "native_batch_norm.default",
        "_native_batch_norm_legit.default",
        "_native_batch_norm_legit.no_stats",
        "_native_batch_norm_legit_no_training.default",
        "_fused_rms_norm.default",
    )
)


class DeviceError(RuntimeError):
    """The device of an executor cannot be used, or peers wait for a transfer that will not come: its process ends."""

    @classmethod
    def after(cls, error: BaseException, device: str, text: str) -> DeviceError:
        """What an executor ends with whose `device` was made useless by `error`, met in the operator `text`."""
        first = (str(error).strip().splitlines() or [""])[0]
        late = "" if device == "cpu" else "; it is told late, so an operator before that may be to blame"
        return cls(
            f"{device} cannot be used any longer after this error, so its executor ends and the values on it are lost: "
            f"{type(error).__name__}: {first} (met in {text or 'a copy, or the end of an operator'}{late})"
        )


# Of CUDA errors that end the context, cudaError_t: ECC, NVLink and launch failures, illegal accesses, assertions.
_LASTING_CODES = frozenset([214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721])
# Where an error carries no code, what torch and its libraries say of the same.
_LASTING_WORDS = (
    "device-side assert",
    "illegal memory access",
    "illegal instruction",
    "invalid address space",
    "invalid program counter",
    "misaligned address",
    "hardware stack error",
    "unspecified launch failure",
    "the launch timed out and was terminated",
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "cudaerrorassert",
    "cudaerrorillegaladdress",
    "cudaerrorlaunchfailure",
)


def is_lasting(error: BaseException) -> bool:
    """Whether `error`, or one it comes from, is one after which a CUDA context is useless."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, RuntimeError):
            text = str(at).lower()
            if getattr(at, "error_code", None) in _LASTING_CODES or any(words in text for words in _LASTING_WORDS):
                return True
        at = at.__cause__ or at.__context__
    return False


class Device:
    """What an executor's code needs to know of its device. This class is the CPU's; others override what differs.

    Attributes:
        name: "cpu" or "cuda:0".
        torch_device: the same for torch.
        nccl: whether collectives between executors of this kind of device go by NCCL.
    """

    name = "cpu"
    torch_device = torch.device("cpu")
    nccl = False

    def open(self, state: SharedState, options: dict[str, Any]) -> None:
        """Make the device ready for this process; called once, before anything else."""

    def transfers(self, state: SharedState, index: int, tell: Callable[[], object]) -> Transfers | None:
        """Who looks after copies that the device does on its own; None where copies are done when they return."""
        return None

    def set_threads(self, count: int) -> None:
        """How many threads an operator may use on the host."""
        torch.set_num_threads(count)

    def empty(self, layout: OutLayout) -> Tensor:
        """An uninitialised tensor; without strides it is contiguous."""
        shape, stride, dtype = layout
        return torch.empty(shape, dtype=dtype) if stride is None else torch.empty_strided(shape, stride, dtype=dtype)

    def restride(self, t: Tensor, layout: OutLayout) -> Tensor:
        """`t` in the memory order that the client believes it has."""
        return self.empty(layout).copy_(t)

    def place(self, t: Tensor) -> Tensor:
        """`t`, on this device."""
        return t

    def translate(self, call: LocalCall) -> LocalCall:
        """`call` as this device runs it."""
        return call

    def here(self, function: F) -> F:
        """`function`, such that tensors it makes from nothing are made on this device."""
        return function

    def may_differ(self, call: LocalCall, output: int) -> bool:
        """Whether output `output` of `call` may be of another type here than the client believes."""
        return False

    def random_state(self) -> Tensor:
        """The state of the device's generator, as bytes in host memory."""
        return torch.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        """Let the generator continue from `state`."""
        torch.set_rng_state(state)

    def is_lost_by(self, error: BaseException) -> bool:
        """Whether `error`, which an operator or a transfer raised, has made the device useless to this process."""
        return False


class CPU(Device):
    """The host's cores: all of :class:`Device` as it stands."""


class Accelerator(Device):
    """What devices have in common whose tensors torch does not put on the CPU by itself."""

    def empty(self, layout: OutLayout) -> Tensor:
        shape, stride, dtype = layout
        if stride is None:
            return torch.empty(shape, dtype=dtype, device=self.torch_device)
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.torch_device)

    def place(self, t: Tensor) -> Tensor:
        return t.to(self.torch_device)

    def translate(self, call: LocalCall) -> LocalCall:
        func = TRANSLATED.get(call.func, call.func)
        kwargs = {k: self._named(v) for k, v in call.kwargs.items()}
        # Only CPU tensors can be pinned.
        kwargs.pop("pin_memory", None)
        if "device" in kwargs or (not _has_input(call) and _takes_device(func, call.args)):
            kwargs["device"] = self.torch_device
        return LocalCall(func, tuple(map(self._named, call.args)), kwargs, call.pre, call.outs, call.empty)

    def _named(self, value: Any) -> Any:
        """`value` with this device in the place of any other."""
        if isinstance(value, torch.device):
            return self.torch_device
        if type(value) is list or type(value) is tuple:
            return type(value)(map(self._named, value))
        return value

    def here(self, function: F) -> F:
        device = self.torch_device

        def run(*args: Any, **kwargs: Any) -> Any:
            with device:
                return function(*args, **kwargs)

        return run  # type: ignore[return-value]

    def may_differ(self, call: LocalCall, output: int) -> bool:
        # A kernel is given the name of the operator it runs.
        return output > 0 and not _STATISTICS.isdisjoint([call.func, *(a for a in call.args if type(a) is str)])


def _has_input(value: Any) -> bool:
    if type(value) is LocalCall:
        return _has_input(value.args) or _has_input(tuple(value.kwargs.values()))
    if type(value) is list or type(value) is tuple:
        return any(map(_has_input, value))
    return type(value) is In


def _takes_device(func: str, args: tuple[Any, ...]) -> bool:
    """Whether `func`, or the operator that the kernel `func` is given the name of, has an argument `device`."""
    namespace, _, rest = func.partition(".")
    if namespace == "dtorch":
        return any(type(a) is str and a.startswith("aten.") and _takes_device(a, ()) for a in args)
    packet, _, overload = rest.rpartition(".")
    schema = getattr(getattr(getattr(torch.ops, namespace), packet), overload)._schema
    return any(a.name == "device" for a in schema.arguments)


class CUDA(Accelerator):
    """One GPU.

    Results and uploads travel between the GPU and the arena itself: its first ``pinned_bytes`` are registered with the
    driver, and the arena gives low addresses first. What lies beyond, and everything where registering is refused
    (WSL, some containers), goes by way of pinned buffers.

    Args:
        ordinal: which GPU, in the order of ``CUDA_VISIBLE_DEVICES``.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.name = f"cuda:{ordinal}"
        self.torch_device = torch.device("cuda", ordinal)
        self.nccl = torch.distributed.is_nccl_available()  # noqa: TID251  a question, not a group
        self.pinned = 0
        self._events: list[torch.cuda.Event] = []

    def open(self, state: SharedState, options: dict[str, Any]) -> None:
        """Make the context, a stream of its own, and register the arena."""
        # NCCL's own watching would poll a store that is gone, and end the process after ten minutes in a collective;
        # dtorch has a watchdog, and knows of deaths.
        for name in ("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_PROPAGATE_ERROR"):
            os.environ.setdefault(name, "0")
        try:
            torch.cuda.set_device(self.ordinal)
            self._stream = torch.cuda.Stream(self.torch_device)
            torch.cuda.set_stream(self._stream)
            torch.zeros(1, device=self.torch_device)
        except (RuntimeError, AssertionError) as error:
            raise DeviceError(f"{self.name} cannot be used: {error}") from error
        self._register(state, min(int(options.get("pinned", 0)), len(state.arena_map)))

    def _register(self, state: SharedState, nbytes: int) -> None:
        if not nbytes:
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(state.arena_map))
        runtime: Any = torch.cuda.cudart()
        portable = 1
        if int(runtime.cudaHostRegister(address, nbytes, portable)) == 0:
            self.pinned = nbytes
            return
        try:
            # The refusal stays behind as "last error", and would be blamed on the next kernel.
            torch.zeros(1, device=self.torch_device).add_(1)
        except RuntimeError:
            pass

    def transfers(self, state: SharedState, index: int, tell: Callable[[], object]) -> Transfers | None:
        return Transfers(self, state, index, tell)

    def set_threads(self, count: int) -> None:
        """Nothing: the host only issues kernels here."""

    def random_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.torch_device)

    def set_random_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self.torch_device)

    def is_lost_by(self, error: BaseException) -> bool:
        if is_lasting(error):
            return True
        # What it is called is not all there is to know: after such an error, every call fails.
        try:
            self._stream.query()
        except RuntimeError:
            return True
        return False

    # What transfers need.

    def staging(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Pinned memory, from torch's cache of it."""
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def reaches(self, start: int, end: int) -> bool:
        """Whether these bytes of the arena are registered."""
        return end <= self.pinned

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Start a copy on the executor's stream."""
        to.copy_(source, non_blocking=True)

    def record(self) -> Event:
        """An event behind all that the stream was given."""
        event = self._events.pop() if self._events else torch.cuda.Event()
        event.record(self._stream)
        return _Once(event, self._events)


class _Once:
    """An event that is given back for another use once it has come."""

    __slots__ = ("_event", "_home")

    def __init__(self, event: torch.cuda.Event, home: list[torch.cuda.Event]) -> None:
        self._event, self._home = event, home

    def query(self) -> bool:
        if not self._event.query():
            return False
        self._home.append(self._event)
        return True


def open_device(name: str, state: SharedState, options: dict[str, Any]) -> Device:
    """The device called `name`, ready for use.

    Args:
        name: "cpu", "cuda:1", or "module:Class" of another device, as tests use.
        state: the pool's shared memory.
        options: the executor's.

    Raises:
        DeviceError: it cannot be used.
    """
    kind, _, rest = name.partition(":")
    device: Device
    if kind == "cpu":
        device = CPU()
    elif kind == "cuda":
        device = CUDA(int(rest))
    else:
        device = getattr(importlib.import_module(kind), rest)()
    device.open(state, options)
    return device
