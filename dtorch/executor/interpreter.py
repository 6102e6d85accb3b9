"""Command type → what an executor does about it.

:class:`Interpreter` holds the plans and the store. Plans are functions of a record's position in the ring
(`compiler`); a failure leaves them as an ordinary exception and is turned into poison by `failing`, away from the
hot path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..runtime import command
from ..runtime.command import (
    CallPlan,
    ClearErrors,
    DefineMesh,
    DefineOperator,
    DropPlans,
    FetchPlan,
    LocalCall,
    MakeLocals,
    PickPlan,
    RedistributePlan,
    Renew,
    Reply,
    Seed,
    SendRandom,
    Settle,
    SyncRandom,
    Threads,
    UploadPlan,
)
from ..runtime.shared import DONE, EXECUTOR_CONTROL, EXECUTOR_PLAN, SharedState, executor_line
from . import operators, redistribution
from .checkpoints import Checkpoints
from .compiler import compile_call, compile_plan, same_draw, same_stride
from .device import CPU, Device, DeviceError
from .failing import Failing, PeerFailedError, first_poison, one_of
from .forks import run_here
from .store import Poison, shards
from .transfers import Transfers

__all__ = ["Interpreter"]

Run = Callable[[int], None]


class Interpreter:
    """One executor's plans, values and answers.

    Args:
        index: this executor's number in the pool.
        state: the shared memory.
        send: hands bytes to the client's reply ring.
        comm: collectives with other executors.
        device: where values lie.
        transfers: looks after copies between the device and the arena, where those are asynchronous.
    """

    def __init__(
        self,
        index: int,
        state: SharedState,
        send: Callable[[bytes], None],
        comm: Any,
        device: Device | None = None,
        transfers: Transfers | None = None,
    ) -> None:
        self.index, self.state, self.send, self.comm = index, state, send, comm
        self.device, self.transfers = device or CPU(), transfers
        self.plans: dict[int, Run] = {}
        self.store: dict[int, Any] = {}
        # plan id -> the message that defined it: what failures need to know
        self.messages: dict[int, Any] = {}
        self.mine: dict[int, tuple[int, ...]] = {}
        self.sequence = 0  # the control message being acted on: its position in the ring
        self._rank: int | None = None  # whose function runs, of those that from_local was given
        self.failing = Failing(
            index, state, send, self.store, self.messages, self.mine, lambda plan, p: self.plans[plan](p), self.device
        )
        self.failed = self.failing.failed
        self.words, self.ints, self.doubles = state.ring_words, state.ring_ints, state.ring_doubles
        checkpoints = Checkpoints(index, state, self.store, self.plans, self.mine, self.device, self.failing)
        self._handlers: dict[type, Callable[[Any], None]] = {
            DefineMesh: self._mesh,
            DefineOperator: operators.define,
            CallPlan: self._call,
            DropPlans: self._drop,
            RedistributePlan: self._redistribute,
            UploadPlan: self._upload,
            FetchPlan: self._fetch,
            PickPlan: self._pick,
            MakeLocals: self._make_locals,
            Seed: self._seed,
            SyncRandom: self._sync_random,
            SendRandom: self._send_random,
            Threads: self._threads,
            ClearErrors: self.failing.clear,
            Renew: self.failing.renew,
            Settle: self.failing.settle,
            **checkpoints.handlers,
        }

    # -- records ------------------------------------------------------------------------------------------------

    def free(self, p: int, end: int) -> None:
        """Drop the refs in words `p` to `end`."""
        drop = self.store.pop
        for ref in self.words[p:end]:
            drop(ref, None)

    def control(self, payload: memoryview) -> None:
        """Act on a control message.

        Raises:
            DeviceError: it cannot be read. Whoever waits for what it defines would wait for ever.
        """
        # For the watchdog, which may find this executor in it for long.
        self.state.control[executor_line(self.index) + EXECUTOR_CONTROL] = self.sequence
        try:
            message = command.decode(payload)
            act = self._handlers[type(message)]
        except Exception as error:
            raise DeviceError(f"a message of the client cannot be read: {type(error).__name__}: {error}") from error
        try:
            act(message)
        except Exception as error:
            plan = getattr(message, "plan", None)
            if plan is None:
                raise
            self._cannot_run(message, plan, error)

    def _cannot_run(self, message: Any, plan: int, error: Exception) -> None:
        """A plan could not be defined: every record of it fails."""

        def run(p: int) -> None:
            raise error

        self.messages[plan], self.plans[plan] = message, run

    def ranks_now(self) -> tuple[int, ...]:
        """The ranks whose command runs now: one where that can be told, all of this executor in its mesh where not."""
        if self._rank is not None:
            return (self._rank,)
        message = self.messages.get(self.state.control[executor_line(self.index) + EXECUTOR_PLAN])
        mine = self.mine.get(getattr(message, "mesh", 0), ())
        return mine if len(mine) < 2 else one_of(mine)

    # -- definitions --------------------------------------------------------------------------------------------

    def _mesh(self, m: DefineMesh) -> None:
        self.mine[m.mesh] = tuple(r for r, host in enumerate(m.hosts) if host == self.index)

    def _drop(self, m: DropPlans) -> None:
        for plan in m.plans:
            self.plans.pop(plan, None)
            self.messages.pop(plan, None)

    def _call(self, m: CallPlan) -> None:
        mine = self.mine.get(m.mesh, ())
        if not mine:
            return
        self.messages[m.plan] = m = replace(m, calls=tuple(map(self.device.translate, m.calls)))
        calls = [m.calls[m.which[r]] for r in mine]
        args = (self.store, self.words, self.ints, self.doubles, self.device)
        single = len(mine) == 1

        def first(p: int) -> None:
            # The first run checks what every run will make; the function it leaves behind checks nothing.
            fixes = self._first_run(m, calls, p, single)
            self.plans[m.plan] = compile_plan(m, calls, fixes, single, *args)

        self.plans[m.plan] = first

    def _first_run(self, m: CallPlan, calls: list[LocalCall], p: int, single: bool) -> list[tuple[bool, ...]]:
        outs, ins = self.failing.refs(m, p)
        base = p + 1 + len(outs) + len(ins)
        numbers = [(self.ints if k == "q" else self.doubles)[base + i] for i, k in enumerate(m.numbers)]
        values = [self.store[r] for r in ins]
        if any(type(v) is Poison for v in values):
            raise TypeError("a poisoned input")
        columns = [shards(v) for v in values]
        ranks_done: list[Any] = []
        fixes: list[tuple[bool, ...]] = []
        functions = [compile_call(call, m.inputs, len(m.numbers), None, m.draws, self.device) for call in calls]
        if m.draws and not single:
            functions = same_draw(functions, self.device)
        for k, call in enumerate(calls):
            made = functions[k](*(c[k] for c in columns), *numbers)
            if m.lists and len(made) != len(m.outputs):
                raise _unexpected(call, f"{len(made)} outputs", f"a list of {len(m.outputs)}")
            fix = tuple(self._check(m, call, i, made) for i in range(len(m.outputs)))
            ranks_done.append(made)
            fixes.append(fix)
        new = [i for i, n in enumerate(m.outputs) if n]
        for ref, i in zip(outs, new, strict=True):
            self.store[ref] = ranks_done[0][i] if single else [r[i] for r in ranks_done]
        return fixes

    def _check(self, m: CallPlan, call: LocalCall, i: int, made: list[Any]) -> bool:
        """Whether output `i` needs another memory order; it is then given it. Wrong shapes raise."""
        layout = call.outs[i]
        if layout is None or not m.outputs[i]:
            return False
        t = made[i]
        if tuple(t.shape) != tuple(layout[0]) or t.dtype != layout[2]:
            if self.device.may_differ(call, i):
                return False
            raise _unexpected(call, f"{t.dtype} {tuple(t.shape)}", f"{layout[2]} {tuple(layout[0])}")
        if same_stride(t, layout):
            return False
        made[i] = self.device.restride(t, layout)
        return True

    def _redistribute(self, m: RedistributePlan) -> None:
        programs = m.programs.get(self.index)
        if programs is None:
            return
        self.messages[m.plan] = m
        store, words, n = self.store, self.words, m.count
        source, target = self.mine.get(m.source, ()), self.mine.get(m.target, ())
        single = len(target) == 1
        failing, value = self.failing, self.failing.value
        run_many = self.device.here(redistribution.run_many)

        def tell(error: Exception, p: int) -> None:
            failing.failed_in_exchange(m, p, error)

        def run(p: int) -> None:
            values = [value(r) if source else [] for r in words[p + 1 + n : p + 1 + 2 * n]]
            bad = next((v for v in values if type(v) is Poison), None)
            if bad is not None:
                bad = first_poison(values) or bad
                failing.poisoned_move(p, words[p + 1 : p + 1 + n] if target else (), bad)
            parts = None if bad is not None else [shards(v) for v in values]
            results, failure = run_many(programs, parts, self.comm, False, tell, p)
            if failure:
                if bad is None:
                    if failure is True:
                        raise PeerFailedError
                    raise failure
            elif target:
                for ref, result in zip(words[p + 1 : p + 1 + n], results, strict=True):
                    store[ref] = result[0] if single else result

        self.plans[m.plan] = run

    def _arena(self, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: Any) -> torch.Tensor:
        count = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        flat = torch.frombuffer(self.state.arena_map, dtype=dtype, count=count, offset=offset)
        return flat.as_strided(shape, stride)

    def _upload(self, m: UploadPlan) -> None:
        mine = self.mine.get(m.mesh, ())
        if not mine:
            return
        self.messages[m.plan] = m
        if self.transfers is not None:
            self.plans[m.plan] = self.transfers.upload(m, mine, self.store)
            return
        store, words = self.store, self.words
        empty = 0 in m.shape
        single = len(mine) == 1

        def piece(src: torch.Tensor | None, rank: int) -> torch.Tensor:
            region, stride = m.regions[rank], m.strides[rank]
            shape = tuple(n for _, n in region) if m.pieces is None else m.pieces[rank]
            out = (
                torch.empty(shape, dtype=m.dtype)
                if stride is None
                else torch.empty_strided(shape, stride, dtype=m.dtype)
            )
            if src is not None and out.numel():
                for d, (start, n) in enumerate(region):
                    src = src.narrow(d, start, n)
                out.copy_(src.view(shape) if m.pieces is not None else src)
            return out

        def run(p: int) -> None:
            src = None if empty else self._arena(words[p + 2], m.shape, m.stride, m.dtype)
            made = [piece(src, r) for r in mine]
            store[words[p + 1]] = made[0] if single else made

        self.plans[m.plan] = run

    def _fetch(self, m: FetchPlan) -> None:
        mine = self.mine.get(m.mesh, ())
        # (index among this executor's ranks, region)
        jobs = [(mine.index(r), g) for r, g in zip(m.ranks, m.regions, strict=True) if r in mine]
        if not jobs:
            return
        self.messages[m.plan] = m
        if self.transfers is not None:
            self.plans[m.plan] = self.transfers.fetch(m, jobs, self.store, self.failing.fail_fetch)
            return
        store, words, control = self.store, self.words, self.state.control
        whole = len(jobs) == 1 and jobs[0][1] == tuple((0, n) for n in m.shape)
        copies = m.data and 0 not in m.shape
        index = self.index

        def run(p: int) -> None:
            value = store[words[p + 1]]
            if type(value) is Poison:
                self.failing.fail_fetch(p, value)
                return
            if copies:
                dst = self._arena(words[p + 4], m.shape, m.stride, m.dtype)
                if whole and type(value) is not list:
                    dst.copy_(value)
                else:
                    local = shards(value)
                    for k, region in jobs:
                        view = dst
                        for d, (start, n) in enumerate(region):
                            view = view.narrow(d, start, n)
                        view.copy_(local[k])
            control[words[p + 2] + index] = words[p + 3] << 2 | DONE

        self.plans[m.plan] = run

    def _pick(self, m: PickPlan) -> None:
        mine = self.mine.get(m.mesh, ())
        if m.rank not in mine:
            return
        self.messages[m.plan] = m
        store, words, k = self.store, self.words, mine.index(m.rank)

        def run(p: int) -> None:
            value = store[words[p + 2]]
            if type(value) is Poison:
                raise TypeError("a poisoned input")
            # A copy: the piece handed out is a value of its own, not a window into the shard.
            store[words[p + 1]] = shards(value)[k].clone()

        self.plans[m.plan] = run

    # -- immediate commands -------------------------------------------------------------------------------------

    def _make_locals(self, m: MakeLocals) -> None:
        mine = self.mine.get(m.mesh, ())
        if not mine:
            return
        made = []
        failed = False
        for rank in mine:
            self._rank = rank
            try:
                t = run_here(command.decode(m.function), rank)
                if not isinstance(t, torch.Tensor):
                    raise TypeError(f"from_local: the function gave {type(t).__name__} for rank {rank}, not a tensor")
                if m.shapes is not None and (tuple(t.shape) != m.shapes[rank] or t.dtype != m.dtype):
                    raise ValueError(
                        f"from_local: rank {rank} made {t.dtype} {tuple(t.shape)} where {m.dtype} {m.shapes[rank]} "
                        "was expected"
                    )
                made.append(self.device.place(t.detach().clone(memory_format=torch.contiguous_format)))
            except BaseException as error:
                if self.failing.ending():
                    raise
                # The other ranks run all the same, as they would on executors of their own.
                self.failing.report(self.sequence, error, rank, m.mesh, m.text)
                failed = True
            finally:
                self._rank = None
        if failed:
            self.store[m.ref] = self.failing.poisoned(self.sequence)
            return
        self.store[m.ref] = made[0] if len(mine) == 1 else made

    def _seed(self, m: Seed) -> None:
        if m.members is None or self.index in m.members:
            torch.manual_seed(m.seed)

    def _set_random(self, state: bytes) -> None:
        self.device.set_random_state(torch.frombuffer(bytearray(state), dtype=torch.uint8).clone())

    def _sync_random(self, m: SyncRandom) -> None:
        if m.state is not None:
            if self.index in m.members:
                self._set_random(m.state)
            return
        if self.index not in m.members:
            return
        group = self.comm.group(m.members, m.region)
        mine = self.device.random_state().numpy().tobytes() if self.index == m.root else None
        got = group.broadcast_bytes(m.members.index(m.root), mine)
        if self.index != m.root:
            self._set_random(got)

    def _send_random(self, m: SendRandom) -> None:
        if self.index == m.root:
            self.send(command.encode(Reply(m.token, self.device.random_state().numpy().tobytes())))

    def _threads(self, m: Threads) -> None:
        self.device.set_threads(m.count)


def _unexpected(call: LocalCall, made: str, expected: str) -> RuntimeError:
    """The error of a call whose outputs are not what the client was told they would be."""
    text = f"{call.func} made {made} where {expected} was expected; "
    if call.func.partition(".")[0] in operators.OURS:
        return RuntimeError(text + "this is a fault in dtorch's rule for the operator")
    return RuntimeError(
        text + "that is what its register_fake says, cut by its sharding rule where inputs are sharded. Make "
        "register_fake say what the function returns; dtorch.testing.check_sharding compares the two"
    )
