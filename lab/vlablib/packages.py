# SPDX-License-Identifier: Apache-2.0
"""`vlab up --packages`: hosts get vhpc from Debian packages as those of a site do, not from the checkout."""

from __future__ import annotations

import shutil
from pathlib import Path

from vlablib.hosts import run
from vlablib.report import LabError, step
from vlablib.settings import Lab, Record

_IN_HOST = "/shared/packages"
_EVERYWHERE = ("vhpc-common", "vhpc-client")
_TIMEOUT_S = 300


def of_host(host: str) -> tuple[str, ...]:
    """Names of the packages that docs/install.md lists for a host."""
    return _EVERYWHERE + {
        "ctl": ("vhpc-controller", "vhpc-image-tools"),
        "login": ("vhpc-spank-plugin", "vhpc-image-tools"),
    }.get(host, ("vhpc-spank-plugin", "vhpc-node"))


def stage(lab: Lab, folder: Path) -> None:
    """Copy the packages to where all hosts see them.

    Raises:
        LabError: a package is missing, or the folder has several versions of one.
    """
    target = lab.shared / "packages"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in {*of_host("ctl"), *of_host("login"), *of_host("n1")}:
        found = list(folder.glob(f"{name}_*.deb"))
        if len(found) != 1:
            raise LabError(f"{folder} has {len(found)} packages {name}, not 1; run: make packages")
        shutil.copyfile(found[0], target / f"{name}.deb")


def install(record: Record, pids: dict[str, int]) -> set[str]:
    """Install or upgrade the packages of each host; return the units that now run old files."""
    stale: set[str] = set()
    for host in record.hosts:
        files = [f"{_IN_HOST}/{name}.deb" for name in of_host(host)]
        wanted = run(pids[host], ["sh", "-c", _VERSIONS, "sh", *files])
        installed = run(pids[host], ["sh", "-c", _INSTALLED, "sh", *of_host(host)])
        if sorted(wanted.split("\n")) == sorted(installed.split("\n")):
            continue
        with step(f"installing packages on {host}"):
            run(pids[host], ["dpkg", "--install", *files], timeout_s=_TIMEOUT_S)
        stale |= {"vhpcd", "vhpc-hookd", "slurmd"}
    return stale


def set_up(record: Record, pids: dict[str, int]) -> None:
    """Run `vhpc setup` on hosts whose daemons run; what it leaves for an administrator is no error."""
    for host in record.hosts:
        role = {"ctl": "controller", "login": "login"}.get(host, "node")
        run(pids[host], ["sh", "-c", f"vhpc setup {role} || [ $? -eq 1 ]"], timeout_s=_TIMEOUT_S)


_VERSIONS = 'for file; do dpkg-deb -W --showformat="\\${Package} \\${Version}\\n" "$file"; done'
_INSTALLED = 'dpkg-query -W -f "\\${Package} \\${Version}\\n" "$@" 2>/dev/null || true'
