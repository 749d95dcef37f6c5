# SPDX-License-Identifier: Apache-2.0
"""SELinux: whether QEMU may reach sockets and images of guests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vhpc_slurm.cli.host.checks import CheckResult, error, ok, warn
from vhpc_slurm.config import Config
from vhpc_slurm.node.host import selinux


def check(config: Config) -> Iterator[CheckResult]:
    """Compare the labels of vhpc's files with those of its policy; no result where SELinux is off."""
    name, enforcing = "node.selinux", selinux.enforcing()
    if enforcing is None:
        return
    say, effect = (error, "refuses") if enforcing else (warn, "would refuse")
    wanted = {
        config.paths.run: "vhpc_run_t",
        config.images.store: "virt_content_t",
        config.disks.folder: "virt_image_t",
        f"{config.paths.libexec}/vhpc-confine": "vhpc_confine_exec_t",
    }
    for path, label in wanted.items():
        if not Path(path).exists():
            continue
        found = selinux.type_of(path)
        if found != label:
            hint = (
                f"install vhpc-selinux, then: restorecon -R {path}; a folder of the site's own needs before: "
                f"semanage fcontext --add --type {label} '{path}(/.*)?'"
            )
            what = (
                f"{path} has the SELinux type {found or 'of no policy'}, not {label}: SELinux {effect} guests"
            )
            yield say(name, what, hint)
            return
    yield ok(
        name, f"SELinux is {'enforcing' if enforcing else 'permissive'}, with the labels of vhpc's policy"
    )
