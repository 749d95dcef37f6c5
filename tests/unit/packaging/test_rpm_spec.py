# SPDX-License-Identifier: Apache-2.0
"""The RPM spec against the Debian packages, and the Python libraries that it bundles."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
SPEC = (ROOT / "packaging/rpm/vhpc.spec").read_text(encoding="utf-8")
PARTS = ("client", "common", "controller", "image-tools", "node", "spank-plugin")
# what rpm has in other places than dpkg, or does itself
ELSEWHERE = {"usr/lib/python3*", "debian/apparmor/vhpc", "usr/share/zsh/site-functions/_vhpc"}


def files(part: str) -> str:
    """The paths of a part, with the macros for folders replaced."""
    (found,) = re.findall(rf"^%files {part}\n(.*?)^(?=%files|%changelog)", SPEC, re.MULTILINE | re.DOTALL)
    text = str(found)
    for macro, folder in (("_unitdir", "/usr/lib/systemd/system"), ("libexec", "/usr/libexec/vhpc")):
        text = text.replace(f"%{{{macro}}}", folder)
    return text.replace("%{_mandir}", "/usr/share/man")


@pytest.mark.parametrize("part", PARTS)
def test_rpms_have_the_files_of_the_debian_packages(part: str) -> None:
    listed = (ROOT / f"debian/vhpc-{part}.install").read_text(encoding="utf-8").splitlines()
    for line in listed:
        path = line.split()[0]
        assert path in ELSEWHERE or f"/{path}" in files(part)


def test_the_spec_names_its_python_in_one_place() -> None:
    named = [line for line in SPEC.splitlines() if re.search(r"/usr/bin/(env )?python", line)]
    assert [line.split(":")[0] for line in named] == ["%{!?vhpc_python"] * 2
    assert "-DVHPC_PYTHON=%{python_home}/bin/python3" in SPEC
    assert SPEC.count("#!%{python_home}/bin/python3") == 2


def test_what_vhpc_imports_is_bundled_in_versions_it_accepts() -> None:
    lines = (ROOT / "packaging/rpm/bundled.txt").read_text(encoding="utf-8").splitlines()
    pins = [
        re.fullmatch(r"([a-z0-9-]+)==([0-9.]+)( --hash=sha256:[0-9a-f]{64})+", line) for line in lines[4:]
    ]
    assert all(pins)
    versions = {pin[1]: pin[2] for pin in pins if pin is not None}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for need in map(Requirement, project["dependencies"]):
        assert need.specifier.contains(versions[need.name])
        # the same lower limit where the system's libraries are used
        assert re.search(
            rf"dist\({need.name}\) {re.escape(str(need.specifier)).replace('>=', '>= ')}$", SPEC, re.M
        )
    assert dict(re.findall(r"bundled\(python3-(\S+)\) = (\S+)", SPEC)) == versions


def test_the_modules_of_rpms_are_those_of_the_policy() -> None:
    assert {path.name for path in (ROOT / "packaging/rpm/selinux").iterdir()} == {
        "vhpc.te",
        "vhpc.fc",
        "vhpc.if",
    }
    sections = set(re.findall(r"^%files (\S+)", SPEC, re.MULTILINE))
    assert sections == {*PARTS, "selinux"}
    assert set(re.findall(r"^%package (\S+)", SPEC, re.MULTILINE)) == sections
