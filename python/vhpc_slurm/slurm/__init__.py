# SPDX-License-Identifier: Apache-2.0
"""Slurm behind one port; ``connect`` chooses the adapter the site configured."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vhpc_slurm.config import Config
    from vhpc_slurm.slurm.job import Slurm


def connect(config: Config) -> Slurm:
    """The adapter named by ``controller.slurm_adapter``.

    Raises:
        SlurmError: pyslurm is wanted and cannot be imported.
    """
    from vhpc_slurm.slurm.scontrol import Scontrol

    settings = config.controller
    commands = Scontrol(settings.slurm_bin, slurm_conf=settings.slurm_conf)
    if settings.slurm_adapter == "pyslurm":
        from vhpc_slurm.slurm.pyslurm_adapter import PySlurm

        return PySlurm(commands)
    return commands
