# SPDX-License-Identifier: Apache-2.0
"""Paths of the lab, and its configuration."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from vlablib.report import LabError, say

CHECKOUT = Path(__file__).resolve().parents[2]
DEFAULT_STATE = Path("/run/vhpc-lab")
DEFAULT_CACHE = Path("/var/cache/vhpc-lab")
DATA_PARENT = Path("/var/tmp")  # noqa: S108 - an overlay's upper folder needs a real disk
MAX_NODES = 128
_SLOWEST = 10.0
# StateSaveLocation of slurm.conf
SLURMCTLD_STATE = "/var/lib/slurm/slurmctld"
# names of the trees of `vlab up --bare` by suite; none begins with that of another tree and a hyphen, because
# trees of older recipes are found so
BARE_NAMES = {"trixie": "bare", "bookworm": "no-vhpc-bookworm"}


@dataclass(frozen=True)
class User:
    """A user of the lab; same uid on every host."""

    name: str
    uid: int
    home: str


USERS = (User("alice", 2001, "/home/alice"), User("bob", 2002, "/home/bob"))


@dataclass(frozen=True)
class Lab:
    """The folders of one lab; labs with different state folders are independent."""

    state: Path
    cache: Path
    data: Path

    @classmethod
    def from_environment(cls) -> Lab:
        """Use $VLAB_STATE, $VLAB_CACHE and $VLAB_DATA, or the defaults."""
        state = Path(os.environ.get("VLAB_STATE") or DEFAULT_STATE).absolute()
        name = "vhpc-lab"
        if state != DEFAULT_STATE:
            name += "-" + hashlib.sha256(str(state).encode()).hexdigest()[:8]
        data = Path(os.environ.get("VLAB_DATA") or DATA_PARENT / name).absolute()
        cache = Path(os.environ.get("VLAB_CACHE") or DEFAULT_CACHE).absolute()
        for path in (state, data, cache):
            if any(character in str(path) for character in ":,\\\n"):
                raise LabError(f"{path}: overlayfs does not allow colons, commas and backslashes in paths")
        return cls(state, cache, data)

    @property
    def home(self) -> Path:
        """/home of every host."""
        return self.data / "home"

    @property
    def scratch(self) -> Path:
        """/scratch of every host."""
        return self.data / "scratch"

    @property
    def shared(self) -> Path:
        """/shared of every host; only ctl may write to it."""
        return self.data / "shared"

    @property
    def slurmctld(self) -> Path:
        """StateSaveLocation of a lab with two controllers, which both see; otherwise missing."""
        return self.data / "slurmctld"

    @property
    def deployed(self) -> Path:
        """Files that `deploy` installs, visible on every host."""
        return self.data / "deployed"

    def host_disk(self, name: str) -> Path:
        """Upper and work folder of a host's overlay."""
        return self.data / "hosts" / name

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the lab for one change; another vlab waits."""
        while True:
            self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self.state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                _wait_for_lock(fd)
                # `down` removes the folder while others wait for its lock
                try:
                    same = os.path.samestat(os.fstat(fd), self.state.stat())
                except FileNotFoundError:
                    same = False
                if same:
                    yield
                    return
            finally:
                os.close(fd)


def _wait_for_lock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("waiting for another vlab that is changing this lab ...")
        fcntl.flock(fd, fcntl.LOCK_EX)


@dataclass(frozen=True)
class Record:
    """Configuration requested from `up`; written before anything is started."""

    suite: str
    nodes: int
    rootfs: str
    fabric: bool = False
    # folder of the Debian packages that hosts have; empty: they have the checkout's files
    packages: str = ""
    # hosts with slurmctld and vhpcd; with 2, databases are on a host of their own
    controllers: int = 1
    # compute nodes have no libvirtd and no QEMU: something else stands in for guests
    light: bool = False

    @property
    def bare(self) -> bool:
        """Whether hosts have Slurm only, and what somebody installs by hand."""
        return self.suite in BARE_NAMES.values()

    @classmethod
    def read(cls, lab: Lab) -> Record | None:
        """Return the record of a lab that is up (or partly up), None if no lab is."""
        try:
            raw = json.loads((lab.state / "lab.json").read_text(encoding="utf-8"))
            fabric = bool(raw.get("fabric"))
            packages = str(raw.get("packages", ""))
            controllers = int(raw.get("controllers", 1))
            return cls(
                str(raw["suite"]),
                int(raw["nodes"]),
                str(raw["rootfs"]),
                fabric,
                packages,
                controllers,
                bool(raw.get("light")),
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as err:
            raise LabError(f"{lab.state}/lab.json is damaged ({err}); run: vlab down") from err

    def write(self, lab: Lab) -> None:
        """Replace the record."""
        write_atomically(lab.state / "lab.json", json.dumps(asdict(self)) + "\n")

    @property
    def node_names(self) -> tuple[str, ...]:
        """Names of the compute nodes."""
        return tuple(f"n{index}" for index in range(1, self.nodes + 1))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of all hosts, in start order."""
        return tuple(dict.fromkeys((*self.controller_names, self.database, "login", *self.node_names)))

    @property
    def controller_names(self) -> tuple[str, ...]:
        """Names of the hosts with slurmctld, the primary first."""
        return ("ctl", "ctl2")[: self.controllers]

    @property
    def database(self) -> str:
        """Name of the host with MariaDB, slurmdbd and the simulated fabric."""
        return "ctl" if self.controllers == 1 else "db"


def address(host: str) -> str:
    """Return the IPv4 address of a host on the lab's own bridge."""
    fixed = {"ctl": 2, "login": 3, "ctl2": 4, "db": 5}
    return f"10.77.0.{fixed.get(host) or 10 + int(host[1:])}"


def write_atomically(path: Path, text: str, mode: int = 0o644) -> bool:
    """Write `text` to `path`; return whether that changed it."""
    data = text.encode()
    try:
        if path.read_bytes() == data and path.stat().st_mode & 0o7777 == mode:
            return False
    except FileNotFoundError:
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_bytes(data)
    new.chmod(mode)
    new.replace(path)
    return True


def pace() -> float:
    """How many times slower this machine is than the one that limits are made for: $VHPC_PACE, at least 1.

    scripts/pace measures it; without the variable the limits stay as they are.  Settings of vhpc and Slurm
    that follow from it have largest values, so it is 10 at most.

    Raises:
        LabError: the variable is not a number.
    """
    given = os.environ.get("VHPC_PACE") or "1"
    try:
        return min(_SLOWEST, max(1.0, float(given)))
    except ValueError as err:
        raise LabError(f"VHPC_PACE={given}: must be a number, such as that of scripts/pace") from err


def slower(seconds: int, times: int = 1) -> int:
    """A limit of the lab's configuration, in whole seconds, for this machine, or one so many times slower."""
    return math.ceil(seconds * min(_SLOWEST, pace() * times))


def deadline(seconds: float) -> Iterator[None]:
    """Yield until `seconds`, on the reference machine, have passed, with a short pause between."""
    end = time.monotonic() + seconds * pace()
    pause = 0.01
    yield
    while time.monotonic() < end:
        time.sleep(pause)
        pause = min(pause * 1.5, 0.25)
        yield
