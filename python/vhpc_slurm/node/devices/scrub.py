# SPDX-License-Identifier: Apache-2.0
"""Clears a GPU after a guest by a command: the site's, or NVIDIA's own.

A reset restores the registers of a GPU; whether it clears the memory depends on
the model.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess

from vhpc_slurm.config import Devices
from vhpc_slurm.device import NVIDIA
from vhpc_slurm.node.devices.device_class import NotCleanError

TOOL = "nvidia_gpu_tools.py"
WHERE = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/opt/gpu-admin-tools"


def command(config: Devices, address: str, vendor: int) -> tuple[str, ...]:
    """The command that clears this GPU; empty if only the reset does.

    NVIDIA's tool clears the memory of Pascal and later, after a reset of the
    secondary bus (its --help).
    """
    if config.gpu_scrub:
        return tuple(word.replace("{address}", address) for word in config.gpu_scrub)
    tool = shutil.which(TOOL, path=WHERE) if vendor == NVIDIA else None
    if tool is None:
        return ()
    return (tool, f"--gpu-bdf={address}", "--reset-with-sbr", "--clear-memory")


def scrub(config: Devices, address: str, vendor: int) -> None:
    """Clear a GPU.

    Raises:
        NotCleanError: the command failed, or took too long.
    """
    argv = command(config, address, vendor)
    if not argv:
        return
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
        raise NotCleanError(f"GPU {address} cannot be cleared", f"{argv[0]}: {err.strerror}") from err
    try:
        said, _ = child.communicate(timeout=config.scrub_timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.returncode = -9  # it may be blocked in the kernel by a GPU that hangs
        assert child.stdout is not None
        child.stdout.close()
        raise NotCleanError(
            f"GPU {address} was not cleared within {config.scrub_timeout_s} s", argv[0]
        ) from None
    if child.returncode:
        words = " | ".join(said.decode(errors="replace").split("\n")[-4:]).strip(" |")
        raise NotCleanError(
            f"GPU {address} was not cleared", f"{argv[0]}: status {child.returncode}: {words[-300:]}"
        )
