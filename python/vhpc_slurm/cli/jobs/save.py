# SPDX-License-Identifier: Apache-2.0
"""vhpc save: what a running job's guest has in its root becomes an image."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from vhpc_slurm import slurm
from vhpc_slurm.catalog import Owner, catalog_for, resolve_for
from vhpc_slurm.cli import context, options, output
from vhpc_slurm.cli.jobs.steprelay import AGENT
from vhpc_slurm.cli.options import CatalogFolder, JobId, Json, NewImage
from vhpc_slurm.cli.progress import progress
from vhpc_slurm.config import Config
from vhpc_slurm.errors import UserError
from vhpc_slurm.importing.imports import Parent, parent_of, save_files
from vhpc_slurm.model import ImageRef
from vhpc_slurm.progress import Amount
from vhpc_slurm.slurm.steps import MARK

CHUNK = 1 << 20
OF_THE_JOB = (
    "./etc/hostname",
    "./etc/hosts",
    "./etc/resolv.conf",
    "./etc/ssh/ssh_config.d/vhpc.conf",
    "./etc/sudoers.d/vhpc",
    "./tmp/*",
    "./var/tmp/*",
)
"""Files that the agent writes for one job, and temporary files."""
SCRIPT = f"""
echo {MARK}
set -u
if [ "$(id -u)" = 0 ]; then root=
elif command -v sudo >/dev/null; then root="sudo -n"
else echo "the image has no sudo, so the files of root cannot be read" >&2; exit 1
fi
command -v tar >/dev/null || {{ echo "the image has no tar" >&2; exit 1; }}
$root {AGENT} --root-files tar --create --file=- --format=posix --one-file-system --numeric-owner \\
    --sort=name --xattrs --xattrs-include=security.capability --xattrs-include='user.*' \\
    --warning=no-file-changed --anchored \\
    {" ".join(f"--exclude='{path}'" for path in OF_THE_JOB)} . || [ $? = 1 ]
"""
"""Writes all files of the root, but nothing that is mounted over them, to standard output; status 1 of tar: a
file changed meanwhile."""


def save(
    job_id: JobId,
    target: NewImage,
    catalog: CatalogFolder = None,
    as_json: Json = False,
) -> int:
    """Make an image of the files of a running job's first guest, without those of shared folders."""
    config = options.config()
    where, ref = options.catalog(config, catalog, target), ImageRef.parse(target)
    jobs = slurm.user_jobs(config)
    parent = _parent(config, job_id, jobs.image(job_id))

    def files(path: Path) -> None:
        progress(f"reading the files of job {job_id}")
        with jobs.step(job_id, ["/bin/sh", "-c", SCRIPT]) as out, path.open("xb") as tar:
            _copy(out, tar, config.images.import_max_mib << 20, progress)

    source = f"saved from job {job_id}"
    found = save_files(config.images, files, parent, source, ref, where.path, progress, config.host.commands)
    if as_json:
        output.write_json(msgspec.to_builtins(found) | {"parent": parent.image.digest})
    else:
        print(f"{found.image} {found.digest}")
    return 0


def _parent(config: Config, job_id: int, name: str) -> Parent:
    """The image of the job's guests."""
    if not name:
        raise UserError(f"job {job_id} has no guests", "its AdminComment names no image", "see: vhpc shell")
    user = context.user_name()
    owner = Owner(user, os.geteuid())
    image = resolve_for(config.images, ImageRef.parse(name), owner)
    return parent_of(catalog_for(config.images, owner if image.ref.own else None), image)


def _copy(source: IO[bytes], target: IO[bytes], limit: int, progress: Callable[[str], None]) -> None:
    """Copy to the end, and say how much; UserError beyond the limit."""
    size = 0
    while (line := source.readline(CHUNK)) and line != f"{MARK}\n".encode():
        pass
    while chunk := source.read(CHUNK):
        size += len(chunk)
        if size > limit:
            raise UserError(
                "cannot save the job",
                f"its files have more than {limit >> 20} MiB",
                "delete some; the site's limit is images.import_max_mib",
            )
        target.write(chunk)
        progress(Amount("read", size))
