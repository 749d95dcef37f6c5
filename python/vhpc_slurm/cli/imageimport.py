# SPDX-License-Identifier: Apache-2.0
"""vhpc image import."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from vhpc_slurm.cli import output
from vhpc_slurm.config.images import Images
from vhpc_slurm.importing.imports import import_image
from vhpc_slurm.importing.source import Source
from vhpc_slurm.model import ImageRef


def run(images: Images, catalog: Path, source: str, target: str, kernel: str, *, as_json: bool) -> int:
    """Import a container or a file tree; errors as ``import_image``."""

    def progress(line: str) -> None:
        print(f"vhpc: {line}", file=sys.stderr, flush=True)

    found = import_image(images, Source.parse(source), ImageRef.parse(target), catalog, kernel, progress)
    if found.special:
        progress(f"{found.special} devices and pipes were left out")
    if as_json:
        output.write_json(msgspec.to_builtins(found))
    else:
        print(f"{found.image} {found.digest}")
        if not found.changed:
            progress("the name pointed to the same image before")
    return 0
