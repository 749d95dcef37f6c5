# SPDX-License-Identifier: Apache-2.0
"""The source of an import, as written on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vhpc_slurm.architecture import X86_64
from vhpc_slurm.errors import UserError

REGISTRY = "docker://"
DISKS = ("qcow2", "raw", "vmdk")
KINDS = ("oci", "oci-archive", "docker-archive", "tar", "dir", *DISKS)
INDEXED = ("docker", "oci", "oci-archive")
"""Kinds that can have an index of images for several processors."""
TAR_SUFFIXES = {".tar": "", ".tar.gz": "gzip", ".tgz": "gzip", ".tar.zst": "zstd"}
"""Suffix of a tar file -> its compression. The name states the format; bytes are never probed."""
FORMS = (
    "docker://NAME, oci:DIR[:NAME], oci-archive:FILE[:NAME], docker-archive:FILE[:NAME], tar:FILE, dir:DIR, "
    "qcow2:FILE, raw:FILE or vmdk:FILE"
)


@dataclass(frozen=True)
class Source:
    """``KIND:PATH[:NAME]``; ``name`` selects one of several images in an archive.

    ``compression`` is that of a tar file: empty, ``gzip`` or ``zstd``. An image of a registry is
    of kind ``docker`` and has no path; when it is fetched, its kind is ``fetched`` and its path a
    folder. ``name`` is its reference; ``digest`` pins it to a manifest or an index. ``variant``
    of the processor chooses one of an index, such as ``v3``; empty: the one that runs on most.
    ``arch`` is the architecture of the wanted image.
    """

    kind: str
    path: Path
    name: str = ""
    compression: str = ""
    digest: str = ""
    variant: str = ""
    arch: str = X86_64.name

    def __str__(self) -> str:
        if self.kind in {"docker", "fetched"}:
            return f"{REGISTRY}{self.name}"
        return f"{self.kind}:{self.path}{':' if self.name else ''}{self.name}"

    @property
    def pinned(self) -> str:
        """The reference for a registry, by digest instead of tag where there is one."""
        if not self.digest:
            return self.name
        name = self.name.partition("@")[0]
        above, slash, last = name.rpartition("/")
        return f"{above}{slash}{last.partition(':')[0]}@{self.digest}"

    @property
    def label(self) -> str:
        """For the manifest: without the folders of a path."""
        if self.kind == "docker":
            return str(self)
        return f"{self.kind}:{self.path.name}{':' if self.name else ''}{self.name}"

    @classmethod
    def parse(cls, text: str) -> Source:
        """Parse ``docker://NAME``, ``KIND:PATH[:NAME]`` or a path of a folder, tar or disk."""
        if text.startswith(REGISTRY):
            return cls("docker", Path(), text.removeprefix(REGISTRY))
        kind, colon, rest = text.partition(":")
        if not colon or kind not in KINDS:
            if "://" in text or (colon and "/" not in kind and not Path(text).exists()):
                raise UserError(f"cannot import {text!r}", f"{kind} is not one of its sources", FORMS)
            kind, rest = _kind_of(text), text
        name = ""
        if kind not in {"tar", "dir", *DISKS}:
            rest, _, name = rest.partition(":")
        if not rest:
            raise UserError(f"cannot import {text!r}", "it has no path", FORMS)
        return cls(kind, Path(rest).absolute(), name, _compression(rest) if kind == "tar" else "")


def is_source(text: str) -> bool:
    """Whether a text is ``docker://NAME`` or ``KIND:PATH``; names of images have no slash after a colon."""
    kind, _, rest = text.partition(":")
    return text.startswith(REGISTRY) or (kind in KINDS and "/" in rest)


def _kind_of(path: str) -> str:
    """The kind of a path alone: a folder, a disk image by its suffix, or a tar."""
    suffix = Path(path).suffix.removeprefix(".")
    return "dir" if Path(path).is_dir() else suffix if suffix in DISKS else "tar"


def _compression(path: str) -> str:
    for suffix, compression in TAR_SUFFIXES.items():
        if path.endswith(suffix):
            return compression
    raise UserError(
        f"cannot import {path!r}",
        "its name does not end in .tar, .tar.gz, .tgz, .tar.zst, .qcow2, .raw or .vmdk",
        f"the name states the format; or write it before the path: {FORMS}",
    )
