# SPDX-License-Identifier: Apache-2.0
"""A simulated InfiniBand fabric with a real subnet manager: ibsim, opensm, and tables read by smpquery.

Sixteen adapters are on one switch with the one that opensm runs on.  Their
port GUIDs are those that the first four keys of the pool give to four guests
each, so each of them stands for a VF that a node has set up already.  Larger
fabrics are trees of two levels, with 16 guests for each key.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

import pytest
from controller_lab import wait_for

from pace import limit
from vhpc_slurm.fabric.partitions import IbPartition

PRELOAD = Path("/usr/lib/x86_64-linux-gnu/umad2sim/libumad2sim.so")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
HAVE_SIMULATOR = PRELOAD.exists() and all(
    shutil.which(name, path=PATH) for name in ("ibsim", "opensm", "smpquery")
)
NEEDED = "needs the packages opensm, ibsim-utils and infiniband-diags (make deps)"
KEYS = (0x1000, 0x1001, 0x1002, 0x1003)
GUIDS = tuple(0x02CC << 48 | pkey << 32 | rank << 8 for pkey in KEYS for rank in range(4))
SM_GUID = 0x500001
NOBODY = {guid: {0x7FFF} for guid in GUIDS} | {SM_GUID: {0xFFFF}}
DEFAULT = b"Default=0x7fff, ipoib : ALL=limited, SELF=full ;\n"


@dataclass(frozen=True)
class Shape:
    """Adapters on leaf switches; each leaf is linked to all spines; a single switch has no spines."""

    guids: tuple[int, ...] = GUIDS
    leaf: int = 16
    spines: int = 0

    def places(self) -> dict[int, str]:
        """Directed routes from the subnet manager's port."""
        found = {SM_GUID: "0"}
        for number, guid in enumerate(self.guids):
            leaf, port = divmod(number, self.leaf)
            found[guid] = f"0,1,{leaf + 1},{port + 1}" if self.spines else f"0,1,{port + 1}"
        return found

    def net(self) -> str:
        """The fabric in ibsim's language; a port's GUID is its node's plus its number."""
        leaves = (len(self.guids) + self.leaf - 1) // self.leaf
        top, port = ("P0", leaves + 1) if self.spines else ("L0", self.leaf + 1)
        parts = [f'caguid={SM_GUID - 1:#x}\nCa 1 "SM"\n[1] "{top}"[{port}]\n']
        for number, guid in enumerate(self.guids):
            leaf, place = divmod(number, self.leaf)
            parts.append(f'caguid={guid - 1:#x}\nCa 1 "H{number + 1}"\n[1] "L{leaf}"[{place + 1}]\n')
        ports = self.leaf + max(self.spines, 8)
        for leaf in range(leaves):
            here = range(leaf * self.leaf, min((leaf + 1) * self.leaf, len(self.guids)))
            links = "".join(f'[{place + 1}] "H{number + 1}"[1]\n' for place, number in enumerate(here))
            links += "".join(
                f'[{self.leaf + spine + 1}] "P{spine}"[{leaf + 1}]\n' for spine in range(self.spines)
            )
            links += f'[{port}] "SM"[1]\n' * (not self.spines)
            parts.append(f'switchguid={0x900000 + leaf:#x}\nSwitch {ports} "L{leaf}"\n{links}')
        for spine in range(self.spines):
            links = "".join(f'[{leaf + 1}] "L{leaf}"[{self.leaf + spine + 1}]\n' for leaf in range(leaves))
            links += f'[{port}] "SM"[1]\n' * (spine == 0)
            parts.append(f'switchguid={0xA00000 + spine:#x}\nSwitch {leaves + 1} "P{spine}"\n{links}')
        return "\n".join(parts)


def tree(adapters: int) -> Shape:
    """A fabric of 256 or 1024 adapters."""
    guids = (
        0x02CC << 48 | pkey << 32 | rank << 8
        for pkey in range(0x1000, 0x1000 + adapters // 16)
        for rank in range(16)
    )
    return Shape(tuple(guids), leaf={256: 16, 1024: 32}[adapters], spines=4)


class PacketsLostError(Exception):
    """The simulator has lost packets, and an OpenSM waits for them without end."""


# The simulator is not what is tested: a test with two OpenSM, each on a fabric of its own, runs again.
may_lose_packets = pytest.mark.flaky(reruns=7, only_rerun=[PacketsLostError.__name__])


@contextmanager
def unless_lost() -> Iterator[None]:
    """Blame a wait for an OpenSM that fails in this block on the simulator."""
    try:
        yield
    except AssertionError as err:  # of wait_for
        raise PacketsLostError(str(err)) from err


class SimulatedFabric:
    """One fabric; its files are in a folder of its own."""

    def __init__(self, folder: Path, shape: Shape = Shape()) -> None:
        self.folder = folder
        self.shape = shape
        self.places = shape.places()
        self.partitions = folder / "partitions.conf"
        self.log = folder / "osm.log"
        self.pidfile = folder / "osm.pid"
        self.environment = os.environ | {
            "PATH": PATH,
            "IBSIM_SOCKNAME": f"vhpc-{os.getpid()}-{folder.name}",
            "SIM_HOST": "SM",
            "LD_PRELOAD": str(PRELOAD),
            "OSM_CACHE_DIR": str(folder),
            "OSM_TMP_DIR": str(folder),
        }
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, partitions: bytes = DEFAULT) -> None:
        (self.folder / "net").write_text(self.shape.net())
        (self.folder / "opensm.conf").write_text("force_log_flush TRUE\n")
        plain = {name: value for name, value in self.environment.items() if name != "LD_PRELOAD"}
        self._simulator = self._run(
            ["ibsim", "-s", "-N", "8192", "-S", "1024", "-P", "100000", "net"], plain, stdin=subprocess.PIPE
        )
        wait_for(lambda: self._query("nodeinfo", "0").returncode == 0, "ibsim does not answer")
        self.replace(partitions)
        self.start_opensm()

    def start_opensm(self) -> None:
        before = self.sweeps()
        files = ["-F", "opensm.conf", "-P", str(self.partitions), "-f", str(self.log), "-p", "14"]
        self.opensm = self._run(["opensm", *files], self.environment)
        self.pidfile.write_text(f"{self.opensm.pid}\n")
        wait_for(lambda: self.sweeps() > before, "opensm does not bring the subnet up")

    def start_standby(self, host: str, partitions: bytes) -> StandbyOpensm:
        """A second opensm, at an adapter of the fabric, with files of its own; see ``may_lose_packets``."""
        own = self.folder / f"standby-{host}"
        own.mkdir()
        standby = StandbyOpensm(own)
        standby.partitions.write_bytes(partitions)
        (own / "opensm.conf").write_text(
            "force_log_flush TRUE\nsminfo_polling_timeout 300\npolling_retry_number 2\n"
        )
        environment = self.environment | {
            "SIM_HOST": host,
            "OSM_CACHE_DIR": str(own),
            "OSM_TMP_DIR": str(own),
        }
        files = [
            "-F",
            f"{own}/opensm.conf",
            "-P",
            f"{own}/partitions.conf",
            "-f",
            f"{own}/osm.log",
            "-p",
            "1",
        ]
        # The simulator loses packets to an opensm that is not ready yet, and their sender waits
        # without end: the master must not ask while the other one starts.
        self.opensm.send_signal(signal.SIGSTOP)
        process = self._run(["opensm", *files], environment)
        standby.pidfile.write_text(f"{process.pid}\n")
        with unless_lost():
            wait_for(lambda: standby.says(b"Setting IS_SM on port"), "the second opensm does not start")
            self.opensm.send_signal(signal.SIGCONT)
            wait_for(lambda: standby.says(b"Entering STANDBY state"), "the second opensm does not stand by")
            self.sweep()
        return standby

    def stop(self) -> None:
        for process in reversed(self._processes):
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(60)

    def replace(self, data: bytes) -> None:
        new = self.folder / "new"
        new.write_bytes(data)
        new.replace(self.partitions)

    def sweeps(self) -> int:
        """How often opensm has said that the subnet is up."""
        return self.log.read_bytes().count(b"SUBNET UP") if self.log.exists() else 0

    def sweep(self) -> None:
        """Let opensm sweep now, and wait for the end of a sweep, which may have begun before.

        A signal that comes when another sweep begins is lost: that resets the flag which the signal sets.
        """
        before, sent = self.sweeps(), 0.0

        def swept() -> bool:
            nonlocal sent
            if self.sweeps() > before:
                return True
            if time.monotonic() - sent > limit(10):
                self.opensm.send_signal(signal.SIGHUP)
                sent = time.monotonic()
            return False

        wait_for(swept, "opensm does not sweep")

    def write_table(self, guid: int, *entries: int, block: int = 0) -> None:
        """Change a block of an adapter's table by a management packet of our own, behind opensm's back."""
        words = [self.places[guid], str(block), *(f"{entry:x}" for entry in entries)]
        subprocess.run(
            [sys.executable, Path(__file__).with_name("smp_set.py"), *words],
            env=self.environment | {"PYTHONPATH": str(Path(__file__).parents[3] / "python")},
            cwd=self.folder,
            check=True,
            timeout=60,
        )

    def silence(self, adapter: str, *, silent: bool = True) -> None:
        """Have an adapter (``H1``) lose all packets, or none any more."""
        self._simulate(f'Error "{adapter}" {100 * silent}')

    @contextmanager
    def held(self, seconds: float) -> Iterator[None]:
        """The simulator answers nothing for some seconds, as on a busy machine."""
        self._simulator.send_signal(signal.SIGSTOP)
        going_on = Timer(seconds, self._simulator.send_signal, (signal.SIGCONT,))
        going_on.start()
        try:
            yield
        finally:
            going_on.join()

    def swap_cables(self) -> None:
        """Exchange the switch's ports of the adapters H1 and H2."""
        for one in ('Unlink "H1"', 'Unlink "H2"', 'Link "H1"[1] "L0"[2]', 'Link "H2"[1] "L0"[1]'):
            self._simulate(one)

    def _simulate(self, command: str) -> None:
        assert self._simulator.stdin is not None
        self._simulator.stdin.write(command.encode() + b"\n")
        self._simulator.stdin.flush()

    def tables(self, *only: int) -> dict[int, tuple[int, ...]]:
        """The keys of adapters (all) by port GUID, asked for one by one along known paths."""
        wanted = only or tuple(self.places)
        with ThreadPoolExecutor(6) as several:  # each waits for the simulator most of its time
            return dict(
                zip(wanted, several.map(lambda guid: self._table(self.places[guid]), wanted), strict=True)
            )

    def _table(self, path: str) -> tuple[int, ...]:
        asked = self._query("pkeys", path, "1")
        assert asked.returncode == 0, asked.stderr
        rows = re.findall(rb"^ *[0-9]+: (.*)$", asked.stdout, re.MULTILINE)
        entries = [int(word, 16) for row in rows for word in row.split()]
        return tuple(entry for entry in entries if entry)

    def _query(self, what: str, path: str, *more: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            ["smpquery", "-t", "20000", "-D", what, path, *more],  # ms: the simulator may be slow
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            check=False,
            timeout=60,
        )

    def _run(
        self, command: list[str], environment: dict[str, str], stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        with (self.folder / f"{command[0]}.out").open("ab") as output:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdin=stdin,
                stdout=output,
                stderr=output,
            )
        self._processes.append(process)
        return process


class StandbyOpensm:
    """The files of a second opensm."""

    def __init__(self, folder: Path) -> None:
        self.partitions, self.pidfile, self.log = (
            folder / name for name in ("partitions.conf", "osm.pid", "osm.log")
        )

    def says(self, words: bytes) -> bool:
        return self.log.exists() and words in self.log.read_bytes()


@contextmanager
def simulated_fabric(folder: Path, shape: Shape = Shape()) -> Iterator[SimulatedFabric]:
    fabric = SimulatedFabric(folder, shape)
    try:
        fabric.start()
        yield fabric
    finally:
        fabric.stop()


def crowding(guid: int, keys: int) -> tuple[IbPartition, ...]:
    """Partitions of a site that put so many keys into the 64 entries of a port's table."""
    member = (f"{guid:#018x}", False)
    return tuple(IbPartition(f"site_{pkey:04x}", pkey, (member,)) for pkey in range(0x10, 0x10 + keys))


def sets(fabric: SimulatedFabric, *only: int) -> dict[int, set[int]]:
    return {guid: set(entries) for guid, entries in fabric.tables(*only).items()}


def holding(*groups: tuple[int, int]) -> dict[int, set[int]]:
    """Tables where the first so many ports of each key have it, and no other port anything."""
    return NOBODY | {
        GUIDS[(pkey - 0x1000) * 4 + rank]: {0x7FFF, 0x8000 | pkey}
        for pkey, count in groups
        for rank in range(count)
    }
