"""docs/security.md: who can reach what, seen from outside, while a pool runs and collectives are in flight."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .clients import TWO, Client, run, running
from .scripts import ROOT

LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
LISTEN = "0A"


@dataclass(frozen=True)
class Socket:
    """One line of /proc/net: a socket, its state, and its two addresses, in hex; of a Unix socket its name."""

    kind: str
    state: str
    local: str
    remote: str


def sockets_of(pid: int) -> list[Socket]:
    """All sockets that process `pid` has open."""
    inodes = set(re.findall(r"socket:\[(\d+)\]", " ".join(links(pid).values())))
    found: list[Socket] = []
    for kind in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        path = Path(f"/proc/{pid}/net/{kind}")
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[9] in inodes:
                found.append(Socket(kind, fields[3], fields[1].split(":")[0], fields[2].split(":")[0]))
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in inodes:
            found.append(Socket("unix", fields[5], fields[7] if len(fields) > 7 else "", ""))
    assert len(found) == len(inodes), "a socket of a kind that this test does not know"
    return found


def links(pid: int) -> dict[int, str]:
    """Descriptor → what it is, of process `pid`."""
    found: dict[int, str] = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[int(fd.name)] = os.readlink(fd)
        except FileNotFoundError:
            continue
    return found


@pytest.fixture(params=["shm", "gloo"])
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[Client, list[int], str]]:
    """A client, with umask 0, whose pool exchanges data all the time; pids of client, warden and two executors."""
    body = """
os.umask(0)
x = dtorch.ones(4, device_mesh=mesh, placements=[dtorch.Shard(0)])
x.redistribute(placements=[dtorch.Replicate()]).tolist()
print(os.getpid(), *pids(), flush=True)
while True:
    x.redistribute(placements=[dtorch.Replicate()]).tolist()
"""
    with running(TWO + body, env={"DTORCH_COLLECTIVES": request.param}) as client:
        pids = [int(pid) for pid in client.line().split()]
        assert len(pids) == 4
        yield client, pids, request.param


def test_nothing_listens_but_gloo_on_loopback(pool: tuple[Client, list[int], str]) -> None:
    client, (program, warden, *executors), collectives = pool
    for pid in (program, warden, *executors):
        sockets = sockets_of(pid)
        unix = [s for s in sockets if s.kind == "unix"]
        network = [s for s in sockets if s.kind != "unix"]
        # Pairs that were made connected: no name in the file system, nor an abstract one.
        assert all(s.local == "" for s in unix), unix
        assert len(unix) == (1 if pid in (program, warden) else 0)
        if pid in executors and collectives == "gloo":
            assert network, "gloo talks over TCP"
            for s in network:
                assert s.local in LOOPBACK, s
                assert s.state == LISTEN or s.remote in LOOPBACK, s
        else:
            assert network == []
    assert client.process.poll() is None


def test_descriptors_go_to_nobody_else(pool: tuple[Client, list[int], str]) -> None:
    """All are closed on exec; shared memory is held by the pool's processes alone."""
    _, pids, _ = pool
    rings = {os.stat(f"/proc/{pids[0]}/fd/{fd}").st_ino for fd, what in links(pids[0]).items() if "dtorch-ring" in what}
    assert len(rings) == 1
    for pid in pids:
        for fd, what in links(pid).items():
            if fd > 2:
                flags = re.search(r"(?m)^flags:\s+(\d+)$", Path(f"/proc/{pid}/fdinfo/{fd}").read_text())
                assert flags and int(flags[1], 8) & os.O_CLOEXEC, (pid, fd, what)
    holders: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            there = links(int(process.name))
            for fd, what in there.items():
                if "dtorch-ring" in what and os.stat(process / "fd" / str(fd)).st_ino in rings:
                    holders.add(int(process.name))
        except OSError:
            continue
    assert holders == set(pids)


def test_no_files(pool: tuple[Client, list[int], str]) -> None:
    """No process of the pool has a file open that another could open by name, but code and what the user gave it."""
    _, (_, *pids), _ = pool
    for pid in pids:
        named = [
            what for what in links(pid).values() if what.startswith("/") and not what.startswith(("/memfd:", "/dev/"))
        ]
        assert named == []
    assert not [name for name in os.listdir("/dev/shm") if "dtorch" in name]


@pytest.mark.parametrize("collectives", ["shm", "gloo"])
def test_children_of_the_user_inherit_nothing(collectives: str) -> None:
    """Neither of the client nor of a function on an executor, even if they are to have all that may be inherited."""
    ended = run(
        TWO
        + """
LIST = ("import os; names = [f'/proc/self/fd/{fd}' for fd in range(3, 99)]; "
        "print([os.readlink(name) for name in names if os.path.exists(name)])")
def children(rank=0):
    for command in ([sys.executable, "-c", LIST], ["sh", "-c", f'{sys.executable} -c "{LIST}"']):
        print(subprocess.run(command, close_fds=False, stdout=subprocess.PIPE, text=True).stdout.strip(), flush=True)
    return torch.ones(2)
children()
dtorch.from_local(children, mesh, [dtorch.Shard(0)], shape=(4,)).tolist()
os.system(f'{sys.executable} -c "{LIST}"')
""",
        env={"DTORCH_EXECUTOR_PREFIX": "0", "DTORCH_COLLECTIVES": collectives},
    )
    assert (ended.status, ended.left) == (0, []), ended.err
    assert set(ended.out.splitlines()) == {"[]"} and len(ended.out.splitlines()) == 7, ended.out


def test_the_rendezvous_is_private(tmp_path: Path) -> None:
    """While executors meet, several times, no directory holds anything of it; only the owner may open the file."""
    body = """
import os
os.umask(0)
import dtorch
mesh = dtorch.init_device_mesh("cpu", (2,))
for _ in range(4):
    x = dtorch.ones(4, device_mesh=mesh, placements=[dtorch.Shard(0)])
    print(x.redistribute(placements=[dtorch.Replicate()]).tolist(), flush=True)
    dtorch.shutdown()
"""
    modes: set[int] = set()
    seen: set[str] = set()
    with running(body, env={"DTORCH_COLLECTIVES": "gloo", "TMPDIR": str(tmp_path)}) as client:
        while client.process.poll() is None:
            seen.update(os.listdir(tmp_path))
            for fd in Path("/proc").glob("[0-9]*/fd/*"):
                with contextlib.suppress(OSError):
                    if "memfd:dtorch-store" in os.readlink(fd):
                        modes.add(stat.S_IMODE(fd.stat().st_mode))
        ended = client.end()
    assert ended.out == "[1.0, 1.0, 1.0, 1.0]\n" * 4, ended.err
    assert modes == {0o600}
    assert not seen


def test_the_page_names_what_these_tests_hold() -> None:
    page = (ROOT / "docs/security.md").read_text()
    for command in ("ss -ltnp", "ls -l /proc/", "umask"):
        assert command in page
    assert set(re.findall(r"tests/process/(\w+)\.py", page)) == {"test_security", "test_signals"}
