# SPDX-License-Identifier: Apache-2.0
"""The initrd of an image; docs/image-format.md has its form."""

from __future__ import annotations

from collections.abc import Mapping

from vhpc_slurm.bootfiles.newc import Archive


def initrd(init: bytes, agent: bytes, modules: Mapping[str, bytes], epoch: int) -> bytes:
    """The initrd's bytes, which depend on the arguments only.

    Args:
        init: the program vhpc-init.
        agent: the program vhpc-agent.
        modules: files of ``/modules``: kernel modules, and the lists that vhpc-init reads.
        epoch: time of all files, in seconds since 1970.
    """
    archive = Archive(mtime=epoch)
    archive.character_device("dev/console", 5, 1)
    archive.file("init", init, 0o755)
    archive.file("vhpc-agent", agent, 0o755)
    for name, data in modules.items():
        archive.file(f"modules/{name}", data)
    return archive.to_bytes()
