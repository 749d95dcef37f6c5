# SPDX-License-Identifier: Apache-2.0
"""Accounts as name services have them, and the time zone of the node."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
from pathlib import Path

import pytest

from vhpc_slurm.node.host import accounts, timezone

ZONES = Path("/usr/share/zoneinfo")
BERLIN = ZONES / "Europe/Berlin"


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("domain users", "domain users"),
        ("EXAMPLE\\domain users", "EXAMPLE\\domain users"),
        ("grün@example.org", "grün@example.org"),
        ("a,b/c", "a,b/c"),
        ("g" * 200, "g" * 200),
        ("a:b", ""),
        ("a\nb", ""),
        ("+nis", ""),
        ("#comment", ""),
        (" blank", ""),
        (None, ""),
    ],
)
def test_a_group_keeps_its_name_if_a_file_can_hold_it(
    name: str | None, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def getgrgid(gid: int) -> grp.struct_group:
        if name is None:
            raise KeyError(gid)
        return grp.struct_group((name, "x", gid, []))

    monkeypatch.setattr(grp, "getgrgid", getgrgid)
    monkeypatch.setattr(os, "getgrouplist", lambda user, gid: [gid, 1073741825])
    entry = ("alice", "x", 2001, 2000, "Alice Doe,Room 7", "/home/Alice Doe", "/opt/my shell/sh")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: pwd.struct_passwd(entry))
    found = accounts.account(2001)
    assert found.groups == ((written, 2000), (written, 1073741825))
    assert found.credentials.groups == (2000, 1073741825)
    assert (found.gecos, found.home, found.shell) == entry[4:]


def test_an_account_has_nothing_that_ends_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ("bob", "x", 2002, 2002, "Bob\nroot2:x:0:0", "", "/bin/sh")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: pwd.struct_passwd(entry))
    monkeypatch.setattr(os, "getgrouplist", lambda user, gid: [gid])
    found = accounts.account(2002)
    assert (found.gecos, found.home) == ("Bob root2 x 0 0", "/")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root of a host with time zones."""
    (tmp_path / "etc").mkdir()
    zone = tmp_path / "usr/share/zoneinfo/Europe/Berlin"
    zone.parent.mkdir(parents=True)
    shutil.copy(BERLIN, zone)
    return tmp_path


with_zones = pytest.mark.skipif(not BERLIN.exists(), reason="needs time zones: apt install tzdata")


@with_zones
@pytest.mark.parametrize(
    "target", ["/usr/share/zoneinfo/Europe/Berlin", "../usr/share/zoneinfo/Europe/Berlin"]
)
def test_a_link_has_the_name_of_the_zone(root: Path, target: str) -> None:
    (root / "etc/localtime").symlink_to(str(root) + target if target.startswith("/") else target)
    assert timezone.of_host(root) == timezone.TimeZone("Europe/Berlin", BERLIN.read_bytes())


@with_zones
@pytest.mark.parametrize(
    ("named", "name"), [("Europe/Berlin", "Europe/Berlin"), ("Europe/Paris", ""), ("", "")]
)
def test_a_copy_of_a_zone_has_the_name_that_matches(root: Path, named: str, name: str) -> None:
    shutil.copy(BERLIN, root / "etc/localtime")
    if named:
        (root / "etc/timezone").write_text(f"{named}\n")
    assert timezone.of_host(root) == timezone.TimeZone(name, BERLIN.read_bytes())


@pytest.mark.parametrize("content", [None, b"", b"no zone"])
def test_a_host_without_a_zone_is_in_utc(tmp_path: Path, content: bytes | None) -> None:
    (tmp_path / "etc").mkdir()
    if content is not None:
        (tmp_path / "etc/localtime").write_bytes(content)
    assert timezone.of_host(tmp_path) == timezone.TimeZone("UTC", b"")
