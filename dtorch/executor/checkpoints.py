"""What an executor writes of a checkpoint, and reads of one.

A save begins in the executor's loop: pieces go to the files in the order of the program, so they hold what was there
when it was asked for. What takes long is having them on disk (``fsync``). That is done by a thread of the executor's,
and the loop goes on. One executor, the *root*, waits until all have said that their part is on disk, writes what says
where everything is, and puts the checkpoint in its place (:mod:`dtorch.checkpoint.files`).

A load is read in the loop: what is issued behind it wants the values.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import dcp, files, safetensors
from ..checkpoint.pieces import Piece, Wanted, checksums
from ..checkpoint.reading import copy_overlap
from ..checkpoint.tree import decode
from ..errors import CheckpointError
from ..runtime.command import CheckpointPlan, FetchFailed, LoadTensors, SavePieces, SaveState
from ..runtime.ring import Notifier
from ..runtime.shared import DEAD, DONE, ERROR, SharedState
from .device import Device
from .failing import Failing
from .store import Poison, shards

__all__ = ["Checkpoints"]

# Bytes written at once.
_WRITE = 8 << 20


class _PoisonedError(Exception):
    """A tensor that is to be saved could not be computed."""

    def __init__(self, sequence: int) -> None:
        super().__init__(sequence)
        self.sequence = sequence


class _Save:
    """One save, as far as this executor has part in it.

    Attributes:
        error: why it has failed here, once it has.
        checks: piece -> the checksums of its blocks.
        items: piece -> file, offset, length and checksum of what ``torch.save`` made of it.
        values: tensor name -> the tensor, where they go to one file of torch's.
    """

    def __init__(self, message: SaveState) -> None:
        self.message = message
        self.error: BaseException | None = None
        self.checks: dict[int, tuple[int, ...]] = {}
        self.items: dict[int, tuple[str, int, int, int]] = {}
        self.values: dict[str, Tensor] = {}
        self.lock: int | None = None
        self._open: dict[str, int] = {}
        self.ends: dict[str, int] = {}

    def fd(self, file: str) -> int:
        """The file of that name, open to write to."""
        found = self._open.get(file)
        if found is None:
            where = os.path.join(self.message.staged, file)
            found = self._open[file] = os.open(where, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        return found

    def sync(self) -> None:
        """Have on disk what was written, and close the files."""
        for fd in self._open.values():
            os.fsync(fd)
        self.close()

    def close(self) -> None:
        """Close the files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def unlock(self) -> None:
        """Let go of the directory."""
        fd, self.lock = self.lock, None
        if fd is not None:
            os.close(fd)


class Checkpoints:
    """The saves and loads of one executor.

    Args:
        index: this executor's number in the pool.
        state: the pool's shared memory.
        store: ref → value.
        plans: plan id → what runs its records.
        mine: mesh id → the ranks on this executor.
        device: where values lie.
        failing: tells the client of failures.
    """

    def __init__(
        self,
        index: int,
        state: SharedState,
        store: dict[int, Any],
        plans: dict[int, Callable[[int], None]],
        mine: dict[int, tuple[int, ...]],
        device: Device,
        failing: Failing,
    ) -> None:
        self._index, self._control, self._words = index, state.control, state.ring_words
        self._store, self._plans, self._mine, self._device, self._failing = store, plans, mine, device, failing
        self._notifier = Notifier(state)
        self._saves: dict[int, _Save] = {}
        self._loads: dict[int, LoadTensors] = {}
        self._jobs: queue.SimpleQueue[tuple[_Save, int, int, int]] | None = None
        self.handlers: dict[type, Callable[[Any], None]] = {
            CheckpointPlan: self._define,
            SaveState: self._begin,
            SavePieces: self._write_pieces,
            LoadTensors: self._remember,
        }

    def _define(self, m: CheckpointPlan) -> None:
        self._plans[m.plan] = self._run

    def _run(self, p: int) -> None:
        """A record: the save or load of that number ends here."""
        token, base, generation = self._words[p + 1], self._words[p + 2], self._words[p + 3]
        sequence = self._failing.sequence(p)
        save, load = self._saves.pop(token, None), self._loads.pop(token, None)
        if save is not None:
            if self._jobs is None:
                self._jobs = queue.SimpleQueue()
                threading.Thread(target=self._finish_all, args=(self._jobs,), daemon=True, name="checkpoints").start()
            self._jobs.put((save, base, generation, sequence))
        elif load is not None:
            error: BaseException | None = None
            try:
                self._load(load)
            except Exception as failure:
                error = failure
                for wanted in load.wanted:
                    if self._mine.get(wanted.mesh):
                        self._store[wanted.ref] = self._failing.poisoned(sequence)
            self._answer(error, base, generation, sequence, load.text)

    def _answer(self, error: BaseException | None, base: int, generation: int, sequence: int, text: str) -> None:
        """Tell the client how it ended."""
        if error is not None:
            if isinstance(error, _PoisonedError):
                sequence = error.sequence
            else:
                self._failing.report(sequence, _as_checkpoint_error(error, text), None, 0, text)
            self._failing.tell(FetchFailed(base, generation, sequence))
        self._control[base + self._index] = generation << 2 | (DONE if error is None else ERROR)
        self._notifier.ring()

    # -- saving: in the loop ------------------------------------------------------------------------------------

    def _begin(self, m: SaveState) -> None:
        if self._index not in m.executors:
            return
        save = self._saves[m.token] = _Save(m)
        if self._index == m.executors[0]:
            # Held until the end: whoever cleans up after a dead client must not take this for a leftover.
            try:
                save.lock = files.lock(m.staged)
            except OSError as error:
                save.error = error
            else:
                if save.lock is None:
                    save.error = CheckpointError(f"{m.text}: its directory {m.staged!r} is gone")

    def _write_pieces(self, m: SavePieces) -> None:
        save = self._saves.get(m.token)
        if save is None or save.error is not None:
            return
        try:
            for piece in m.pieces.get(self._index, ()):
                self._write(save, piece)
        except Exception as error:
            save.error = error

    def _write(self, save: _Save, piece: Piece) -> None:
        value = self._failing.value(piece.ref)
        if type(value) is Poison:
            raise _PoisonedError(value.sequence)
        local = shards(value)[self._mine[piece.mesh].index(piece.rank)]
        local = local.to("cpu").resolve_conj().resolve_neg().contiguous()
        kind = save.message.kind
        if kind == "torch":
            save.values[piece.name] = local.clone()  # pickled later, when the program may have written to it
        elif kind == "dcp":
            if local.untyped_storage().nbytes() != local.nbytes:
                local = local.clone()
            buffer = io.BytesIO()
            torch.save(local, buffer)
            data = buffer.getbuffer()
            offset = save.ends.get(piece.file, 0)
            _write_at(save.fd(piece.file), data, offset)
            save.ends[piece.file] = offset + len(data)
            save.items[piece.number] = (piece.file, offset, len(data), zlib.crc32(data))
        else:
            raw: Any = local.reshape(-1).view(torch.uint8).numpy()
            data = memoryview(raw)
            save.checks[piece.number] = checksums(data)
            _write_at(save.fd(piece.file), data, piece.offset)

    # -- saving: in the thread ----------------------------------------------------------------------------------

    def _finish_all(self, jobs: queue.SimpleQueue[tuple[_Save, int, int, int]]) -> None:
        while True:
            save, base, generation, sequence = jobs.get()
            error: BaseException | None = None
            try:
                self._finish(save, base, generation)
            except Exception as failure:
                error = failure
            save.close()
            save.unlock()
            self._answer(error, base, generation, sequence, save.message.text)

    def _finish(self, save: _Save, base: int, generation: int) -> None:
        m = save.message
        if self._index != m.executors[0]:
            if save.error is not None:
                raise save.error
            save.sync()
            part = {"checks": save.checks, "items": save.items}
            with open(_part(m.staged, self._index), "w") as file:
                json.dump(part, file)
            return
        try:
            failed = [e for e in m.executors[1:] if not self._wait_for(e, base, generation)]
            if save.error is not None:
                raise save.error
            if not failed:
                save.sync()
                self._describe(save)
                files.commit(m.staged, m.target, is_directory=m.is_directory)
                return
        except BaseException:
            files.remove(m.staged)
            raise
        files.remove(m.staged)  # whoever failed says why

    def _wait_for(self, executor: int, base: int, generation: int) -> bool:
        """Wait until `executor` has its part on disk; whether it has."""
        pause = 0.0001
        while (word := self._control[base + executor]) <= generation << 2:
            if self._control[DEAD]:
                raise CheckpointError("an executor has died meanwhile")
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        return word == generation << 2 | DONE

    def _describe(self, save: _Save) -> None:
        """Write what says where everything is, all pieces being on disk."""
        m = save.message
        for executor in m.executors[1:]:
            part = _part(m.staged, executor)
            with open(part) as file:
                read = json.load(file)
            save.checks.update({int(n): tuple(c) for n, c in read["checks"].items()})
            save.items.update({int(n): tuple(i) for n, i in read["items"].items()})
            os.unlink(part)
        written: list[str] = []
        if m.kind == "torch":
            written = [os.path.basename(m.target)]
            with open(os.path.join(m.staged, written[0]), "wb") as file:
                torch.save(decode(m.tree, lambda node: _tensor(node, save.values)), file)
        elif m.kind == "dcp":
            values = f"__{self._index}_1.distcp"
            written = dcp.write_metadata(m.staged, m.tree, m.tensors, m.pieces, save.items, values)
        else:
            for layout, numbers in m.layouts:
                written.append(layout.name)
                checks = [c for n in numbers for c in save.checks[n]]
                with open(os.open(os.path.join(m.staged, layout.name), os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
                    _write_at(file.fileno(), memoryview(layout.render(checks)), 0)
                    os.ftruncate(file.fileno(), layout.size)
            if m.is_directory:
                written.append(safetensors.INDEX)
                with open(os.path.join(m.staged, safetensors.INDEX), "wb") as file:
                    file.write(safetensors.index([layout for layout, _ in m.layouts], m.tree))
        for name in written:
            fd = os.open(os.path.join(m.staged, name), os.O_RDWR)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    # -- loading ------------------------------------------------------------------------------------------------

    def _remember(self, m: LoadTensors) -> None:
        if self._index in m.executors:
            self._loads[m.token] = m

    def _load(self, m: LoadTensors) -> None:
        with contextlib.ExitStack() as stack:
            opened: dict[str, int] = {}

            def fd(path: str) -> int:
                if path not in opened:
                    opened[path] = found = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    stack.callback(os.close, found)
                    if files.stamp(found) != m.stamps.get(path):
                        # Its header says nothing of this one's bytes, and there may be no checksums to tell.
                        raise CheckpointError(f"{path}: replaced while it was read")
                return opened[path]

            for wanted in m.wanted:
                ranks = self._mine.get(wanted.mesh, ())
                if ranks:
                    made = self._read(wanted, ranks, fd)
                    self._store[wanted.ref] = made[0] if len(made) == 1 else made

    def _read(self, wanted: Wanted, ranks: tuple[int, ...], fd: Callable[[str], int]) -> list[Tensor]:
        out: list[Tensor] = []
        known: dict[Any, Tensor] = {}
        for rank in ranks:
            region, stride = wanted.regions[rank], wanted.strides[rank]
            if region in known:
                out.append(known[region].clone())
                continue
            shape = tuple(n for _, n in region)
            local = torch.empty(shape, dtype=wanted.dtype)
            if stride is not None:
                local = torch.empty_strided(shape, stride, dtype=wanted.dtype)
            done = sum(copy_overlap(local, region, chunk, fd) for chunk in wanted.chunks)
            if done != local.numel():
                raise CheckpointError(f"{wanted.name!r}: its pieces in the checkpoint are not the whole of it")
            known[region] = self._device.place(local)
            out.append(known[region])
        return out


def _as_checkpoint_error(error: BaseException, text: str) -> BaseException:
    """`error` in one line, where it is of a file and not of a program."""
    found = files.of_system(error)
    if found is None:
        return error
    where = f" ({found.filename})" if found.filename else ""
    return CheckpointError(f"{text}: {files.said(found)}{where}")


def _part(directory: str, executor: int) -> str:
    return os.path.join(directory, f"part-{executor}.json")


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done : done + _WRITE], offset + done)


def _tensor(node: dict[str, Any], values: dict[str, Tensor]) -> Tensor:
    t = values[node["tensor"]]
    if t.is_inference():
        # What torch saves must be loadable in any mode.
        with torch.inference_mode(False):
            t = values[node["tensor"]] = t.clone()
    if node.get("parameter"):
        return torch.nn.Parameter(t, bool(node.get("grad")))
    return t.detach().requires_grad_() if node.get("grad") else t
