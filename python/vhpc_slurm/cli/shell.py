# SPDX-License-Identifier: Apache-2.0
"""vhpc shell: an interactive shell in a guest, in one command."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from vhpc_slurm import slurm
from vhpc_slurm.catalog import own_folder
from vhpc_slurm.cli import context
from vhpc_slurm.config import Config
from vhpc_slurm.importing.imports import import_image
from vhpc_slurm.importing.source import Source, is_source
from vhpc_slurm.model import ImageRef

SHELL = "command -v bash >/dev/null 2>&1 && exec bash -i; exec sh -i"
SLUG_SIZE = 48


def run(config: Config, what: str, srun_options: Sequence[str]) -> NoReturn:
    """Replace this process by srun with a shell in a guest; what is no image yet is imported first.

    Raises:
        UserError: the import is refused.
        SlurmError: there is no srun.
    """
    image = _imported(config, what) if is_source(what) else str(ImageRef.parse(what))
    arguments = ["--pty", f"--vhpc-image={image}", *srun_options, "/bin/sh", "-c", SHELL]
    slurm.user_jobs(config).become_srun(arguments)


def _imported(config: Config, what: str) -> str:
    source = Source.parse(what)
    target = ImageRef(name_for(source), own=True)
    catalog = own_folder(config.images.user_catalog, context.user_name())

    def progress(line: str) -> None:
        print(f"vhpc: {line}", file=sys.stderr, flush=True)

    done = import_image(config.images, source, target, catalog, "", progress)
    progress(f"{source} is {target.label} {'now' if done.changed else 'already'}")
    return f"{target.label}@{done.digest}"


def name_for(source: Source) -> str:
    """A name for an image of a source: readable, and another one for each source."""
    text = source.name if source.kind == "docker" else f"{source.path.name}-{source.name}"
    slug = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[-SLUG_SIZE:].lstrip("-.")
    return "-".join(filter(None, (slug, hashlib.sha256(str(source).encode()).hexdigest()[:8])))
