"""A simulated InfiniBand fabric with a real subnet manager: ibsim, opensm, and tables read by smpquery.

Sixteen adapters hang on one switch beside the one that opensm runs on.  Their
port GUIDs are those that the first four keys of the pool give to four guests
each, so each of them stands for a VF that a node has set up already.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from controller_lab import wait_for

PRELOAD = Path("/usr/lib/x86_64-linux-gnu/umad2sim/libumad2sim.so")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
HAVE_SIMULATOR = PRELOAD.exists() and all(
    shutil.which(name, path=PATH) for name in ("ibsim", "opensm", "smpquery")
)
NEEDED = "needs the packages opensm, ibsim-utils and infiniband-diags (make deps)"
KEYS = (0x1000, 0x1001, 0x1002, 0x1003)
GUIDS = tuple(0x02CC << 48 | pkey << 32 | rank << 8 for pkey in KEYS for rank in range(4))
SM_GUID = 0x500001
STANDBY_GUID = 0x500101
DEFAULT = b"Default=0x7fff, ipoib : ALL=limited, SELF=full ;\n"


def net(*, standby: bool = False) -> str:
    """The fabric in ibsim's language; a port's GUID is its node's plus its number."""
    nodes = [
        f'caguid={guid - 1:#x}\nCa 1 "H{port}"\n[1] "SW"[{port}]\n' for port, guid in enumerate(GUIDS, 1)
    ]
    sm = len(GUIDS) + 1
    links = "".join(f'[{port}] "H{port}"[1]\n' for port in range(1, sm))
    if standby:
        nodes.append(f'caguid={STANDBY_GUID - 1:#x}\nCa 1 "SM2"\n[1] "SW"[{sm + 1}]\n')
        links += f'[{sm + 1}] "SM2"[1]\n'
    return "\n".join(
        [
            f'caguid={SM_GUID - 1:#x}\nCa 1 "SM"\n[1] "SW"[{sm}]\n',
            *nodes,
            f'switchguid=0x900000\nSwitch 24 "SW"\n{links}[{sm}] "SM"[1]\n',
        ]
    )


class SimulatedFabric:
    """One fabric; its files are in a folder of its own."""

    def __init__(self, folder: Path, *, standby: bool = False) -> None:
        self.folder = folder
        self._has_standby = standby
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
        (self.folder / "net").write_text(net(standby=self._has_standby))
        (self.folder / "opensm.conf").write_text(
            "force_log_flush TRUE\nsm_priority 14\nsminfo_polling_timeout 500\npolling_retry_number 2\n"
        )
        plain = {name: value for name, value in self.environment.items() if name != "LD_PRELOAD"}
        self._run(["ibsim", "-s", "-n", "-N", "256", "-S", "64", "-P", "4096", "net"], plain)
        wait_for(lambda: self._query("nodeinfo", "0").returncode == 0, "ibsim does not answer")
        self.replace(partitions)
        self.start_opensm()

    def start_opensm(self) -> None:
        before = self.sweeps()
        files = ["-F", "opensm.conf", "-P", str(self.partitions), "-f", str(self.log)]
        self.opensm = self._run(["opensm", *files], self.environment)
        self.pidfile.write_text(f"{self.opensm.pid}\n")
        wait_for(lambda: self.sweeps() > before, "opensm does not bring the subnet up")

    def start_standby(self, partitions: bytes = DEFAULT) -> StandbyOpensm:
        """A second opensm, at a port of its own, with files of its own."""
        folder = self.folder / "standby"
        folder.mkdir()
        standby = StandbyOpensm(folder)
        standby.partitions.write_bytes(partitions)
        config = (self.folder / "opensm.conf").read_text().replace("sm_priority 14", "sm_priority 1")
        (folder / "opensm.conf").write_text(config)
        environment = self.environment | {"SIM_HOST": "SM2", "OSM_CACHE_DIR": str(folder)}
        files = ["-F", "standby/opensm.conf", "-P", str(standby.partitions), "-f", str(standby.log)]
        # The simulator loses what it sends to an opensm that is not ready yet, and the one that has
        # sent it waits for ever: the master must not ask while the other one starts.
        self.opensm.send_signal(signal.SIGSTOP)
        process = self._run(["opensm", *files], environment | {"OSM_TMP_DIR": str(folder)})
        standby.pidfile.write_text(f"{process.pid}\n")
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
                    process.wait(5)

    def replace(self, data: bytes) -> None:
        new = self.folder / "new"
        new.write_bytes(data)
        new.replace(self.partitions)

    def sweeps(self) -> int:
        """How often opensm has said that the subnet is up."""
        return self.log.read_bytes().count(b"SUBNET UP") if self.log.exists() else 0

    def sweep(self) -> None:
        """Let opensm read its file now, and wait for the end of it."""
        before = self.sweeps()
        self.opensm.send_signal(signal.SIGHUP)
        wait_for(lambda: self.sweeps() > before, "opensm does not sweep")

    def tables(self, *only: int) -> dict[int, tuple[int, ...]]:
        """The keys of adapters (all) by port GUID, asked for one by one along known paths."""
        places = {guid: f"0,1,{port}" for port, guid in enumerate(GUIDS, 1)} | {SM_GUID: "0"}
        wanted = only or tuple(places)
        with ThreadPoolExecutor(6) as several:  # each waits for the simulator most of its time
            return dict(zip(wanted, several.map(lambda guid: self._table(places[guid]), wanted), strict=True))

    def _table(self, path: str) -> tuple[int, ...]:
        asked = self._query("pkeys", path, "1")
        assert asked.returncode == 0, asked.stderr
        rows = re.findall(rb"^ *[0-9]+: (.*)$", asked.stdout, re.MULTILINE)
        entries = [int(word, 16) for row in rows for word in row.split()]
        return tuple(entry for entry in entries if entry)

    def _query(self, what: str, path: str, *more: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            ["smpquery", "-D", what, path, *more],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            check=False,
            timeout=30,
        )

    def _run(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{command[0]}.out").open("ab") as output:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
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
def simulated_fabric(folder: Path, *, standby: bool = False) -> Iterator[SimulatedFabric]:
    fabric = SimulatedFabric(folder, standby=standby)
    try:
        fabric.start()
        yield fabric
    finally:
        fabric.stop()
