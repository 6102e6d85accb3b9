"""Every message that crosses the line between the client and an executor, and its bytes.

The ring carries records of 8-byte words. Word 0 of a record is ``plan id | length << 32`` (length in words, the
whole record), so that any reader can step over a record it does not know. Plan ids below FIRST_PLAN are fixed:

    WRAP     the rest of the ring up to its end is unused
    FREE     words 1.. are refs to drop
    CONTROL  word 1 is the length in bytes of a pickled message, which follows

All other ids are plans. A plan is defined once, by a control message, and then run by records of fixed layout:

    word 0          plan id | length << 32
    words 1..       refs of the outputs
    words ..        refs of the inputs
    words ..        numbers that may change from call to call, as int64 or float64

Control messages are the dataclasses below; they are pickled by the client alone and read by executors it started.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    from .transport import Told

__all__ = [
    "CONTROL",
    "FIRST_PLAN",
    "FREE",
    "LOST_WITH_POOL",
    "LOST_WRITE",
    "OVERWRITES",
    "WRAP",
    "CallPlan",
    "Cause",
    "CheckpointPlan",
    "ClearErrors",
    "DefineMesh",
    "DefineOperator",
    "DropPlans",
    "Dropped",
    "ErrorReport",
    "FetchFailed",
    "FetchPlan",
    "In",
    "LoadTensors",
    "LocalCall",
    "MakeLocals",
    "NumberIn",
    "OutLayout",
    "PickPlan",
    "RedistributePlan",
    "Renew",
    "Reply",
    "SavePieces",
    "SaveState",
    "Seed",
    "SendRandom",
    "Settle",
    "SyncRandom",
    "Threads",
    "UploadPlan",
    "decode",
    "encode",
    "encode_function",
]

WRAP, FREE, CONTROL = 0, 1, 2
FIRST_PLAN = 16

LENGTH_SHIFT = 32
PLAN_MASK = (1 << LENGTH_SHIFT) - 1

# Blamed in place of a command: a value is gone with the pool it lay in, or only part of it was written.
LOST_WITH_POOL, LOST_WRITE = -1, -2

# Writes that replace the whole target, whatever it held.
OVERWRITES = frozenset(["aten.copy_.default", "aten.zero_.default", "aten.fill_.Scalar", "aten.fill_.Tensor"])


@dataclass(frozen=True, slots=True)
class In:
    """Stands for input tensor `index` among the arguments of a local call."""

    index: int


@dataclass(frozen=True, slots=True)
class NumberIn:
    """Stands for number `index` of the record."""

    index: int


# (shape, stride or None for any, dtype) of one local output
OutLayout = tuple[tuple[int, ...], tuple[int, ...] | None, Any]


@dataclass(frozen=True, slots=True)
class LocalCall:
    """What one rank runs.

    Attributes:
        func: "aten.add.Tensor", or "dtorch.name" for a function of `executor.kernels`.
        args, kwargs: with :class:`In` and :class:`NumberIn` in the place of tensors and numbers.
        pre: per input, a move that needs no communication, done before the call: None,
            ``("narrow", ((dim, start, length), …))``, or ``("zero", …)`` for zeros of the shape that gives.
        outs: layout of every output; None for an output that does not exist.
        empty: there is nothing to compute, so the kernel is not run at all: the outputs are zeros, or empty.
    """

    func: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pre: tuple[Any, ...]
    outs: tuple[OutLayout | None, ...]
    empty: bool = False


@dataclass(frozen=True, slots=True)
class DefineMesh:
    """A mesh: for every rank, the executor that hosts it."""

    mesh: int
    hosts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DefineOperator:
    """An operator that the program defined, for executors that have not.

    Attributes:
        name: "namespace::name".
        serial: of the definition; one that an executor has is passed over.
        schema: without the name; None where nothing is known but where to look.
        functions: device type, or None for all, -> the user's function; pickled.
        module: imported instead, where it is named.
        libraries: what ``torch.ops.load_library`` is to load.
    """

    name: str
    serial: int
    schema: str | None
    functions: bytes | None
    module: str | None
    libraries: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallPlan:
    """An operator on the shards of one mesh.

    Attributes:
        calls, which: the distinct local calls, and for each rank the index of its own.
        inputs, numbers: how many refs the record carries after the outputs, and the kind of each number ("q" or "d").
        outputs: per output, whether it is new (has a ref in the record).
        writes: indices of the inputs that the operator writes to.
        text: the call as shown in errors.
        draws: whether it takes random numbers. All ranks draw the same, and an executor's generator moves once.
        lists: whether the operator returns lists of tensors.
        layouts: where it draws, shape and dtype of every input, per rank: what to draw for should an input fail.
    """

    plan: int
    mesh: int
    calls: tuple[LocalCall, ...]
    which: tuple[int, ...]
    inputs: int
    numbers: str
    outputs: tuple[bool, ...]
    writes: tuple[int, ...]
    text: str
    draws: bool = False
    lists: bool = False
    layouts: tuple[tuple[tuple[tuple[int, ...], Any], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class DropPlans:
    """Plans that no record will name again."""

    plans: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RedistributePlan:
    """Tensors that move to other placements: words are the output refs, then the input refs.

    `programs` maps an executor to its part of each tensor's move (see `executor.redistribution`);
    `source`, `target` are mesh ids.
    """

    plan: int
    source: int
    target: int
    programs: dict[int, tuple[Any, ...]]
    count: int
    text: str


@dataclass(frozen=True, slots=True)
class UploadPlan:
    """A value from the client: words are the output ref and the arena offset in bytes."""

    plan: int
    mesh: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    # per rank: ((start, length) per dim) of the piece it takes; None for zeros of the given local shape
    regions: tuple[tuple[tuple[int, int], ...], ...]
    strides: tuple[tuple[int, ...] | None, ...]
    # per rank, where the value is all ranks' pieces one after the other, flat: the shape of its piece
    pieces: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """A value to the client: words are the ref, the slot's word index, the slot's generation, the arena offset.

    `ranks` are the ranks that write, each the region of its piece.
    """

    plan: int
    mesh: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    ranks: tuple[int, ...]
    regions: tuple[tuple[tuple[int, int], ...], ...]
    data: bool = True


@dataclass(frozen=True, slots=True)
class PickPlan:
    """The piece of rank `rank` becomes a tensor of a one-device mesh on the same executor."""

    plan: int
    mesh: int
    rank: int


@dataclass(frozen=True, slots=True)
class MakeLocals:
    """``from_local``: each rank's piece is ``function(rank)``, run on its executor. The function is pickled."""

    mesh: int
    ref: int
    function: bytes
    shapes: tuple[tuple[int, ...], ...] | None
    dtype: Any
    text: str


@dataclass(frozen=True, slots=True)
class Seed:
    """``manual_seed``: every executor's generator starts again from `seed`, or those of `members`."""

    seed: int
    members: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class SyncRandom:
    """The generator state of executor `root` is given to `members`, or, where `state` is given, that one is set."""

    root: int
    members: tuple[int, ...]
    region: Any
    state: bytes | None = None


@dataclass(frozen=True, slots=True)
class SendRandom:
    """Executor `root` replies with its generator state, under `token`."""

    root: int
    token: int


@dataclass(frozen=True, slots=True)
class Threads:
    """How many torch threads each executor uses from here on."""

    count: int


@dataclass(frozen=True, slots=True)
class ClearErrors:
    """``clear_errors``: each executor replies, under `token`, with the values that writes have not reached: a list of
    (ref, mesh id, whether it was left untouched)."""

    token: int


@dataclass(frozen=True, slots=True)
class Settle:
    """The end of ``clear_errors``: which refs have their values again, and which are lost."""

    kept: tuple[int, ...]
    lost: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Renew:
    """A value that ended with its pool is about to be written as a whole: memory for it, under the ref it had.

    It stays lost until one of OVERWRITES has reached it. `layouts` are those of every rank's piece.
    """

    ref: int
    mesh: int
    layouts: tuple[OutLayout, ...]


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The plan whose records end a save or a load: words are its number, the slot's word index and generation."""

    plan: int


@dataclass(frozen=True, slots=True)
class SaveState:
    """A save begins.

    Attributes:
        token: its number.
        executors: who has part in it; the first is the root, which puts the checkpoint in its place.
        kind: "safetensors", "dcp" or "torch".
        staged, target: the directory to write to, and what it is to replace.
        is_directory: whether the target is one; else it is the file of its name in `staged`.
        tree: the structure of the state (`checkpoint.tree`).
        layouts: of "safetensors", each file's layout and the numbers of the pieces in it, in order.
        tensors, pieces: of "dcp", dtype and shape of every tensor, and all pieces.
        text: the call as shown in errors.
    """

    token: int
    executors: tuple[int, ...]
    kind: str
    staged: str
    target: str
    is_directory: bool
    tree: Any
    layouts: tuple[tuple[Any, tuple[int, ...]], ...]
    tensors: dict[str, tuple[Any, tuple[int, ...]]]
    pieces: tuple[Any, ...]
    text: str


@dataclass(frozen=True, slots=True)
class SavePieces:
    """Executor → the pieces that it writes now (`checkpoint.pieces`)."""

    token: int
    pieces: dict[int, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class LoadTensors:
    """What `executors` are to read of a checkpoint when the load's record comes (`checkpoint.pieces`).

    `stamps` tell whether a file is still the one whose header the client has read (`checkpoint.files`).
    """

    token: int
    executors: tuple[int, ...]
    wanted: tuple[Any, ...]
    stamps: Any
    text: str


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """What an executor tells of a failure when it happens.

    `sequence` names the command that failed: the position of its record in the ring, in words since the pool began.
    `ordinal` is how many commands came before it, `mesh` the id of the mesh whose `rank` failed (0: of none).
    """

    sequence: int
    executor: int
    rank: int | None
    told: Told
    traceback: str
    text: str
    mesh: int = 0
    pid: int = 0
    ordinal: int = 0


@dataclass(frozen=True, slots=True)
class Cause:
    """Command `sequence` went wrong because its input had: blame `cause`."""

    sequence: int
    cause: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """The last value that was poisoned because command `sequence` failed is gone from this executor."""

    sequence: int


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The fetch into `slot` (its word index), in its use `generation`, met a value that command `sequence` failed
    to make."""

    slot: int
    generation: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a command that asked for one, under the token it gave."""

    token: int
    value: Any


def encode(message: object) -> bytes:
    """`message` as bytes. Functions and classes of the user's own script travel by value."""
    try:
        return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        return cloudpickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def encode_function(function: object) -> bytes:
    """A user's function, always by value: `__main__` of an executor is not the user's script."""
    return cloudpickle.dumps(function, pickle.HIGHEST_PROTOCOL)


def decode(data: bytes | memoryview) -> Any:
    """The message that :func:`encode` made into `data`."""
    return pickle.loads(data)
