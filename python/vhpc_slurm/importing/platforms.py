# SPDX-License-Identifier: Apache-2.0
"""The entry of an OCI index whose image runs on an architecture: of the named image, for the wanted variant.

Rules of the OCI image specification 1.1 ("Image Index"); of equals the first entry is taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vhpc_slurm.architecture import Architecture
from vhpc_slurm.importing.tree import RefusedError

NAME_ANNOTATION = "org.opencontainers.image.ref.name"
ATTESTATION = "vnd.docker.reference.type"
"""Annotation of an entry that describes another one (BuildKit)."""

Entry = dict[str, Any]


def may_be_ours(entry: Entry, architecture: Architecture) -> bool:
    """Whether an entry can be an image for an architecture; an index may not name platforms of entries."""
    platform = entry.get("platform")
    if ATTESTATION in _annotations(entry):
        return False
    if not isinstance(platform, dict):
        return True
    return (platform.get("architecture"), platform.get("os")) == architecture.oci_platform


def inherited(inner: Entry, outer: Entry) -> Entry:
    """An entry of the index that another entry points to, with the names and the platform of that one."""
    annotations = _annotations(inner) | _annotations(outer)
    return {"platform": outer.get("platform")} | inner | {"annotations": annotations}


def chosen(entries: Iterable[Entry], name: str, variant: str, architecture: Architecture) -> Entry:
    """The entry of an image.

    Args:
        entries: that may be for this platform.
        name: of the image; empty if there is only one.
        variant: of the processor, such as ``v3``; empty for the lowest, which runs on most.
        architecture: that the entries may be for.

    Raises:
        RefusedError: there is no such image, or there are several.
    """
    images: dict[str, list[Entry]] = {}
    for entry in entries:
        images.setdefault(_name(entry), []).append(entry)
    if name and name not in images:
        raise RefusedError(f"it has no image named {name!r} for linux on {architecture.oci}")
    if not images:
        raise RefusedError(f"it has no image for linux on {architecture.oci}")
    if not name and len({found[0]["digest"] for found in images.values()}) > 1:
        raise RefusedError(
            f"it has several images, write one of their names after the path: {', '.join(sorted(images)[:8])}"
        )
    found = images[name] if name else next(iter(images.values()))
    variants = [_variant(entry, architecture) for entry in found]
    wanted = variant or min(variants)
    if wanted in variants:
        return found[variants.index(wanted)]
    known = ", ".join(sorted(set(variants)))
    raise RefusedError(f"it has no variant {variant!r}, only {known}")


def _name(entry: Entry) -> str:
    """The name of an entry's image: entries of one name are one image, for several processors.

    So are entries without a name, if the index says their platforms.
    """
    unnamed = "" if isinstance(entry.get("platform"), dict) else entry["digest"]
    return str(_annotations(entry).get(NAME_ANNOTATION, unnamed))


def _variant(entry: Entry, architecture: Architecture) -> str:
    """The variant of an entry, which need not name the one that runs on all processors."""
    platform = entry.get("platform")
    named = platform.get("variant") if isinstance(platform, dict) else ""
    return str(named or architecture.oci_baseline)


def _annotations(entry: Entry) -> Entry:
    found = entry.get("annotations")
    return found if isinstance(found, dict) else {}
