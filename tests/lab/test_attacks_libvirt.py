# SPDX-License-Identifier: Apache-2.0
"""A job's user against the node's libvirt, with Debian's default settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster import Lab

pytestmark = pytest.mark.lab

PROGRAM = Path(__file__).with_name("libvirt_site.py").read_text(encoding="utf-8")
SOCKETS = ("libvirt-sock", "libvirt-sock-ro")


def attacked(lab: Lab, how: str) -> dict[str, Any]:
    """The answers to the user's connections, and vhpc's findings, on sockets of the kind ``how``."""
    argv = ("unshare", "--mount", "/opt/vhpc/bin/python", "-I", "-", how)
    found: dict[str, Any] = json.loads(lab.run("n2", *argv, stdin=PROGRAM, timeout=300).out)
    assert found["before"] == "connected", found
    return found


@pytest.mark.promise("libvirt.closed", "attack.libvirt")
def test_users_cannot_fill_libvirt_after_setup(lab: Lab) -> None:
    found = attacked(lab, "closed")
    refused = {"held": 0, "why": "PermissionError", "vhpc": "connected"}
    assert [found[name] for name in SOCKETS] == [refused, refused], found


@pytest.mark.promise("libvirt.closed")
def test_sockets_of_the_distribution_let_users_fill_libvirt(lab: Lab) -> None:
    """The reason for the setup; vhpc then reports how many connections there are."""
    found = attacked(lab, "open")
    for name in SOCKETS:
        assert found[name]["held"] > 20, found
        assert found[name]["vhpc"].startswith("BusyError: cannot connect to libvirt: libvirt did not answer")
        assert "vhpc setup node" in found[name]["vhpc"]


@pytest.mark.promise("attack.libvirt")
def test_users_cannot_connect_to_the_labs_libvirt(lab: Lab) -> None:
    (check,) = [
        one for one in lab.vhpc("n1", "doctor", check=False) if one["check"] == "node.libvirt_sockets"
    ]
    assert check["level"] == "ok", check
    done = lab.run(
        "n1",
        "virsh",
        "-c",
        "qemu:///system?socket=/run/libvirt/libvirt-sock-ro",
        "list",
        user="alice",
        check=False,
    )
    assert done.code != 0
    assert "Permission denied" in done.err
