# SPDX-License-Identifier: Apache-2.0
"""The digest of a source's content: of a container without reading its layers."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from vhpc_slurm.importing.fetch import INSPECTED_MAX
from vhpc_slurm.importing.sandbox import run_worker
from vhpc_slurm.importing.source import DISKS, Source

MEMORY_MAX = 1 << 30
"""Bytes of address space of the process that reads the source."""


def identify(source: Source, timeout_s: float) -> str:
    """``sha256:HEX``; empty for a tar and for a folder, which state no digest.

    It is the digest that an import notes in the manifest, and of a disk image that of its file. For an
    image of a registry, ``offer.look`` gives it.

    Raises:
        UserError: the source is refused.
    """
    if source.kind in {"tar", "dir"}:
        return ""
    if source.kind in DISKS:
        with source.path.open("rb") as file:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    with tempfile.TemporaryDirectory(prefix="vhpc-") as folder:
        request = {
            "only_digest": True,
            "max_bytes": INSPECTED_MAX,
            "max_files": 1,
            "max_memory": MEMORY_MAX,
            "timeout_s": int(timeout_s),
        }
        found = run_worker(source, Path(folder), request, timeout_s, lambda _line: None)
    digest = found.get("digest")
    return digest if isinstance(digest, str) else ""
