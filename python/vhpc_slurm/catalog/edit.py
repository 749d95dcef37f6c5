# SPDX-License-Identifier: Apache-2.0
"""Changes to a catalogue that is a folder: names are moved and removed, unused images deleted.

The process needs the rights of the catalogue's owner; root does not work in a folder of
another user, whose links it would follow. Each change is made under the catalogue's lock,
which publishers also hold, and each step leaves a catalogue that readers can use: a
process may be killed between any two.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from vhpc_slurm import files, pointers
from vhpc_slurm.catalog.changes import changing, check_new_name, left_folders, locked, make_folder, place
from vhpc_slurm.catalog.folder import SIGNATURES_SIZE, FolderCatalog
from vhpc_slurm.catalog.manifest import with_list
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import ImageIdentity, ImageRef

MANIFEST_FILE = re.compile(r"[0-9a-f]{64}\.json\Z", re.ASCII)
BLOB_FILE = re.compile(r"[0-9a-f]{64}\Z", re.ASCII)
UNFINISHED_FILE = re.compile(r"\.new-")
"""A file that a publisher writes; while its lock is held by another process, that publisher is dead."""


@dataclass(frozen=True)
class Removal:
    """An image or file that ``collect`` deletes, or would delete; size in bytes.

    ``kind`` is manifest, blob, signature, or file (an unfinished one of a killed publisher).
    """

    kind: str
    name: str
    size: int


@dataclass(frozen=True)
class Collection:
    """Result of ``collect``.

    Attributes:
        removed: what was deleted.
        waiting: digests of images without a name that are kept for now, and for how many seconds.
        broken: manifests that cannot be read, one line each. While there are any, no blob is deleted,
            because they may need it.
    """

    removed: tuple[Removal, ...]
    waiting: tuple[tuple[str, float], ...]
    broken: tuple[str, ...]


def tag(catalog: Path, source: ImageRef, target: ImageRef) -> tuple[ImageIdentity, ...]:
    """Let a name point to the images of another name, one for each architecture, or to that of a digest.

    Images of other architectures stay under the new name. Returns the images under the new name.

    Raises:
        UserError: no such image, the new name has a digest, or the catalogue cannot be changed.
        FabricError: the catalogue cannot be read.
    """
    check_new_name(target, "NAME[:TAG]")
    before: dict[str, str] = {}
    with locked(catalog):
        folder = FolderCatalog(catalog)
        images = folder.all_of(source)
        path = folder.name_file(target)
        with contextlib.suppress(OSError):
            before |= folder.pointed(target)
        before |= {image.manifest.arch: image.digest for image in images}
        with changing(catalog):
            make_folder(path.parent)
            place(path, pointers.encode(before))
    return tuple(ImageIdentity(target, image.digest, image.manifest) for image in images)


def remove(catalog: Path, ref: ImageRef) -> tuple[str, ...]:
    """Remove a name; returns the digests that it pointed to, empty if it had none.

    Manifest and blobs stay until ``collect``.

    Raises:
        UserError: there is no such name, or the catalogue cannot be changed.
    """
    if ref.digest:
        raise UserError(f"{ref} is not a name", "it has a digest", "write NAME[:TAG]")
    folder = FolderCatalog(catalog)
    path = folder.name_file(ref)
    with locked(catalog), changing(catalog):
        try:
            digests = tuple(folder.pointed(ref).values())
            path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"the catalogue has no image {ref}", "", "see: vhpc image ls") from None
        files.sync_folder(path.parent)
        with contextlib.suppress(OSError):
            path.parent.rmdir()  # unless it has other tags
    return digests


def add_signature(catalog: Path, image: ImageIdentity, signature: bytes) -> bool:
    """Add a signature of an image's manifest; False if the catalogue has it.

    Raises:
        UserError: the catalogue cannot be changed, or the image has as many signatures as are read.
        FabricError: the catalogue cannot be read.
    """
    with locked(catalog):
        return append_signature(catalog, image, signature)


def append_signature(catalog: Path, image: ImageIdentity, signature: bytes) -> bool:
    """``add_signature`` for a caller that holds the catalogue's lock."""
    folder = FolderCatalog(catalog)
    before = folder.read_signed(image).signatures
    if signature in before:
        return False
    if len(before) + len(signature) > SIGNATURES_SIZE:
        raise UserError(
            f"image {image.ref} has too many signatures",
            f"they may have {SIGNATURES_SIZE} bytes together",
            "ask the catalogue's owner to remove some",
        )
    path = folder.signatures_file(image.digest)
    with changing(catalog):
        make_folder(path.parent)
        place(path, before + signature)
    return True


def collect(catalog: Path, keep_s: float, *, dry_run: bool = False) -> Collection:
    """Delete images that no name has pointed to for ``keep_s`` seconds, and files of killed publishers.

    A job that starts, or waits with NAME@DIGEST, may still need an image that has lost its name.
    So the first call that finds an image without a name marks it (``unnamed/sha256/HEX``), and a
    later one deletes it; ``keep_s`` = 0 deletes at once. Blobs are deleted with the last manifest
    that needs them.

    Raises:
        UserError: the catalogue cannot be changed.
        FabricError: it cannot be read.
    """
    with locked(catalog), changing(catalog):
        named = _named(catalog)
        removed, waiting, broken = [], [], []
        needed: set[str] = set()
        for path in _files(catalog / "manifests/sha256", MANIFEST_FILE):
            digest = "sha256:" + path.name.removesuffix(".json")
            left_s = _time_left(catalog, digest, named, keep_s, dry_run=dry_run)
            if left_s == 0:
                removed.append(_delete("manifest", path, dry_run=dry_run))
                continue
            if left_s is not None:
                waiting.append((digest, left_s))
            try:
                needed.update(blob.sha256 for blob in with_list(FolderCatalog(catalog).load_manifest(digest)))
            except UserError as err:
                broken.append(err.line())
        if not broken:
            unused = (path for path in _files(catalog / "blobs/sha256", BLOB_FILE) if path.name not in needed)
            removed += [_delete("blob", path, dry_run=dry_run) for path in unused]
        gone = {item.name for item in removed if item.kind == "manifest"}
        removed += _delete_signatures(catalog, gone, dry_run=dry_run)
        fixed = [catalog / name for name in ("manifests/sha256", "blobs/sha256", "signatures/sha256")]
        for folder in (*fixed, *_name_folders(catalog)):
            removed += [_delete("file", path, dry_run=dry_run) for path in _files(folder, UNFINISHED_FILE)]
        removed += [_delete_folder(path, dry_run=dry_run) for path in left_folders(catalog)]
    return Collection(tuple(removed), tuple(waiting), tuple(broken))


def _time_left(catalog: Path, digest: str, named: set[str], keep_s: float, *, dry_run: bool) -> float | None:
    """Seconds for which an image without a name is still kept; 0: delete it now; None: it has a name."""
    mark = catalog / "unnamed" / "sha256" / digest.removeprefix("sha256:")
    since = time.time()
    if digest in named:
        if not dry_run:
            mark.unlink(missing_ok=True)
        return None
    try:
        since = mark.stat().st_mtime
    except FileNotFoundError:
        if not dry_run and keep_s > 0:
            mark.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            mark.touch(mode=0o644)
    left_s = max(0.0, since + keep_s - time.time())
    if left_s == 0 and not dry_run:
        mark.unlink(missing_ok=True)
    return left_s


def _named(catalog: Path) -> set[str]:
    """Digests that names point to."""
    found, folder = set(), FolderCatalog(catalog)
    for ref in folder.refs():
        # a name that is a link to nothing, or a folder, points to no image
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            found |= set(folder.pointed(ref).values())
    return found


def _name_folders(catalog: Path) -> list[Path]:
    return sorted(path for path in (catalog / "names").iterdir() if path.is_dir() and not path.is_symlink())


def _files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Regular files with such a name; others are not the catalogue's."""
    try:
        found = [path for path in folder.iterdir() if pattern.match(path.name)]
    except FileNotFoundError:
        return []
    return sorted(path for path in found if stat.S_ISREG(path.lstat().st_mode))


def _delete_signatures(catalog: Path, gone: set[str], *, dry_run: bool) -> list[Removal]:
    """Delete the signatures of manifests that do not exist, or are in ``gone``."""
    manifests = {path.stem for path in _files(catalog / "manifests/sha256", MANIFEST_FILE)} - gone
    found = _files(catalog / "signatures/sha256", BLOB_FILE)
    return [_delete("signature", path, dry_run=dry_run) for path in found if path.name not in manifests]


def _delete_folder(path: Path, *, dry_run: bool) -> Removal:
    """Delete the folder of a killed import."""
    size = sum(found.lstat().st_size for found in path.rglob("*") if found.is_file())
    if not dry_run:
        shutil.rmtree(path, ignore_errors=True)
    return Removal("file", path.name, size)


def _delete(kind: str, path: Path, *, dry_run: bool) -> Removal:
    size = path.lstat().st_size
    if not dry_run:
        path.unlink()
    return Removal(kind, path.name.removesuffix(".json"), size)
