"""Direct kernel boot on q35: no boot loader, no firmware setup, kernel and initrd from the image."""

from __future__ import annotations

from dataclasses import dataclass

from vhpc_slurm.domain.spec import DomainSpec

ROOT_DEVICE = "/dev/vda"


@dataclass(frozen=True)
class BootContext:
    """Values of the boot template."""

    kernel: str
    initrd: str
    cmdline: str


def kernel_cmdline(image_cmdline: str, root_format: str) -> str:
    """The image's words, then those every guest needs and the image does not already have.

    ``panic=-1`` reboots at once, which ends a guest; ``quiet`` because each
    byte on an emulated serial port costs an exit.
    """
    words = image_cmdline.split()
    needed = (
        "console=ttyS0",
        "panic=-1",
        "quiet",
        f"vhpc.root={ROOT_DEVICE}",
        f"vhpc.rootfstype={root_format}",
    )
    return " ".join([*words, *(word for word in needed if word not in words)])


def context(spec: DomainSpec) -> BootContext:
    """Kernel, initrd, command line."""
    return BootContext(spec.kernel, spec.initrd, kernel_cmdline(spec.cmdline, spec.root_format))
