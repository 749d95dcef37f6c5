# SPDX-License-Identifier: Apache-2.0
"""A lab whose hosts have Slurm and nothing of vhpc, and an administrator who has only the document."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import document
from debs import LIMIT_S, ROOT, Suite, run, until

# VHPC_FIRST_DAY=DIR: the state of another lab, which is kept for a look at it
KEEP = "VHPC_FIRST_DAY" in os.environ
LAB = {"VLAB_STATE": os.environ.get("VHPC_FIRST_DAY", "/run/vhpc-lab-first-day")}
NODES = ("n1", "n2")
HOSTS = ("ctl", "login", *NODES)
PACKAGES = "/shared/packages"
# as packaging/trial
KEPT = Path(os.environ.get("VHPC_PACKAGES_CACHE", "/var/cache/vhpc-packages")) / "archives"
# what a lab has instead of systemd; libvirt's sockets are its daemon's, as that of munge
_SERVICE = re.compile(r"systemctl (restart|enable --now) (\w+)")
# hosts of a lab have no way out of their network: these commands have that of the machine
_OUTSIDE = ("apt ", "mmdebstrap ", "vhpc image build ")
_OF_ROOT = {
    "HOME": "/root",
    "LC_ALL": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}
_SPACES = ("--mount", "--cgroup", "--uts", "--ipc", "--pid")


def on(host: str, *words: str, user: str = "root", cwd: str = "") -> str:
    place = ("--cwd", cwd) if cwd else ()
    return run("lab/vlab", "exec", "-u", user, *place, host, "--", *words, **LAB)


def status() -> dict[str, Any]:
    # its exit status is 1 while hosts lack daemons
    words = ("sh", "-c", "lab/vlab status --json || true")
    found: dict[str, Any] = json.loads(run(*words, **LAB))
    return found


def _archives() -> Path:
    return Path(status()["paths"]["scratch"]) / "archives"


def begin(suite: Suite, packages: Path) -> None:
    """Start hosts of a suite, with its packages in a folder that all of them see."""
    run("lab/vlab", "up", "--bare", "--suite", suite.name, "--nodes", str(len(NODES)), **LAB)
    now = status()
    shared = Path(now["paths"]["shared"])
    shutil.rmtree(shared / "vhpc", ignore_errors=True)  # a lab's catalogue
    (shared / "packages").mkdir(exist_ok=True)
    for package in packages.glob("*.deb"):
        shutil.copy(package, shared / "packages")
    archives = _archives()
    (archives / "partial").mkdir(parents=True, exist_ok=True)
    for package in KEPT.glob("*.deb"):
        shutil.copy(package, archives)
    for host in HOSTS:
        root = Path(f"/proc/{now['hosts'][host]['pid']}/root")
        shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")


def end() -> None:
    """Remove the hosts; what APT has downloaded is kept for the next time."""
    if status()["up"]:
        KEPT.mkdir(parents=True, exist_ok=True)
        for package in _archives().glob("*.deb"):
            if not (KEPT / package.name).exists():
                shutil.copy(package, KEPT)
    if not KEEP:
        run("lab/vlab", "down", **LAB)


def as_in_a_lab() -> None:
    """Settings of libvirt and QEMU for hosts without systemd; a site keeps the defaults."""
    run("lab/vlab", "deploy", **LAB)


def wait_for_nodes() -> None:
    until(
        lambda: set(on("ctl", "sinfo", "--noheader", "-N", "-o", "%T").split()) == {"idle"}, "idle nodes", 60
    )


def follow(host: str, title: str, number: int = 0) -> str:
    """Run the commands of a section, or of its block with this number, on a host; their output."""
    return "".join(_line(host, line) for line in document.commands(title)[number])


def _line(host: str, line: str) -> str:
    if service := _SERVICE.fullmatch(line):
        action = "restart" if service[1] == "restart" else "start"
        return run("lab/vlab", "service", host, action, service[2], **LAB)
    if line == "vhpc setup controller":  # starts these by systemd
        for name in ("vhpcd", "vhpc-hookd"):
            run("lab/vlab", "service", host, "start", name, **LAB)
    if not line.startswith(_OUTSIDE):
        return on(host, "sh", "-c", line, cwd=PACKAGES)
    pid = status()["hosts"][host]["pid"]
    words = ("nsenter", f"--target={pid}", *_SPACES, "--", "sh", "-c", f"cd {PACKAGES} && {line}")
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=_OF_ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{host}: {line}\n{(done.stdout + done.stderr)[-3000:]}"
    return done.stdout
