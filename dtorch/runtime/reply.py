"""Reply rings: what executors have to say beyond "done" (errors, sizes that depend on data, statistics).

One ring per executor, written by it and read by the client, each in its own memfd: nobody shares a write index.
Messages are opaque bytes of any length, cut into pieces where the ring is smaller. A reply is written before the
status word that makes the client look for it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from .shared import map_words, memfd

__all__ = ["ReplyReader", "ReplyWriter", "reply_memfd"]

_YIELDS = 20


def _nothing() -> None:
    pass


# Words of a reply ring, by index; its payload follows.
_REPLY_WRITE, _REPLY_READ, _REPLY_DATA = 0, 8, 16
_MORE = 1 << 32  # in a piece's head: the message goes on in the next piece


def reply_memfd(nbytes: int) -> int:
    """A descriptor for a new reply ring of `nbytes` (a power of two), to be given to both ends."""
    return memfd("reply", 8 * _REPLY_DATA + nbytes)


class _ReplyEnd:
    """What both ends of a reply ring share: pieces of ``[bytes | more, payload padded to words]``, wrapping freely."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map, self._words = map_words(fd)
        self._capacity = len(self._words) - _REPLY_DATA
        self._data = memoryview(self._map)[8 * _REPLY_DATA :]
        self._fence = threading.Lock()

    def close(self) -> None:
        """Unmap the ring. Its descriptor belongs to whoever made it."""
        self._words.release()
        self._data.release()
        self._map.close()


class ReplyWriter(_ReplyEnd):
    """An executor's end of its reply ring.

    Args:
        fd: the ring, from :func:`reply_memfd`.
        full: called again and again while there is no room; should wake the client, and may raise to give up.
    """

    def __init__(self, fd: int, *, full: Callable[[], object] = _nothing) -> None:
        super().__init__(fd)
        self._full = full
        # Held for a whole message. Re-entrant: what is collected meanwhile may have something to say as well.
        self._sending = threading.RLock()
        self._head = self._words[_REPLY_WRITE]
        self._piece = 8 * (self._capacity // 2 - 1)

    def send(self, payload: bytes) -> None:
        """Publish one message of any length; waits for the client where it does not fit in what is free."""
        view, piece = memoryview(payload), self._piece
        with self._sending:
            for start in range(0, len(payload) or 1, piece):
                part = view[start : start + piece]
                self._send_piece(part, start + piece < len(payload))

    def _send_piece(self, part: memoryview, more: bool) -> None:
        nwords = 1 + (len(part) + 7 >> 3)
        words, capacity = self._words, self._capacity
        tries = 0
        while self._head + nwords - words[_REPLY_READ] > capacity:
            self._full()
            tries += 1
            if tries <= _YIELDS:
                os.sched_yield()
            else:
                time.sleep(0.001)
        words[_REPLY_DATA + self._head % capacity] = len(part) | (_MORE if more else 0)
        at = 8 * ((self._head + 1) % capacity)
        first = min(len(part), 8 * capacity - at)
        self._data[at : at + first] = part[:first]
        self._data[: len(part) - first] = part[first:]
        self._head += nwords
        with self._fence:
            pass
        words[_REPLY_WRITE] = self._head


class ReplyReader(_ReplyEnd):
    """The client's end of one executor's reply ring. Any thread may drain it."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._tail = self._words[_REPLY_READ]
        self._partial = bytearray()
        self._lock = threading.Lock()

    def drain(self) -> list[bytes]:
        """Every whole message that has arrived, oldest first. A message still arriving is kept for the next call.

        Raises:
            ValueError: what lies there was not written by a :class:`ReplyWriter`.
        """
        words = self._words
        if words[_REPLY_WRITE] == self._tail:
            return []
        messages: list[bytes] = []
        with self._lock:
            while (written := words[_REPLY_WRITE] - self._tail) != 0:
                head = words[_REPLY_DATA + self._tail % self._capacity]
                length = head & (_MORE - 1)
                if not 0 < 1 + (length + 7 >> 3) <= written <= self._capacity or head >> 33:
                    raise ValueError(
                        f"{written} words are said to be unread in a ring of {self._capacity}, the first of them "
                        f"{head:#x}"
                    )
                at = 8 * ((self._tail + 1) % self._capacity)
                first = min(length, 8 * self._capacity - at)
                self._partial += self._data[at : at + first]
                self._partial += self._data[: length - first]
                self._tail += 1 + (length + 7 >> 3)
                words[_REPLY_READ] = self._tail
                if not head & _MORE:
                    messages.append(bytes(self._partial))
                    self._partial.clear()
        return messages
