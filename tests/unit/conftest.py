# SPDX-License-Identifier: Apache-2.0
"""Fixtures of unit tests."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import mariadb_server
import pytest
from captured import Trees, unpack
from controller_lab import Munged, munged, stop
from fabric_lab import DEFAULT, HAVE_SIMULATOR, NEEDED, SimulatedFabric, simulated_fabric
from mariadb_server import Proxy
from store_backends import ENGINES, Place, place
from vhpc_command import Vhpc, publish, two_sockets
from vhpcd_process import Vhpcd, ended, make

from vhpc_slurm.config.database import Database
from vhpc_slurm.fabric.smp import FabricReader
from vhpc_slurm.node.host import process


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows the log of a vhpcd that has ended: other errors follow from that."""
    report = yield
    if report.failed:
        report.sections += [("vhpcd has ended", text) for text in ended()]
    return report


@pytest.fixture(scope="session", autouse=True)
def marker_of_this_worker() -> Iterator[None]:
    """Makes each worker of pytest-xdist see, and end, marked processes of its own tests only.

    Generations of the same name are in many files, and vhpc searches the whole node for their processes.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "MARKER", f"{process.MARKER}_{os.getpid()}")
        yield


@pytest.fixture
def run_dir() -> Iterator[str]:
    """A folder whose path is short enough for the sockets of guests."""
    with tempfile.TemporaryDirectory(prefix="vhpc-", dir="/tmp") as folder:
        yield folder


@pytest.fixture
def mariadb_settings() -> Database:
    """Of a new database, whose server must answer soon."""
    return mariadb_server.shared().database(timeout_s=2)


@pytest.fixture
def mariadb_proxy(mariadb_settings: Database, run_dir: str) -> Iterator[Proxy]:
    """Between a store and the server of ``mariadb_settings``."""
    found = Proxy(Path(run_dir), Path(mariadb_settings.socket))
    yield found
    found.close()


@pytest.fixture
def public_dir() -> Iterator[Path]:
    """A folder that other users may enter; those of pytest they may not."""
    with tempfile.TemporaryDirectory(prefix="vhpc-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def vhpc(
    tmp_path: Path, run_dir: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Vhpc:
    (tmp_path / "vhpc.toml").write_text(
        f"""
[paths]
run = "{run_dir}"
state = "{tmp_path}/state"
[controller]
host = "127.0.0.1"
port = 1
request_timeout_s = 1
munge_socket = "{tmp_path}/no-munge"
[images]
catalog = "{tmp_path}/catalog"
store = "{tmp_path}/store"
[guests]
accelerator = "tcg"
[shares]
home = false
site = ["/usr/share", "/proc"]
[host]
sysfs_root = "{tmp_path}/sys"
"""
    )
    monkeypatch.setenv("VHPC_CONFIG", str(tmp_path / "vhpc.toml"))
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    two_sockets(tmp_path / "sys")
    publish(tmp_path / "catalog", tmp_path / "store")
    return Vhpc(tmp_path, capsys)


@pytest.fixture(scope="session")
def trees() -> Iterator[Trees]:
    """Captured machines, each unpacked once; in memory, as they are tens of thousands of small files."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="vhpc-trees-", dir=memory) as folder:
        yield functools.cache(lambda name: unpack(name, Path(tempfile.mkdtemp(dir=folder))))


@pytest.fixture(params=ENGINES)
def leases_at(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A place without leases, in each engine of the store."""
    return place(request.param, tmp_path)


@pytest.fixture
def vhpcd(tmp_path: Path, daemon: Munged) -> Iterator[Vhpcd]:
    """A vhpcd of the test's own; test modules that need other settings have another one."""
    found = make(tmp_path, daemon).start()
    yield found
    if found.process is not None:
        stop(found.process)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Munged]:
    """A munged of the module's own."""
    with munged() as found:
        yield found


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedFabric]:
    """A simulated fabric with its OpenSM, for all tests of a module."""
    if not HAVE_SIMULATOR:
        pytest.skip(NEEDED)
    with simulated_fabric(tmp_path_factory.mktemp("fabric")) as started:
        yield started


@pytest.fixture
def fabric(lasting: SimulatedFabric, monkeypatch: pytest.MonkeyPatch) -> SimulatedFabric:
    """The module's fabric as it was at first."""
    monkeypatch.chdir(lasting.folder)  # the simulator's library makes folders where it runs
    lasting.replace(DEFAULT)
    lasting.sweep()
    return lasting


@pytest.fixture
def reader(fabric: SimulatedFabric) -> Iterator[FabricReader]:
    """Reads the fabric; its child is there already, so that deadlines in tests are the fabric's."""
    one = FabricReader(environment=fabric.environment)
    one.scan(60.0)
    yield one
    one.close()
