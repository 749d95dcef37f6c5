# SPDX-License-Identifier: Apache-2.0
"""Labels of sockets and files; the policy itself is tested with the packages."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest
from msgspec.structs import replace

from vhpc_slurm.cli.host.checks import Level, labels
from vhpc_slurm.config import Config
from vhpc_slurm.node.guest import shares
from vhpc_slurm.node.host import selinux

POLICY = Path(__file__).parents[4] / "packaging/rpm/selinux"


@pytest.fixture
def enforcing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host that enforces; the kernel's file keeps what is written to it last."""
    (tmp_path / "enforce").write_text("1")
    monkeypatch.setattr(selinux, "FILESYSTEM", tmp_path)
    monkeypatch.setattr(selinux, "SOCKETS", tmp_path / "sockcreate")
    return tmp_path


def test_a_socket_of_a_helper_is_made_with_its_label(
    enforcing: Path, run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    made = socket.socket

    def make(*args: int) -> socket.socket:
        seen.append((enforcing / "sockcreate").read_bytes())
        return made(*args)

    monkeypatch.setattr(socket, "socket", make)
    shares.listen(Path(run_dir) / "fs.sock", os.getuid()).close()
    # setsockcreatecon(3): the final zero belongs to the label, and an empty one restores the default
    assert seen == [b"system_u:system_r:vhpc_helper_t:s0\0"]
    assert (enforcing / "sockcreate").read_bytes() == b"\0"


def test_without_selinux_or_its_policy_sockets_are_made(
    enforcing: Path, run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selinux, "SOCKETS", enforcing / "absent/sockcreate")
    shares.listen(Path(run_dir) / "one.sock", os.getuid()).close()
    monkeypatch.setattr(selinux, "FILESYSTEM", enforcing / "absent")
    shares.listen(Path(run_dir) / "two.sock", os.getuid()).close()
    assert list(labels.check(Config())) == []


@pytest.mark.parametrize("mode", ["1", "0"])
def test_doctor_compares_labels_with_the_policy(
    enforcing: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    (enforcing / "enforce").write_text(mode)
    config = Config()
    paths = {name: str(enforcing / name) for name in ("run", "libexec")}
    config = replace(config, paths=replace(config.paths, **paths))
    config = replace(config, images=replace(config.images, store=str(enforcing / "images")))
    config = replace(config, disks=replace(config.disks, folder=str(enforcing / "disks")))
    (enforcing / "run").mkdir()
    has = {paths["run"]: b"system_u:object_r:vhpc_run_t:s0\0"}
    monkeypatch.setattr(os, "getxattr", lambda path, _name: has[str(path)])
    (found,) = labels.check(config)
    assert found.level is Level.OK
    has[paths["run"]] = b"system_u:object_r:var_run_t:s0\0"
    (found,) = labels.check(config)
    assert found.level is (Level.ERROR if mode == "1" else Level.WARN)
    assert "var_run_t, not vhpc_run_t" in found.what
    assert f"restorecon -R {paths['run']}" in found.hint


def test_code_and_policy_name_the_same_types() -> None:
    contexts = dict(re.findall(r"^(\S+)\s.*:object_r:(\w+),", (POLICY / "vhpc.fc").read_text(), re.MULTILINE))
    config = Config()
    assert contexts[f"{config.paths.run}(/.*)?"] == "vhpc_run_t"
    assert contexts[f"{config.images.store}(/.*)?"] == "virt_content_t"
    assert contexts[f"{config.disks.folder}(/.*)?"] == "virt_image_t"
    assert contexts[f"{config.paths.libexec}/vhpc-confine"] == "vhpc_confine_exec_t"
    role, kind = selinux.HELPER.split(":")[1:3]
    assert f"role {role} types {kind};" in (POLICY / "vhpc.te").read_text()
