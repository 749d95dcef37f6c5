# SPDX-License-Identifier: Apache-2.0
"""A job without Slurm: its hooks are called on a node with what Slurm would tell them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

DRIVER = Path(__file__).with_name("killed_prolog.py").read_text()
PYTHON = ("/opt/vhpc/bin/python", "-I", "-")
KILLED = 128 + 9


class Said(Protocol):
    """The output of a command on a node."""

    @property
    def code(self) -> int: ...
    @property
    def out(self) -> str: ...


class ByHand:
    """Such a job; ``lease`` are the words of killed_prolog.py's open.

    ``run`` runs a command on the node, and ``control`` on a host of slurmctld.
    vhpcd ends the lease within a minute unless Slurm has a running job ``job_id``.
    """

    ids = itertools.count(int(time.time()) % 10**8 * 10 + 10**9)

    def __init__(
        self,
        run: Callable[..., Said],
        control: Callable[..., Said],
        node: str,
        image: str,
        *lease: str,
        job_id: int | None = None,
    ) -> None:
        self.run, self.control, self.id = run, control, job_id or next(self.ids)
        self.env = (
            "env",
            "-i",
            f"SLURM_JOB_ID={self.id}",
            f"SLURMD_NODENAME={node}",
            f"SPANK_VHPC_IMAGE={image}",
        )
        self.generation = self.drive("open", *lease).out.strip()

    def drive(self, *argv: str, check: bool = True) -> Said:
        """Run killed_prolog.py with these words."""
        where = self.control if argv[0] in ("open", "end") else self.run
        return where(*self.env, *PYTHON, *argv, stdin=DRIVER, check=check)

    def hook(self, name: str, check: bool = True) -> Said:
        """Call a hook as Slurm would."""
        return self.run(*self.env, f"/usr/libexec/vhpc/{name}", check=check)
