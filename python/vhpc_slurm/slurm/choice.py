# SPDX-License-Identifier: Apache-2.0
"""Which adapter vhpcd uses where ``controller.slurm_adapter`` is ``pyslurm`` or ``auto``, and why."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vhpc_slurm.slurm.port import Slurm, SlurmError
from vhpc_slurm.slurm.pyslurm_adapter import PySlurm, installed
from vhpc_slurm.slurm.pyslurm_client import SlowError, UnusableError, without_hint

if TYPE_CHECKING:
    from vhpc_slurm.config import Config

__all__ = ["connected", "installed", "trouble"]

log = logging.getLogger("vhpc.slurm")


def connected(config: Config, *, fall_back: bool) -> Slurm:
    """pyslurm; with ``fall_back`` Slurm's commands wherever pyslurm cannot be used.

    Raises:
        UnusableError: pyslurm cannot be used, and ``fall_back`` is false.
    """
    slurm = _pyslurm(config, fall_back=fall_back)
    try:
        log.info("Slurm is asked by %s", slurm.check())
    except (UnusableError, SlowError) as err:
        if fall_back and not installed():
            from vhpc_slurm.slurm import commands

            log.info("Slurm is asked by its commands: %s", err.why)
            return commands(config)
        if fall_back:
            slurm.pause(err)
        elif isinstance(err, UnusableError):
            slurm.close()
            raise
        else:
            log.warning("pyslurm could not be checked: %s", err.line())
    except SlurmError as err:  # slurmctld may start later: each start of pyslurm is checked
        log.warning("pyslurm could not be checked: %s", err.line())
    return slurm


def trouble(config: Config) -> tuple[str, str]:
    """The pyslurm of this host, and why vhpcd must not use it: one of the two is empty.

    Raises:
        SlurmError: Slurm could not be asked.
    """
    slurm = _pyslurm(config, fall_back=False)
    try:
        return str(slurm.check()), ""
    except (UnusableError, SlowError) as err:
        return "", without_hint(err)
    finally:
        slurm.close()


def _pyslurm(config: Config, *, fall_back: bool) -> PySlurm:
    controller = config.controller
    return PySlurm(controller.slurm_bin, slurm_conf=controller.slurm_conf, fall_back=fall_back)
