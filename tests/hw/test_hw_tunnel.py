# SPDX-License-Identifier: Apache-2.0
"""Encrypted job networks, in a machine whose kernel has WireGuard: the tests of tests/unit run there."""

from __future__ import annotations

import base64
import io
import re
import tarfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from machine import ROOT, Machine

pytestmark = [
    pytest.mark.promise("net.wireguard", "net.wireguard-killed"),
    pytest.mark.hw,
    pytest.mark.timeout(900),
]

MODULE = "test_network_tunnel.py"
FILES = (MODULE, "tunnel_lab.py", "network_lab.py", "controller_lab.py")
DISTRIBUTIONS = ("pytest", "pluggy", "iniconfig", "packaging")
"""Packages that the machine lacks for them; all are pure Python."""
UNPACK = """
import base64, io, sys, tarfile
data = base64.b64decode(sys.stdin.read())
tarfile.open(fileobj=io.BytesIO(data)).extractall(sys.argv[1], filter="data")
"""
FOLDER, PYTHON = "/run/vhpc-test-tunnel", "/opt/vhpc/bin/python"


def unit_file(name: str) -> Path:
    """A file of tests/unit, in whichever folder."""
    (path,) = (ROOT / "tests/unit").rglob(name)
    return path


def archive() -> str:
    """The tests and pytest, as one line."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name in FILES:
            tar.add(unit_file(name), name)
        for name in DISTRIBUTIONS:
            for path in distribution(name).files or ():
                if "__pycache__" not in path.parts and ".." not in path.parts:
                    tar.add(str(path.locate()), str(path))
    return base64.b64encode(out.getvalue()).decode()


def test_encrypted_job_networks_on_a_kernel_with_wireguard(quiet: Machine) -> None:
    with quiet.stage("tests of encrypted job networks"):
        quiet.run("python3", "-c", UNPACK, FOLDER, stdin=archive(), timeout=180)
        # named network namespaces are mounts, and none may remain
        script = f"cd {FOLDER} && PYTHONPATH={FOLDER} {PYTHON} -m pytest -p no:cacheprovider --tb=short -rA"
        script += " -W ignore::pytest.PytestUnknownMarkWarning"  # the machine has no pyproject.toml
        script += f" {MODULE} >log 2>&1; code=$?; tail -c 12000 log; exit $code"
        done = quiet.run("unshare", "--mount", "sh", "-c", script, check=False, timeout=480)
        quiet.run("rm", "-r", FOLDER)
    assert done.code == 0, done.out
    counted = re.search(r"(\d+) passed in", done.out)
    assert counted, done.out[-2000:]
    tests = unit_file(MODULE).read_text(encoding="utf-8")
    assert int(counted[1]) >= len(re.findall(r"^def test_", tests, re.MULTILINE)), "none is skipped"
