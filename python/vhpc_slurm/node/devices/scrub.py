# SPDX-License-Identifier: Apache-2.0
"""Clears a GPU after a guest by a command: the site's, or NVIDIA's own.

A reset restores the registers of a GPU; whether it clears the memory depends on
the model.

Sources: NVIDIA's gpu-admin-tools (commit 82422cc1): cli/per_gpu.py, which prints an error and ends with 0 for
a GPU whose memory it cannot clear; memory_clear_supported in nvidia_gpu_tools.py: Turing and later, although
--help says Pascal; pci.ids: GV100 has numbers to 1df6, TU102 from 1e02.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence

from vhpc_slurm.config import Devices
from vhpc_slurm.device import NVIDIA
from vhpc_slurm.node.devices.device_class import NotCleanError
from vhpc_slurm.node.host.attribute import Until

TOOL = "nvidia_gpu_tools.py"
TURING = 0x1E00
"""Smallest PCI device number of NVIDIA's GPUs whose memory the tool clears."""
UNSUPPORTED = "Clearing memory not supported"
WHERE = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/opt/gpu-admin-tools"


def command(config: Devices, address: str, vendor: int, device: int) -> tuple[str, ...]:
    """The command that clears a GPU of these PCI numbers; empty if only the reset does.

    NVIDIA's tool clears the memory after a reset of the secondary bus (its --help).
    """
    if config.gpu_scrub:
        return tuple(word.replace("{address}", address) for word in config.gpu_scrub)
    own = tool() if vendor == NVIDIA and device >= TURING else ""
    return (own, f"--gpu-bdf={address}", "--reset-with-sbr", "--clear-memory") if own else ()


def tool() -> str:
    """The path of NVIDIA's tool; empty if it is not installed."""
    return shutil.which(TOOL, path=WHERE) or ""


def scrub(config: Devices, address: str, vendor: int, device: int, until: Until) -> None:
    """Clear a GPU.

    Raises:
        NotCleanError: the command failed, took too long, or does not support the GPU.
    """
    if argv := command(config, address, vendor, device):
        failed = f"GPU {address} was not cleared"
        if UNSUPPORTED in run(argv, failed, until) and not config.gpu_scrub:
            why = f"{argv[0]} does not support it"
            raise NotCleanError(failed, why, "install a newer one, or set devices.gpu_scrub")


def run(argv: Sequence[str], failed: str, until: Until) -> str:
    """The output of a command for a GPU; NotCleanError, which begins with ``failed``, if it failed."""
    seconds = until.left
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
            env={"PATH": WHERE, "LC_ALL": "C.UTF-8"},
        )
    except OSError as err:
        raise NotCleanError(failed, f"{argv[0]}: {err.strerror}") from err
    try:
        said, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.returncode = -9  # it may be blocked in the kernel by a GPU that hangs
        assert child.stdout is not None
        child.stdout.close()
        raise NotCleanError(f"{failed} within {round(seconds)} s", argv[0]) from None
    text = said.decode(errors="replace")
    if child.returncode:
        words = " | ".join(text.split("\n")[-4:]).strip(" |")
        raise NotCleanError(failed, f"{argv[0]}: status {child.returncode}: {words[-300:]}")
    return text
