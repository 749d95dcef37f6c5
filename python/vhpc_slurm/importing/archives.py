# SPDX-License-Identifier: Apache-2.0
"""Containers as folders or tars: the OCI image layout, and docker's archive.

Formats: the OCI image specification 1.1 ("Image Layout", "Image Manifest", "Image
Configuration"), and the "Combined Image JSON + Filesystem Changeset Format" of Moby's
image specification 1.2. Sizes and digests in an archive are checked against its parts.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import IO, Any, Protocol

from vhpc_slurm.architecture import X86_64, Architecture
from vhpc_slurm.importing import platforms
from vhpc_slurm.importing.headers import Header
from vhpc_slurm.importing.tree import RefusedError

JSON_MAX = 4 << 20
LAYERS_MAX = 1024
PARTS_MAX = 65536
"""Maximum files in an archive."""
INDEX_DEPTH, INDEXES_MAX = 4, 256
DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z", re.ASCII)
INDEX_TYPES = {
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
}
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
MANIFEST_TYPES = {
    MANIFEST_TYPE,
    "application/vnd.docker.distribution.manifest.v2+json",
}
LAYER_TYPES = {
    "application/vnd.oci.image.layer.v1.tar": "",
    "application/vnd.oci.image.layer.v1.tar+gzip": "gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd": "zstd",
    "application/vnd.oci.image.layer.nondistributable.v1.tar": "",
    "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip": "gzip",
    "application/vnd.oci.image.layer.nondistributable.v1.tar+zstd": "zstd",
    "application/vnd.docker.image.rootfs.diff.tar": "",
    "application/vnd.docker.image.rootfs.diff.tar.gzip": "gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd": "zstd",
}


class Files(Protocol):
    """The files of a layout, by their paths in it."""

    def open(self, path: str) -> IO[bytes]:
        """The bytes of a file; RefusedError if there is none of that name."""


@dataclass(frozen=True)
class Layer:
    """A layer, before it is unpacked.

    ``diff_id`` is the digest that its unpacked tar must have; ``digest`` that of the bytes in
    the archive, empty if the archive states none.
    """

    path: str
    compression: str
    diff_id: str
    digest: str = ""
    size: int = -1


@dataclass(frozen=True)
class Container:
    """A container image: its layers, the lowest first, and its configuration.

    ``digest`` is the name of the image in registries, the digest of its manifest; docker's
    archives have no manifest, and theirs is the digest of the configuration.
    """

    files: Files
    layers: tuple[Layer, ...]
    config: dict[str, Any]
    digest: str


class Folder:
    """Files of a folder. The sandbox has nothing else to read that a link could lead to."""

    def __init__(self, top: Path) -> None:
        self._top = top

    def open(self, path: str) -> IO[bytes]:
        """The bytes of a regular file."""
        try:
            fd = os.open(self._top / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as err:
            raise RefusedError(f"it has no file {path}: {err.strerror}") from err
        file = os.fdopen(fd, "rb")
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            file.close()
            raise RefusedError(f"its {path} is not a regular file")
        return file


class Archive:
    """Files of an uncompressed tar."""

    def __init__(self, tar: Path) -> None:
        self._tar = tar
        self._places: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        try:
            with tarfile.open(
                tar, "r:", tarinfo=Header, encoding="utf-8", errors="surrogateescape"
            ) as archive:
                for number, entry in enumerate(archive):
                    if number >= PARTS_MAX:
                        raise RefusedError(f"it has more than {PARTS_MAX} files")
                    self._remember(entry)
        except (tarfile.TarError, ValueError, OverflowError, OSError, RecursionError) as err:
            raise RefusedError(f"it is not a sound, uncompressed tar: {err}") from err

    def _remember(self, entry: tarfile.TarInfo) -> None:
        name = posixpath.normpath(entry.name)
        if entry.isreg() and not entry.issparse():
            self._places[name] = (entry.offset_data, entry.size)
        elif entry.issym():
            self._links[name] = posixpath.normpath(posixpath.join(posixpath.dirname(name), entry.linkname))

    def open(self, path: str) -> IO[bytes]:
        """The bytes of a file; one link is followed, with which docker avoids equal layers."""
        place = self._places.get(self._links.get(posixpath.normpath(path), posixpath.normpath(path)))
        if place is None:
            raise RefusedError(f"it has no file {path}")
        return BufferedReader(_Part(self._tar, *place))


class _Part(RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, path: Path, offset: int, size: int) -> None:
        self._file = path.open("rb", buffering=0)
        self._file.seek(offset)
        self._left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        got = self._file.readinto(memoryview(buffer)[: min(len(buffer), self._left)]) or 0
        self._left -= got
        return got

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def checked(container: Container, layer: Layer) -> Iterator[IO[bytes]]:
    """The bytes of a layer; on exit RefusedError if they were not those of its digest and size."""
    with container.files.open(layer.path) as file:
        reader = _Hashed(file)
        yield BufferedReader(reader)
        while reader.read(1 << 20):  # what a decompressor has left
            pass
    if layer.digest and f"sha256:{reader.digest.hexdigest()}" != layer.digest:
        raise RefusedError(f"the layer {layer.digest} has other bytes: sha256:{reader.digest.hexdigest()}")
    if layer.size not in {-1, reader.size}:
        raise RefusedError(f"the layer {layer.digest} has {reader.size} bytes instead of {layer.size}")


class _Hashed(RawIOBase):
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest, self.size = hashlib.sha256(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self.digest.update(data)
        self.size += len(data)
        return len(data)


def read_layout(files: Files, name: str, variant: str = "", architecture: Architecture = X86_64) -> Container:
    """The image of an OCI layout.

    Args:
        files: those of the layout.
        name: of one of its images; empty if it has only one for this platform.
        variant: of the processor, such as ``v3``; empty for the one that runs on most.
        architecture: of the wanted image.

    Raises:
        RefusedError: it is damaged, or has no such image, or several.
    """
    index = _json(files.open("index.json"), "index.json")
    found = _manifests(files, index, INDEX_DEPTH, iter(range(INDEXES_MAX)), architecture)
    chosen = platforms.chosen(found, name, variant, architecture)
    manifest = _described(files, chosen, "a manifest", _blob)
    return _container(files, manifest, str(chosen["digest"]), _blob, architecture)


def read_fetched(files: Files, architecture: Architecture = X86_64) -> Container:
    """The image that skopeo has fetched into a folder (its format ``dir``); errors as ``read_layout``."""
    with files.open("manifest.json") as file:
        raw = file.read(JSON_MAX + 1)
    manifest = _parsed(raw, "manifest.json", dict)
    if str(manifest.get("mediaType", MANIFEST_TYPE)) not in MANIFEST_TYPES:
        raise RefusedError(f"its manifest is of the unknown type {str(manifest['mediaType'])[:100]!r}")
    return _container(files, manifest, f"sha256:{hashlib.sha256(raw).hexdigest()}", _hex, architecture)


def _container(
    files: Files,
    manifest: dict[str, Any],
    digest: str,
    place: Callable[[str], str],
    architecture: Architecture,
) -> Container:
    """The image of a manifest; ``place``: the file of a digest."""
    config = _described(files, _part(manifest, "config", dict, "the manifest"), "a configuration", place)
    _check_platform(config, architecture)
    descriptors = _part(manifest, "layers", list, "the manifest")
    diff_ids = _diff_ids(config)
    if len(descriptors) != len(diff_ids):
        raise RefusedError(f"it has {len(descriptors)} layers, but its configuration has {len(diff_ids)}")
    layers = tuple(
        _layer(entry, diff_id, place) for entry, diff_id in zip(descriptors, diff_ids, strict=True)
    )
    return Container(files, layers, config, digest)


def read_docker(files: Files, name: str, architecture: Architecture = X86_64) -> Container:
    """The image of an archive that ``docker save`` wrote; arguments and errors as ``read_layout``."""
    images = _json(files.open("manifest.json"), "manifest.json", list)
    if not all(isinstance(image, dict) for image in images):
        raise RefusedError("its manifest.json is not a list of images")
    if name:
        images = [image for image in images if _docker_name(name) in map(_docker_name, _tags(image))]
    if len(images) != 1:
        count = "several images, write the name of one after the path" if images else "no such image"
        raise RefusedError(f"it has {count}")
    path = str(_part(images[0], "Config", str, "manifest.json"))
    with files.open(path) as file:
        raw = file.read(JSON_MAX + 1)
    config = _parsed(raw, path, dict)
    _check_platform(config, architecture)
    paths, diff_ids = _part(images[0], "Layers", list, "manifest.json"), _diff_ids(config)
    if len(paths) != len(diff_ids) or not all(isinstance(entry, str) for entry in paths):
        raise RefusedError(f"it has {len(paths)} layers, but its configuration has {len(diff_ids)}")
    layers = tuple(Layer(entry, "", diff_id) for entry, diff_id in zip(paths, diff_ids, strict=True))
    return Container(files, layers, config, f"sha256:{hashlib.sha256(raw).hexdigest()}")


def _tags(image: dict[str, Any]) -> list[str]:
    found = image.get("RepoTags") or []
    return [str(tag) for tag in found] if isinstance(found, list) else []


def _docker_name(name: str) -> str:
    """A name with its tag, without what docker adds and skopeo writes into archives."""
    tagged = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
    return tagged.removeprefix("docker.io/").removeprefix("library/")


def _manifests(
    files: Files, index: dict[str, Any], depth: int, numbers: Iterator[int], architecture: Architecture
) -> Iterator[dict[str, Any]]:
    """Descriptors of the manifests for this platform; indexes may contain others, one for each number."""
    for entry in _part(index, "manifests", list, "an index"):
        if not isinstance(entry, dict) or not DIGEST.match(str(entry.get("digest"))):
            raise RefusedError("an index has an entry without a sha256 digest")
        if not platforms.may_be_ours(entry, architecture):
            continue
        if str(entry.get("mediaType")) in MANIFEST_TYPES:
            yield entry
        elif str(entry.get("mediaType")) in INDEX_TYPES:
            if depth == 0:
                raise RefusedError("it has indexes in indexes in indexes")
            if next(numbers, None) is None:
                raise RefusedError(f"it has more than {INDEXES_MAX} indexes")
            deeper = _described(files, entry, "an index", _blob)
            for inner in _manifests(files, deeper, depth - 1, numbers, architecture):
                yield platforms.inherited(inner, entry)


def _layer(entry: Any, diff_id: str, place: Callable[[str], str]) -> Layer:
    if not isinstance(entry, dict) or not DIGEST.match(str(entry.get("digest"))):
        raise RefusedError("a layer has no sha256 digest")
    kind, size = str(entry.get("mediaType")), entry.get("size")
    if kind not in LAYER_TYPES:
        raise RefusedError(f"a layer is of the unknown type {kind[:100]!r}")
    if type(size) is not int or size < 0:
        raise RefusedError("a layer has no size")
    return Layer(place(entry["digest"]), LAYER_TYPES[kind], diff_id, entry["digest"], size)


def _blob(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _diff_ids(config: dict[str, Any]) -> list[str]:
    found = _part(_part(config, "rootfs", dict, "the configuration"), "diff_ids", list, "the configuration")
    if len(found) > LAYERS_MAX:
        raise RefusedError(f"it has more than {LAYERS_MAX} layers")
    if not all(DIGEST.match(str(entry)) for entry in found):
        raise RefusedError("a layer has a digest that is not a sha256")
    return [str(entry) for entry in found]


def _check_platform(config: dict[str, Any], architecture: Architecture) -> None:
    platform = (config.get("architecture"), config.get("os"))
    if platform != architecture.oci_platform:
        wanted = f"linux on {architecture.oci}"
        raise RefusedError(f"it is for {platform[1]} on {platform[0]}, not for {wanted}")


def _described(
    files: Files, descriptor: dict[str, Any], what: str, place: Callable[[str], str]
) -> dict[str, Any]:
    """The JSON object that a descriptor points to."""
    digest = str(descriptor.get("digest"))
    if not DIGEST.match(digest):
        raise RefusedError(f"{what} has no sha256 digest")
    with files.open(place(digest)) as file:
        raw = file.read(JSON_MAX + 1)
    if f"sha256:{hashlib.sha256(raw).hexdigest()}" != digest:
        raise RefusedError(f"{what} has other bytes than its digest {digest}")
    found: dict[str, Any] = _parsed(raw, what, dict)
    return found


def _json(file: IO[bytes], what: str, kind: Callable[[], Any] = dict) -> Any:
    with file:
        return _parsed(file.read(JSON_MAX + 1), what, kind)


def _parsed(raw: bytes, what: str, kind: Any) -> Any:
    if len(raw) > JSON_MAX:
        raise RefusedError(f"{what} has more than {JSON_MAX >> 20} MiB")
    try:
        found = json.loads(raw.decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as err:
        raise RefusedError(f"{what} is not JSON: {err}") from err
    if not isinstance(found, kind):
        raise RefusedError(f"{what} is not a JSON {'object' if kind is dict else 'array'}")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; readers differ in which of two equal keys they take."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return found


def _part(of: dict[str, Any], key: str, kind: Any, what: str) -> Any:
    found = of.get(key)
    if not isinstance(found, kind):
        raise RefusedError(f"{what} has no valid {key!r}")
    return found
