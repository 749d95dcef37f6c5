"""What unit tests share."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from captured import Trees, unpack
from vhpc_command import Vhpc, publish, two_sockets


@pytest.fixture
def vhpc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Vhpc:
    (tmp_path / "vhpc.toml").write_text(
        f"""
[paths]
run = "{tmp_path}/run"
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
def trees(tmp_path_factory: pytest.TempPathFactory) -> Trees:
    """Captured machines, each unpacked once."""
    return functools.cache(lambda name: unpack(name, tmp_path_factory.mktemp("tree")))
