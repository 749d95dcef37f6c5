# SPDX-License-Identifier: Apache-2.0
"""Two vhpcd processes of one cluster at one MariaDB server, each with its own way to it, for tests."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import mariadb_server
import msgspec
import pytest
from controller_lab import HAVE_MUNGED, Munged, allocation, request, stop, wait_for
from mariadb_server import Proxy, shared
from vhpcd_process import Vhpcd, make

from vhpc_slurm.cli.site.configuration import toml
from vhpc_slurm.config import Config, Paths, load
from vhpc_slurm.config.database import Database
from vhpc_slurm.config.fabric import Fabric
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.model import Lease

NEEDS = (
    pytest.mark.skipif(not mariadb_server.HAVE_SERVER, reason=mariadb_server.WHY_NOT),
    pytest.mark.skipif(not HAVE_MUNGED, reason="needs munged: apt install munge"),
    pytest.mark.skipif(os.geteuid() != 0, reason="run as root: each vhpcd gets a host name of its own"),
)


class Controller:
    """A vhpcd of a pair: host 127.0.0.2 or 127.0.0.3, with its own way to the database."""

    def __init__(self, vhpcd: Vhpcd, name: str, proxy: Proxy) -> None:
        self.vhpcd, self.name, self.proxy = vhpcd, name, proxy
        self.process: subprocess.Popen[str] | None = None

    @property
    def log(self) -> str:
        return self.vhpcd.log

    def start(self) -> Controller:
        with (self.vhpcd.folder / "log").open("a") as log:
            command = self.vhpcd.command()
            named = ["unshare", "--uts", "sh", "-c", f'hostname {self.name} && exec "$@"', "sh", *command]
            self.process = subprocess.Popen(
                named, stderr=log, text=True, env=self.vhpcd.own_environment(), cwd=self.vhpcd.folder
            )
        process = self.process
        wait_for(lambda: "listens as a standby" in self.log or process.poll() is not None, "no vhpcd")
        assert process.poll() is None, self.log
        return self

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait()

    def cut(self, *, off: bool) -> None:
        """Cut it from the database, or connect it again."""
        self.proxy.refuses, self.proxy.before = off, lambda _data: off

    def times_active(self) -> int:
        return self.log.count("vhpcd is active, with epoch")

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGCONT)
            stop(self.process)


class Pair:
    """Two vhpcd of one cluster, and clients with a state folder of a node's."""

    def __init__(self, first: Controller, second: Controller, config: Config) -> None:
        self.first, self.second, self.config = first, second, config
        self.job = 0

    @property
    def client(self) -> ControllerClient:
        return ControllerClient(self.config)

    def open(self) -> Lease:
        """A new job's lease."""
        self.job += 1
        return self.client.open_generation(request(self.job), allocation())

    def jobs(self) -> list[int]:
        return sorted(one.lease.generation.job_id for one in self.client.leases())


def proxied(folder: Path) -> Proxy:
    folder.mkdir()
    return Proxy(folder, shared().socket)


@contextmanager
def running_pair(
    folder: Path,
    daemon: Munged,
    run_dir: str,
    fabrics: Sequence[Fabric] = (Fabric(), Fabric()),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Pair]:
    """Two vhpcd that run; the first is active; ``fabrics`` are the settings of each."""
    database = shared().database(timeout_s=2)
    made: list[Controller] = []
    port = 0
    for number, name, fabric in ((2, "first", fabrics[0]), (3, "second", fabrics[1])):
        own_folder = folder / name
        own_folder.mkdir()
        proxy = proxied(Path(run_dir) / name)
        own: Database = msgspec.structs.replace(database, socket=str(proxy.path))
        vhpcd = make(own_folder, daemon, fabric, database=own, request_timeout_s=5)
        vhpcd.environment |= environment or {}
        # Connections to 127.0.0.2 come from 127.0.0.1, as from another host.
        (own_folder / "sinfo.out").write_text("n1|127.0.0.1|127.0.0.1\nn2|127.0.0.1|127.0.0.1\n")
        (own_folder / "scontrol.out").write_text("SlurmctldHost[0] = here(127.0.0.1)\n")
        port = port or vhpcd.config.controller.port
        settings = msgspec.structs.replace(
            vhpcd.config.controller,
            host="127.0.0.2",
            backup_hosts=("127.0.0.3",),
            listen=f"127.0.0.{number}",
            port=port,
        )
        text = (own_folder / "vhpc.toml").read_text()
        head = text.index("[controller]"), text.index("[images]")
        lines = [f"{key} = {toml(value)}" for key, value in msgspec.structs.asdict(settings).items()]
        (own_folder / "vhpc.toml").write_text("\n".join(["[controller]", *lines, ""]) + text[head[1] :])
        vhpcd.config = load(own_folder / "vhpc.toml")
        made.append(Controller(vhpcd, name, proxy))
    state = folder / "node"
    state.mkdir()
    config = msgspec.structs.replace(made[0].vhpcd.config, paths=Paths(state=str(state)))
    try:
        made[0].start()
        wait_for(lambda: made[0].times_active() == 1, "the first vhpcd is not active")
        made[1].start()
        yield Pair(made[0], made[1], config)
    finally:
        for one in made:
            one.end()
            one.proxy.close()
