"""Putting a checkpoint in its place, whole or not at all.

A save writes into a directory of its own beside the target, ``.NAME.TOKEN.partial``, and puts it in the target's
place when every byte is on disk. Two directories change places in one step of the kernel (``renameat2`` with
RENAME_EXCHANGE), so a crash at any moment leaves the old checkpoint or the new one under the target's name. Where a
file system cannot do that, the old one stands aside as ``.NAME.TOKEN.previous`` for a moment, and whoever looks for
the target finds it there.

What a crash leaves behind is removed by the next save to the same target. A directory in use is locked (``flock``) by
those who write to it, and the kernel lets go of the lock when they die.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator

from ..errors import CheckpointError

__all__ = [
    "Staging", "commit", "locate", "lock", "of_system", "remove", "said", "stage", "stamp", "sweep", "sync_directory",
]  # fmt: skip

# Files that a save may replace, by the end of their names. Others in the directory are the user's, and stay.
_OURS = (".safetensors", ".safetensors.index.json", ".distcp", ".metadata", "dtorch.json")
# What says that a directory is a checkpoint.
_MARKS = (".safetensors.index.json", ".safetensors", ".metadata")

_RENAME_EXCHANGE, _AT_FDCWD = 2, -100
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


class Staging:
    """The directory that a save writes to, locked.

    Attributes:
        path: of the directory.
        target: what it will replace, with symbolic links followed.
        is_directory: whether the target is a directory; else it is a file of the target's name in `path`.
    """

    def __init__(self, path: str, target: str, is_directory: bool, fd: int) -> None:
        self.path, self.target, self.is_directory, self._fd = path, target, is_directory, fd

    def close(self) -> None:
        """Let go of the lock; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def discard(self) -> None:
        """Remove the directory: nothing has been saved."""
        remove(self.path)
        self.close()

    def __del__(self) -> None:
        self.close()


def said(error: OSError) -> str:
    """What the system says of `error`, without the path."""
    return error.strerror or str(error)


def of_system(error: BaseException) -> OSError | None:
    """The error of the system behind `error`, if there is one: torch raises others while it cleans up after it."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found


def stage(path: str | os.PathLike[str], *, is_directory: bool) -> Staging:
    """A fresh directory beside `path`, to write to what is to stand there.

    Raises:
        CheckpointError: a save to `path` cannot succeed: it is a file where a directory is to be, or the reverse, or
            a directory that holds no checkpoint; its parent is missing or may not be written.
    """
    given = os.fspath(path)
    target = os.path.realpath(given)
    parent, name = os.path.split(target)
    if not name:
        raise CheckpointError(f"dtorch.save: {given!r} is the root directory")
    _recover(target)
    if is_directory:
        _check_replaceable(given, target)
    elif os.path.isdir(target):
        raise CheckpointError(f"dtorch.save: {given!r} is a directory, and a file is to be written there")
    try:
        while True:
            token = os.urandom(4).hex()
            made = os.path.join(parent, f"{_prefix(name)}{token}.partial")
            os.mkdir(made)
            fd = lock(made)
            if fd is not None:
                return Staging(made, target, is_directory, fd)
    except OSError as error:
        if not os.path.isdir(parent) and isinstance(error, FileNotFoundError):
            raise CheckpointError(f"dtorch.save: {given!r}: the directory {parent!r} does not exist") from None
        raise CheckpointError(f"dtorch.save: {given!r} cannot be written: {said(error)}") from None


def lock(directory: str) -> int | None:
    """Say that `directory` is in use until the descriptor is closed; None if someone is about to remove it."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        # Where a file system has no locks, nobody can take this for a leftover, either.
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        if os.path.samestat(os.fstat(fd), os.stat(directory)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None


def commit(staged: str, target: str, *, is_directory: bool) -> None:
    """Put what was written to `staged` in the place of `target`, in one step, and see it on disk.

    Raises:
        OSError: it could not be done; the target is as it was.
    """
    parent, name = os.path.split(target)
    if not is_directory:
        sync_directory(staged)
        os.replace(os.path.join(staged, name), target)
    elif not os.path.lexists(target):
        sync_directory(staged)
        os.rename(staged, target)
    else:
        _keep_others(target, staged)
        sync_directory(staged)
        try:
            _exchange(staged, target)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            aside = staged.removesuffix(".partial") + ".previous"
            os.rename(target, aside)
            os.rename(staged, target)
    sync_directory(parent)
    sweep(target)
    shutil.rmtree(staged, ignore_errors=True)  # what was the target until now


def remove(staged: str) -> None:
    """Remove the directory of a save that has come to nothing."""
    shutil.rmtree(staged, ignore_errors=True)


def sweep(target: str) -> None:
    """Remove what saves to `target` that came to no end have left; never what is still being written."""
    parent, name = os.path.split(target)
    for entry in _beside(parent, name):
        if entry.endswith(".previous") and os.path.lexists(target):
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.endswith(".partial"):
            with contextlib.suppress(OSError):
                fd = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(entry, ignore_errors=True)
                finally:
                    os.close(fd)


def locate(path: str | os.PathLike[str]) -> str:
    """Where the checkpoint `path` is, for any process: there, or aside where a crash has cut its replacement short.

    Raises:
        FileNotFoundError: there is none.
    """
    given = os.fspath(path)
    if os.path.lexists(given):
        return os.path.abspath(given)
    parent, name = os.path.split(os.path.realpath(given))
    for entry in _beside(parent, name):
        if entry.endswith(".previous"):
            return entry
    raise FileNotFoundError(errno.ENOENT, "there is no such checkpoint", given)


def stamp(path: str | int) -> tuple[int, ...] | None:
    """What tells the file or directory at `path` (or open as that descriptor) from one that takes its place; None where
    there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    # The number alone will not do: a file system gives it out again.
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def sync_directory(path: str) -> None:
    """Have the names in the directory `path` on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _prefix(name: str) -> str:
    # Cut, so that a name that is as long as a name may be (255 bytes, not characters) has room for the token.
    return f".{os.fsdecode(os.fsencode(name)[:200])}."


def _beside(parent: str, name: str) -> Iterator[str]:
    """Directories that saves to `name` have made in `parent`."""
    prefix = _prefix(name)
    with contextlib.suppress(OSError):
        for entry in sorted(os.listdir(parent)):
            rest = entry.removeprefix(prefix)
            token, _, end = rest.partition(".")
            if rest != entry and len(token) == 8 and end in ("partial", "previous"):
                yield os.path.join(parent, entry)


def _recover(target: str) -> None:
    """A replacement that a crash has cut short is undone."""
    if not os.path.lexists(target):
        parent, name = os.path.split(target)
        for entry in _beside(parent, name):
            if entry.endswith(".previous"):
                with contextlib.suppress(OSError):
                    os.rename(entry, target)
                    return


def _check_replaceable(given: str, target: str) -> None:
    try:
        names = os.listdir(target)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise CheckpointError(f"dtorch.save: {given!r} is a file, and a directory is to be written there") from None
    except OSError as error:
        raise CheckpointError(f"dtorch.save: {given!r} cannot be written: {said(error)}") from None
    if names and not any(name.endswith(_MARKS) for name in names):
        raise CheckpointError(
            f"dtorch.save: the directory {given!r} holds {sorted(names)[0]!r} and no checkpoint; "
            "give the name of one that does not exist"
        )
    for name in names:
        if os.path.isdir(os.path.join(target, name)):
            raise CheckpointError(
                f"dtorch.save: the directory {given!r} holds the directory {name!r}, which is no part of a checkpoint; "
                "give another name"
            )


def _keep_others(old: str, new: str) -> None:
    """Files in `old` that are no part of a checkpoint (a model's config.json) are in `new` as well."""
    for name in os.listdir(old):
        if not name.endswith(_OURS) and not os.path.lexists(os.path.join(new, name)):
            try:
                os.link(os.path.join(old, name), os.path.join(new, name), follow_symlinks=False)
            except OSError:
                shutil.copy2(os.path.join(old, name), os.path.join(new, name), follow_symlinks=False)


def _exchange(a: str, b: str) -> None:
    """Let the names `a` and `b` change places, in one step."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        rename = libc.renameat2
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    if rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), a, None, b)
