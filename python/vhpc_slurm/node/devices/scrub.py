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
from collections.abc import Sequence

from vhpc_slurm.config import Devices
from vhpc_slurm.device import NVIDIA
from vhpc_slurm.node.devices.device_class import NotCleanError
from vhpc_slurm.node.host.attribute import Until

TOOL = "nvidia_gpu_tools.py"
WHERE = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/opt/gpu-admin-tools"


def command(config: Devices, address: str, vendor: int) -> tuple[str, ...]:
    """The command that clears this GPU; empty if only the reset does.

    NVIDIA's tool clears the memory of Pascal and later, after a reset of the
    secondary bus (its --help).
    """
    if config.gpu_scrub:
        return tuple(word.replace("{address}", address) for word in config.gpu_scrub)
    own = tool() if vendor == NVIDIA else ""
    return (own, f"--gpu-bdf={address}", "--reset-with-sbr", "--clear-memory") if own else ()


def tool() -> str:
    """The path of NVIDIA's tool; empty if it is not installed."""
    return shutil.which(TOOL, path=WHERE) or ""


def scrub(config: Devices, address: str, vendor: int, until: Until) -> None:
    """Clear a GPU.

    Raises:
        NotCleanError: the command failed, or took too long.
    """
    if argv := command(config, address, vendor):
        run(argv, f"GPU {address} was not cleared", until)


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
