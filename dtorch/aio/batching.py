"""``@batched``: one call of a function for many callers, each of whom gets the rows it gave.

    @dtorch.aio.batched(max_size=32, max_delay=0.004)
    async def embed(tokens):
        return model(tokens).mean(dim=1)

    vectors = await embed(tokens)           # plain torch in, plain torch out, whoever else called meanwhile

:mod:`.rows` says which calls may share a batch and builds it, :mod:`.queueing` says when it is sent; here is what the
program sees of both.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, cast

import anyio
import anyio.lowlevel
import torch
from torch.utils import _pytree as pytree

from .._tensor import Tensor
from ..future import TensorFuture
from ..runtime import modes
from .queueing import Queue
from .requests import BatchMetrics, Call
from .rows import Pack, check_lengths, default_lengths, join, next_size, pack, padding_of, rejoin, split

__all__ = ["BatchMetrics", "Batched", "batched", "close_queues"]

P = ParamSpec("P")

_CLOSING = 5.0  # seconds that close_queues() waits for functions that were cancelled


class _State:
    """Of a function, or of one instance that a batched method was called of."""

    __slots__ = ("__weakref__", "metrics")

    def __init__(self) -> None:
        self.metrics = BatchMetrics()


_queues: anyio.lowlevel.RunVar[weakref.WeakKeyDictionary[_State, Queue]] = anyio.lowlevel.RunVar("dtorch_queues")


class _Batching:
    """A function, and how its calls are batched. The arguments are those of :func:`batched`."""

    def __init__(
        self,
        function: Callable[..., Any],
        max_size: int,
        max_delay: float,
        pad: Any,
        max_queue: int,
        unpad: Any,
        pad_lengths: Sequence[int] | None,
    ) -> None:
        if not callable(function):
            raise TypeError(f"batched() decorates a function, not {function!r}.\n  Write:  @batched(max_size=32)")
        self.function = function
        self.signature = inspect.signature(function)
        self.name = getattr(function, "__qualname__", type(function).__qualname__).rpartition("<locals>.")[2]
        self.max_size, self.max_delay, self.max_queue = max_size, max_delay, max_queue
        self._padding, self._unpad = padding_of(pad), unpad
        self._lengths = tuple(sorted(pad_lengths)) if pad_lengths is not None else default_lengths()
        # Powers of two, so that ten plans serve all batches of up to 512 rows.
        self._sizes = (0, *(1 << i for i in range((max_size - 1).bit_length())), max_size)

    def pack(self, own: tuple[Any, ...], args: Any, kwargs: Any, call: Call) -> list[Pack]:
        """The arguments of one call, in parts of at most `max_size` rows; `own` is the instance, if it has one."""
        try:
            bound = self.signature.bind(*own, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}() {error}") from None
        bound.apply_defaults()
        arguments = dict(list(bound.arguments.items())[len(own) :])
        state = (tuple(map(id, own)), call.modes, _ambient(call.context))
        return pack(self.name, arguments, self._padding, self._lengths, state).parts(self.max_size)

    def call(self, own: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
        """Call the function with arguments by name."""
        names = list(self.signature.parameters)[: len(own)]
        bound = inspect.BoundArguments(self.signature, {**dict(zip(names, own, strict=True)), **arguments})  # type: ignore[arg-type]
        return self.function(*bound.args, **bound.kwargs)

    async def answer(self, call: Call, packs: Sequence[Pack], metrics: BatchMetrics) -> list[Any]:
        """The result of each of `packs`, of one call of the function."""
        rows = sum(p.rows for p in packs)
        size = next_size(rows, self._sizes)
        metrics.add(batches=1, rows=rows, padding_rows=size - rows)
        arguments = join(packs, size)
        result = await modes.carry(_plain(functools.partial(call.function, arguments)), call.modes)
        return split(self.name, result, packs, size, self._unpad)


class Batched(Generic[P]):
    """A function whose concurrent calls share batches; what :func:`batched` makes.

    It has the signature of the function, and is a method where the function is one. ``__wrapped__`` is the function.

    Attributes:
        metrics: what became of its calls; of an instance's own calls where it is a method.
    """

    def __init__(
        self, batching: _Batching, state: _State | None = None, own: tuple[Any, ...] = (), parent: Any = None
    ) -> None:
        functools.update_wrapper(self, batching.function)
        self._batching, self._state, self._own = batching, state or _State(), own
        self._instances: dict[int, tuple[weakref.ref[Any], _State]] = {}
        if own:
            first, *others = batching.signature.parameters.values()
            del first
            self.__signature__ = batching.signature.replace(parameters=others)
        if mark := getattr(inspect, "markcoroutinefunction", None):  # Python 3.12
            mark(self)

    @property
    def metrics(self) -> BatchMetrics:
        return self._state.metrics

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The rows of this call, as plain torch tensors.

        Raises:
            OverloadedError: `max_queue` requests wait already; ``retry_after`` says when to come again.
            RuntimeError: the function called itself; :meth:`unbatched` is what it may call.
            PoolError: ``aio.open()`` was left, or the event loop ended, before the batch was answered.
            Exception: what the function raised for the batch of this call.
        """
        call = Call(functools.partial(self._batching.call, self._own), contextvars.copy_context(), modes.current())
        queue = self._queue()
        queue.enter(call.context)
        packs = self._batching.pack(self._own, args, kwargs, call)
        metrics = self.metrics
        try:
            requests = queue.admit(packs, call)
        except Exception:
            metrics.add(requests=1, refused=1)
            raise
        metrics.add(requests=1, pending=1)
        outcome = "cancelled"
        suspended = modes.suspend()
        try:
            for request in requests:
                await request.done.wait()
                if request.error is not None:
                    break
            outcome = "failed"
            results = [request.outcome() for request in requests if request.done.is_set()]
            outcome = "completed"
            return rejoin(results)
        finally:
            modes.resume(suspended)
            # Those that were not sent yet, where this call was cancelled or a part of it has failed.
            for request in requests:
                queue.withdraw(request)
            metrics.add(pending=-1, **{outcome: 1})

    async def unbatched(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The same for this call alone, without queue, padding or limits; as plain torch tensors.

        Also what the function itself calls where it needs its own results for other arguments.
        """
        given, named = pytree.tree_map(_copied, (args, kwargs))
        result = await _plain(functools.partial(self._batching.function, *self._own, *given, **named))
        return pytree.tree_map(_copied, result)

    def __get__(self, instance: Any, owner: type | None = None) -> Batched[...]:
        """The method of `instance`; each has a queue and metrics of its own."""
        if instance is None:
            return self
        return Batched(self._batching, self._state_of(instance), (instance,))

    def __repr__(self) -> str:
        return f"<batched {self._batching.name}{self._batching.signature}, max_size={self._batching.max_size}>"

    def _state_of(self, instance: Any) -> _State:
        key = id(instance)
        found = self._instances.get(key)
        if found is not None and found[0]() is instance:
            return found[1]
        try:
            reference = weakref.ref(instance, lambda gone: self._forget(key, gone))
        except TypeError:  # it has __slots__: requests of such instances wait in one queue, each in its own batches
            return self._state
        state = _State()
        self._instances[key] = reference, state
        return state

    def _forget(self, key: int, gone: weakref.ref[Any]) -> None:
        if (found := self._instances.get(key)) is not None and found[0] is gone:
            del self._instances[key]

    def _queue(self) -> Queue:
        here = _queues.get(None)
        if here is None:
            _queues.set(here := weakref.WeakKeyDictionary())
        queue = here.get(self._state)
        if queue is None:
            queue = here[self._state] = Queue(self._batching, self._state.metrics)
        return queue


def batched(
    max_size: int = 32,
    max_delay: float = 0.004,
    pad: Any = None,
    max_queue: int = 1024,
    *,
    unpad: Any = None,
    pad_lengths: Sequence[int] | None = None,
) -> Callable[[Callable[P, Any]], Batched[P]]:
    """Let concurrent calls of a function share its work: ``await f(x)`` is one of the rows that ``f`` is called with.

    The function, ``def`` or ``async def``, takes plain torch tensors whose dim 0 is the batch, alone or in tuples,
    lists and dicts, and returns dtorch tensors, plain tensors or futures of tensors, alone or in the same, with the
    same dim 0. It must treat each row by itself. A plain ``def`` runs in the event loop, as does what an ``async def``
    computes between its awaits: issuing dtorch operators takes microseconds, but work of its own, as of plain torch,
    holds up everybody; give that to a thread, in an ``async def``. It must not call itself, alone or by way of another
    batched function, for its batch would wait for itself: that raises, and ``f.unbatched(...)`` is what it may call.

    Callers give any number of rows and get their own, as plain torch
    tensors without gradients. Arguments that are no tensors are the same throughout a batch, and so are dtypes, the
    shapes of rows, default mesh, grad mode, autocast and whatever else dtorch keeps per task: calls that differ in
    these go to different batches.

    A call that finds nothing running is sent at once. While a batch runs, calls collect, and go when it ends; or
    behind it, as soon as there are `max_size` rows, or the oldest call has waited for `max_delay`. At most two
    batches are under way. Whoever comes first is sent first. A batch runs with the context variables of its oldest
    call.

    An error reaches the callers of its batch, an exception of their own each. A caller that is cancelled before its
    batch is sent is not in it; later, it harms nobody. A batch whose callers have all gone is cancelled; let the
    function end then, for no more than two are under way.

    Arguments and results are copies: the function may write to what it is given and return what it keeps.

    Args:
        max_size: rows in a batch. Batches have 1, 2, 4, … or `max_size` rows, so that a plan for each is nothing;
            what is missing are copies of the last row, which nobody gets. A call with more rows goes in parts.
        max_delay: seconds a call waits at most for a second batch to be sent behind the one that runs.
        pad: lets calls of different lengths share batches: the value to make tensors of two or more dims longer with
            in dim 1; or ``(value, dims)``; or a dict of either by name of the argument, or of a dict's key, for
            these alone. A call is padded to the next of `pad_lengths`, whoever shares its batch, so its values do not
            depend on others. The function must not let padding change a result: give it a mask.
        max_queue: calls that wait in an event loop before more are refused.
        unpad: the dim of results that has the padded length and is cut back to the call's own (of the first padded
            argument, in its first padded dim): an int for all results, or one or None for each, in a tuple, list or
            dict like the result. A size alone cannot tell: nothing is cut unless it is said.
        pad_lengths: what lengths are padded to; the default is 8, 16, 32, and so on. End it with the longest the
            model takes, and a longer call is refused.

    Raises:
        TypeError, ValueError: an argument is none of these.
    """
    if callable(max_size):
        name = getattr(max_size, "__name__", "f")
        raise TypeError(f"@batched above {name} takes its options in parentheses, even none.\n  Write:  @batched()")
    for option, value in (("max_size", max_size), ("max_queue", max_queue)):
        if type(value) is not int or value < 1:
            raise ValueError(f"batched({option}={value!r}): expected a whole number of at least 1")
    if not isinstance(cast("Any", max_delay), (int, float)) or not max_delay >= 0:
        raise ValueError(f"batched(max_delay={max_delay!r}): expected seconds, at least 0")
    if pad is None and (unpad is not None or pad_lengths is not None):
        raise ValueError("batched(): unpad= and pad_lengths= say what becomes of padding; give pad= as well")
    padding_of(pad)
    if pad_lengths is not None:
        check_lengths(pad_lengths)

    def decorate(function: Callable[P, Any]) -> Batched[P]:
        return Batched(_Batching(function, max_size, max_delay, pad, max_queue, unpad, pad_lengths))

    return decorate


async def close_queues() -> None:
    """Fail what waits in the calling event loop, with a PoolError, and end what is under way; waits for that."""
    with anyio.move_on_after(_CLOSING, shield=True):
        for ended in [queue.close() for queue in list((_queues.get(None) or {}).values())]:
            if ended is not None:
                await ended.wait()


async def _plain(call: Callable[[], Any]) -> Any:
    """What `call` returns, awaited where it is to be, with plain tensors for all dtorch tensors and futures in it."""
    result = call()
    if inspect.isawaitable(result) and not isinstance(result, (torch.Tensor, TensorFuture)):
        result = await result
    leaves, tree = pytree.tree_flatten(result)
    # All are asked for before the first is awaited.
    pending = [leaf.to_torch_async() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    if any(isinstance(leaf, TensorFuture) for leaf in pending):
        # While these are awaited the function may be called for another batch, and write to a tensor it has returned.
        pending = [_copied(leaf) for leaf in pending]
    values: list[Any] = []
    error: Exception | None = None
    for leaf in pending:
        try:
            values.append(await leaf if isinstance(leaf, TensorFuture) else leaf)
        except Exception as raised:
            # The first one is told; the others are asked for, or they would be reported as lost.
            error = error or raised
    if error is not None:
        raise error
    return pytree.tree_unflatten([v.detach() if isinstance(v, torch.Tensor) else v for v in values], tree)


def _copied(leaf: Any) -> Any:
    """`leaf`, or a copy of it if it is a plain tensor."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Tensor) else leaf


def _ambient(context: contextvars.Context) -> tuple[Any, ...]:
    """What dtorch keeps in `context`: default mesh, dtype and the like."""
    held: list[Any] = []
    for variable, value in context.items():
        if variable.name.startswith("dtorch_"):
            try:
                hash(value)
            except TypeError:
                value = id(value)  # kept alive by the context, as long as the request waits
            held.append((variable, value))
    return tuple(sorted(held, key=lambda pair: pair[0].name))
