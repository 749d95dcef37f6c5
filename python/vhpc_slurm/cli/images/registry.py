# SPDX-License-Identifier: Apache-2.0
"""vhpc image push and pull."""

from __future__ import annotations

from pathlib import Path

import msgspec

from vhpc_slurm.catalog import resolve
from vhpc_slurm.cli import output
from vhpc_slurm.cli.progress import progress
from vhpc_slurm.config.images import Images
from vhpc_slurm.importing import pull as pulling
from vhpc_slurm.importing import push as pushing
from vhpc_slurm.model import ImageRef


def push(images: Images, catalog: Path, name: str, reference: str, *, as_json: bool) -> int:
    """Put an image into a registry; errors as ``importing.push``."""
    done = pushing.push(images, resolve(catalog, ImageRef.parse(name)), catalog, reference, progress)
    if as_json:
        output.write_json(msgspec.to_builtins(done))
    else:
        print(f"{done.reference} {done.registry_digest}")
    return 0


def pull(images: Images, catalog: Path, reference: str, target: str, *, as_json: bool) -> int:
    """Put an image of a registry into a catalogue; errors as ``importing.pull``."""
    done = pulling.pull(images, reference, ImageRef.parse(target), catalog, progress)
    if as_json:
        output.write_json(msgspec.to_builtins(done))
    else:
        print(f"{done.image} {done.digest}")
        if not done.changed:
            progress("the name pointed to the same image before")
    return 0
