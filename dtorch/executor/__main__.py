"""Entry of the warden, as the pool starts it: ``python -S …/dtorch/executor/__main__.py FD``.

FD is the warden's end of a socket pair. Run as a file, with ``-S``, so that nothing of the user's runs a second time
here: not the script (there is no ``__main__`` guard to ask for), not a ``sitecustomize``, which may start threads,
and nothing that happens to lie in the working directory. The modules are then found just where the client finds
them: its search path is the first thing that it sends.
"""

import importlib
import os
import signal
import site
import socket
import sys
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
if __name__ == "__main__" and sys.path and sys.path[0] == os.path.join(ROOT, "dtorch", "executor"):
    del sys.path[0]
if ROOT not in sys.path:
    sys.path.append(ROOT)

from dtorch.executor.messages import receive  # noqa: E402 (the path above is what finds it)
from dtorch.runtime.limits import explain  # noqa: E402

USAGE = (
    "dtorch.executor is started by the pool of a dtorch program, which hands it a socket; there is nothing to run "
    "by hand. For the state of this machine: python -m dtorch doctor"
)


def find_modules(path: list[str]) -> None:
    """Make imports find what they find in the client, whose ``sys.path`` is `path`."""
    if sys.flags.no_site:
        # Path configuration files may add finders (editable installs), so they are read, but nothing is customised.
        site.execsitecustomize = site.execusercustomize = lambda: None  # type: ignore[attr-defined]
        site.main()
    sys.path[:] = path if ROOT in path else [*path, ROOT]


def main(arguments: list[str]) -> int:
    """Serve the pool whose socket is named by `arguments`; the exit status."""
    if len(arguments) != 1 or not arguments[0].isdecimal():
        print(USAGE, file=sys.stderr)
        return 2
    # The life of these processes is the client's to end, not the terminal's or the job manager's: a client that
    # saves a checkpoint on SIGTERM still needs its executors for that.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # What the client ignores or holds back is inherited, and is its own affair: here SIGCHLD tells how an executor
    # ended, and SIGTERM and SIGUSR1 interrupt one that waits.
    for number in (signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with open("/proc/self/comm", "w") as comm:
        comm.write("dtorch-warden")
    sock = socket.socket(fileno=int(arguments[0]))
    sock.set_inheritable(False)
    start: dict[str, Any] | None
    try:
        start, fds = receive(sock)
    except OSError as error:
        print(explain(error), file=sys.stderr)
        return 1
    if start is None:
        return 0
    find_modules(start["path"])
    # Imported only now: it imports torch, which is to be found the client's way.
    importlib.import_module("dtorch.executor.warden").serve(sock, start, fds)
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    # Without the interpreter's own end: torch's takes longer than all else here, and nothing is left to clean up.
    os._exit(status)
