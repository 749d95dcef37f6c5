# SPDX-License-Identifier: Apache-2.0
"""vhpc shell: an interactive shell in a guest, in one command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from vhpc_slurm import slurm
from vhpc_slurm.cli.images import imports as imageimport
from vhpc_slurm.config import Config
from vhpc_slurm.importing.source import is_source
from vhpc_slurm.model import ImageRef

SHELL = "command -v bash >/dev/null 2>&1 && exec bash -i; exec sh -i"


def run(config: Config, what: str, srun_options: Sequence[str]) -> NoReturn:
    """Replace this process by srun with a shell in a guest; what is no image yet is imported first.

    Raises:
        UserError: the import is refused.
        SlurmError: there is no srun.
    """
    image = imageimport.resolve(config, what) if is_source(what) else str(ImageRef.parse(what))
    arguments = ["--pty", f"--vhpc-image={image}", *srun_options, "/bin/sh", "-c", SHELL]
    slurm.user_jobs(config).become_srun(arguments)
