# SPDX-License-Identifier: Apache-2.0
"""The manifest of an image.

A manifest has exactly one encoding, the canonical form of RFC 8785: keys
sorted, no blanks, every key present. Other bytes are refused, so an image has one
digest, and no two readers can understand its bytes differently (of two equal keys, for
example, some readers take the first and some the last). docs/image-format.md explains
the keys; docs/image-manifest.schema.json is generated from the types here.
"""
# Decision: One digest names an image, and its manifest has one encoding

from __future__ import annotations

import inspect
import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from vhpc_slurm import chunks
from vhpc_slurm.architecture import ARCHITECTURES, KERNEL_TYPE
from vhpc_slurm.model import Blob, ImageManifest

SCHEMA = 1
LIMIT = 1 << 18
"""Maximum bytes of a manifest."""
BOOT_FILE_LIMIT = 512 << 20
"""Maximum bytes of a kernel or initrd: each guest has copies in the node's memory."""
ROOT_LIMIT = 1 << 44
VERITY_BLOCK = 4096
HASHES_PER_BLOCK = 128
"""dm-verity: bytes of a block, of data and of the hash tree, and how many SHA-256 hashes are in one."""
ROOT_FORMATS = {"application/vnd.vhpc.root.erofs": "erofs"}
"""Media type of a root -> its file system, as mount(2) calls it."""
RESERVED_PARAMETERS = frozenset(
    {
        "init",
        "rdinit",
        "initrd",
        "root",
        "rootfstype",
        "rootflags",
        "vhpc.agent.disk",
        "vhpc.disk",
        "vhpc.init",
        "vhpc.root",
        "vhpc.rootfstype",
        "vhpc.verity",
    }
)
"""Kernel parameters that decide what boots: other keys of the manifest have them, or the node."""
FULL_SYSTEM = (
    "fstab=no",
    "systemd.gpt_auto=no",
    "systemd.mask=systemd-remount-fs.service",
    "systemd.firstboot=no",
    "cloud-init=disabled",
    "net.ifnames=0",
    "selinux=0",
    *(
        f"systemd.mask={unit}"
        for unit in (
            "ssh.service",
            "ssh.socket",
            "sshd.service",
            "sshd.socket",
            "NetworkManager-wait-online.service",
            "systemd-networkd-wait-online.service",
        )
    ),
)
"""Kernel parameters for an image with an init of its own, unless it sets them. Its disks, its first boot and
its networks are those of another machine; the agent names the job's interfaces and has its sshd; imports lose
SELinux labels."""

Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
Digest = Annotated[str, Meta(pattern="^(sha256:[0-9a-f]{64})?$", max_length=71)]
Time = Annotated[
    str, Meta(pattern="^([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z)?$", max_length=20)
]
Line = Annotated[str, Meta(max_length=1024)]
ShortLine = Annotated[str, Meta(max_length=128)]
Name = Annotated[str, Meta(pattern="^[A-Za-z0-9_][A-Za-z0-9_.+-]*$", max_length=64)]
LabelKey = Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9._/-]*$", max_length=128)]
VariableName = Annotated[str, Meta(pattern="^[^=]+$", max_length=128)]
AnyText = Annotated[str, Meta(max_length=32768)]
Path = Annotated[str, Meta(pattern="^(/.*)?$", max_length=255)]
Arguments = Annotated[tuple[AnyText, ...], Meta(max_length=256)]
BootSize = Annotated[int, Meta(ge=1, le=BOOT_FILE_LIMIT)]


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the parts of a manifest: an unknown key means a feature that this vhpc lacks."""


class KernelBlob(Strict, frozen=True):
    """The kernel: on x86_64 an ELF file with a PVH entry point, or a bzImage; on aarch64 an ``Image``."""

    media_type: Literal[
        "application/vnd.vhpc.kernel.bzimage",
        "application/vnd.vhpc.kernel.elf",
        "application/vnd.vhpc.kernel.image",
    ]
    sha256: Sha256
    size: BootSize


class InitrdBlob(Strict, frozen=True):
    """The initial RAM file system: a cpio archive (newc), which the kernel may have to decompress."""

    media_type: Literal["application/vnd.vhpc.initrd.cpio"]
    sha256: Sha256
    size: BootSize


class RootBlob(Strict, frozen=True):
    """The root file system, as the bytes of a read-only disk."""

    media_type: Literal["application/vnd.vhpc.root.erofs"]
    sha256: Sha256
    size: Annotated[int, Meta(ge=1, le=ROOT_LIMIT)]


class Verity(Strict, frozen=True):
    """dm-verity of the root: a hash tree follows the data within the blob.

    ``data_size`` is the number of bytes before the tree. Blocks have 4096 bytes, there is no salt
    and no superblock.
    """

    algorithm: Literal["sha256"]
    data_size: Annotated[int, Meta(ge=VERITY_BLOCK, le=ROOT_LIMIT, multiple_of=VERITY_BLOCK)]
    root_hash: Sha256


class Chunks(Strict, frozen=True):
    """The chunk list of the root: its sha256, and the bytes of a chunk (``vhpc_slurm.chunks``)."""

    sha256: Sha256
    size: Annotated[int, Meta(ge=1 << 16, le=1 << 24, multiple_of=VERITY_BLOCK)]


class Process(Strict, frozen=True):
    """The command of an OCI image, from its configuration; empty if the configuration has none."""

    entrypoint: Arguments
    arguments: Arguments
    environment: Annotated[dict[VariableName, AnyText], Meta(max_length=512)]
    user: ShortLine
    working_dir: Path


class Provenance(Strict, frozen=True):
    """Where the image comes from; empty texts: not known.

    ``source`` is what was built or imported, ``source_digest`` its digest, ``parent`` the
    digest of the image that this one was derived from. ``created`` is UTC.
    """

    builder: ShortLine
    created: Time
    parent: Digest
    source: Line
    source_digest: Digest


class Manifest(Strict, frozen=True):
    """All that a manifest says.

    ``min_cpus`` are CPUs as Slurm counts them (hardware threads), ``min_memory_mib`` is the
    memory of a guest in MiB. ``drivers`` maps a kernel module to its version, which is empty
    for modules of the kernel's own source tree. Without ``verity`` the root has no hash
    tree, without ``chunks`` no chunk list.
    """

    schema: Literal[1]
    agent_version: ShortLine
    arch: Annotated[str, Meta(pattern="^[a-z0-9_]+$", max_length=32)]
    cmdline: Annotated[str, Meta(pattern="^[ -~]*$", max_length=1024)]
    description: Line
    drivers: Annotated[dict[Name, ShortLine], Meta(max_length=256)]
    firmware: Literal["bios", "uefi"]
    init: Annotated[str, Meta(pattern="^(agent|/[!#-~]+)$", max_length=255)]
    initrd: InitrdBlob
    kernel: KernelBlob
    labels: Annotated[dict[LabelKey, Line], Meta(max_length=64)]
    min_cpus: Annotated[int, Meta(ge=1, le=4096)]
    min_memory_mib: Annotated[int, Meta(ge=1, le=1 << 24)]
    process: Process
    provenance: Provenance
    root: RootBlob
    chunks: Chunks | msgspec.UnsetType = msgspec.UNSET
    verity: Verity | msgspec.UnsetType = msgspec.UNSET


class _AnySchema(msgspec.Struct):
    schema: int


def decode_manifest(raw: bytes) -> ImageManifest:
    """The parts of a manifest that a lease carries; ValueError if vhpc cannot boot the image as described."""
    return _for_lease(decode_whole(raw))


def decode_whole(raw: bytes) -> Manifest:
    """All that a manifest says, decoded strictly.

    Raises:
        ValueError: it is not a manifest, or vhpc could not boot the image as described; one line.
    """
    if len(raw) > LIMIT:
        raise ValueError(f"it has more than {LIMIT >> 10} KiB")
    try:
        schema = msgspec.json.decode(raw, type=_AnySchema).schema
        if schema == SCHEMA:
            return _decode(raw)
    except RecursionError as err:
        raise ValueError("it is nested too deeply") from err
    except msgspec.MsgspecError as err:  # no ValueError before msgspec 0.20
        raise ValueError(str(err)) from err
    raise ValueError(f"schema {schema}, this vhpc knows {SCHEMA}")


def canonical(manifest: Manifest | dict[str, Any]) -> bytes:
    """The canonical form (RFC 8785): its sha256 is the image's digest.

    All keys are ASCII and all numbers are integers below 2**53; for such values it is JSON
    with sorted keys, without blanks, in UTF-8.
    """
    built = msgspec.to_builtins(manifest)
    return json.dumps(built, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def tree_size(data_size: int) -> int:
    """Bytes of the hash tree of so many bytes of data, as veritysetup(8) makes it without a superblock."""
    level, total = data_size // VERITY_BLOCK, 0
    while level > 1:
        level = -(-level // HASHES_PER_BLOCK)
        total += level
    return total * VERITY_BLOCK


def schema_text() -> str:
    """The JSON schema (draft 2020-12) of a manifest, as text; rules about several keys are not in it."""
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Manifest of a vhpc image, schema {SCHEMA}",
    }
    schema = msgspec.json.schema(Manifest)
    for part in schema["$defs"].values():
        if "description" in part:  # Python before 3.13 keeps the indentation of docstrings
            part["description"] = inspect.cleandoc(part["description"])
    return json.dumps(head | schema, indent=2) + "\n"


def _decode(raw: bytes) -> Manifest:
    manifest = msgspec.json.decode(raw, type=Manifest)
    if canonical(manifest) != raw:
        raise ValueError("its bytes are not in the canonical form of RFC 8785")
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    """Rules that types cannot express."""
    for where, text in _lines(manifest):
        if not text.isprintable():
            raise ValueError(f"{where} has control characters")
    process = manifest.process
    for text in (*process.entrypoint, *process.arguments, *process.environment.values()):
        if "\0" in text:
            raise ValueError("process has a NUL character")
    architecture = ARCHITECTURES.get(manifest.arch)
    kernel = manifest.kernel.media_type
    if architecture and kernel.removeprefix(KERNEL_TYPE) not in architecture.kernels:
        raise ValueError(f"its kernel is of type {kernel}, with which no guest of {manifest.arch} starts")
    if manifest.firmware == "uefi" and manifest.kernel.media_type.endswith(".elf"):
        raise ValueError("firmware uefi needs a bzImage: UEFI does not start an ELF kernel")
    if verity := manifest.verity:
        whole = verity.data_size + tree_size(verity.data_size)
        if manifest.root.size != whole:
            raise ValueError(f"root has {manifest.root.size} bytes, verity says {whole} with the hash tree")
    for word in manifest.cmdline.split(" "):
        # The kernel removes quotation marks, and everything after "--" goes to init.
        if word == "--" or '"' in word:
            raise ValueError(f"cmdline has {word!r}: quotation marks and -- are not allowed")
        if word.partition("=")[0] in RESERVED_PARAMETERS:
            raise ValueError(f"cmdline has {word!r}: the node sets this parameter, or key init does")


def _lines(manifest: Manifest) -> list[tuple[str, str]]:
    """Texts of one line, with their keys."""
    origin, process = manifest.provenance, manifest.process
    return [
        ("agent_version", manifest.agent_version),
        ("arch", manifest.arch),
        ("cmdline", manifest.cmdline),
        ("description", manifest.description),
        ("init", manifest.init),
        *(("drivers", text) for pair in manifest.drivers.items() for text in pair),
        *(("labels", text) for pair in manifest.labels.items() for text in pair),
        *(("process.environment", name) for name in process.environment),
        ("process.user", process.user),
        ("process.working_dir", process.working_dir),
        ("provenance.builder", origin.builder),
        ("provenance.created", origin.created),
        ("provenance.source", origin.source),
    ]


def _for_lease(manifest: Manifest) -> ImageManifest:
    words = [manifest.cmdline] if manifest.cmdline else []
    if manifest.init != "agent":
        words += [f"vhpc.init={manifest.init}", *(word for word in FULL_SYSTEM if not _sets(manifest, word))]
    if verity := manifest.verity:
        words.append(f"vhpc.verity={verity.data_size // VERITY_BLOCK}:{verity.root_hash}")
    return ImageManifest(
        schema=SCHEMA,
        name="",
        tag="",
        arch=manifest.arch,
        kernel=Blob("kernel", manifest.kernel.sha256, manifest.kernel.size),
        initrd=Blob("initrd", manifest.initrd.sha256, manifest.initrd.size),
        root=Blob("root", manifest.root.sha256, manifest.root.size, *_chunks(manifest)),
        root_format=ROOT_FORMATS[manifest.root.media_type],
        init=manifest.init,
        cmdline=" ".join(words),
        min_memory_mib=manifest.min_memory_mib,
        min_cpus=manifest.min_cpus,
        firmware=manifest.firmware,
        drivers=tuple(manifest.drivers),
        driver_versions=tuple((name, version) for name, version in manifest.drivers.items() if version),
        agent_version=manifest.agent_version,
        description=manifest.description,
        created=manifest.provenance.created,
    )


def _chunks(manifest: Manifest) -> tuple[str, int]:
    return (found.sha256, found.size) if (found := manifest.chunks) else ("", 0)


def _sets(manifest: Manifest, parameter: str) -> bool:
    """Whether an image's kernel parameters have this one; with any value, if it can have only one."""
    name = parameter if parameter.startswith("systemd.mask=") else parameter.partition("=")[0] + "="
    return any(word.startswith(name) for word in manifest.cmdline.split())


def blobs(manifest: ImageManifest) -> tuple[Blob, Blob, Blob]:
    """Kernel, initrd and root."""
    return manifest.kernel, manifest.initrd, manifest.root


def chunk_list(blob: Blob) -> Blob | None:
    """The chunk list of a blob, itself a blob of the catalogue; None if it has none."""
    if not blob.chunks:
        return None
    return Blob(f"chunk list of {blob.file}", blob.chunks, chunks.list_size(blob.size, blob.chunk_size))


def with_list(manifest: ImageManifest) -> tuple[Blob, ...]:
    """Kernel, initrd, root, and the chunk list of the root, if it has one."""
    found = chunk_list(manifest.root)
    return (*blobs(manifest), *([found] if found else ()))
