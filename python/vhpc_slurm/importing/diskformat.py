# SPDX-License-Identifier: Apache-2.0
"""Checks what a user calls a disk image, and converts it to raw; runs in the sandbox.

The format is the one that the user states. oslo.utils reads the headers of all formats that it
knows: a file that matches another one, or two, is refused. qemu-img gets a descriptor and the
stated format, and nothing else that it could open is in the sandbox.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from vhpc_slurm.importing.tree import RefusedError

CHUNK = 1 << 20
VIRTUAL_MAX = 1 << 40
"""Maximum bytes that a disk may claim to have; what it has is limited by ``max_bytes``."""
EXPECTED = {"qcow2": {"qcow2"}, "vmdk": {"vmdk"}, "raw": {"raw", "gpt"}}
"""Stated format -> what oslo.utils may call it: a raw disk with a table of partitions is "gpt"."""
POLL_S = 0.1
NAMES = {"backing_file": "it has a backing file", "data_file": "it has an external data file"}
SECTOR = 512

# docs/interop/qcow2.rst of QEMU: offsets in the header, big endian.
CRYPT_METHOD, L1_SIZE, REFCOUNT_CLUSTERS, SNAPSHOTS, CLUSTER_BITS, SIZE = 32, 36, 56, 60, 20, 24
CLUSTER_BITS_MAX, REFCOUNT_BYTES_MAX = 21, 8 << 20


def convert(source: IO[bytes], kind: str, target: Path, max_bytes: int, step: Callable[[str], None]) -> str:
    """Check a disk image and write its content as a sparse raw file.

    Args:
        source: the image, open at its beginning.
        kind: its stated format: ``qcow2``, ``vmdk`` or ``raw``.
        target: file to write.
        max_bytes: limit of what the disk contains.
        step: is told what is done.

    Returns:
        ``sha256:HEX`` of the image file.

    Raises:
        RefusedError: it has another format, a part that is not permitted, or too much content.
    """
    step(f"checking the {kind} file")
    digest, size = inspect(source, kind)
    if not 0 < size <= VIRTUAL_MAX:
        raise RefusedError(f"its disk has {size} bytes; 1 byte to {VIRTUAL_MAX >> 40} TiB are permitted")
    if kind == "qcow2":
        check_qcow2(source, size)
    if shutil.which("qemu-img") is None:
        raise RefusedError("qemu-img, which converts disk images, is not installed (package qemu-utils)")
    step("converting the disk")
    _run_convert(source, kind, target, max_bytes)
    return digest


def inspect(source: IO[bytes], kind: str) -> tuple[str, int]:
    """The sha256 of a disk image and the size of its disk in bytes; errors as ``convert``."""
    try:
        from oslo_utils.imageutils import format_inspector
    except ImportError as err:
        why = f"{err} (the Python packages oslo.utils, 8 or newer, and cryptography are needed)"
        raise RefusedError(f"disk images cannot be checked: {why}") from None
    digest, size = hashlib.sha256(), 0
    try:
        with os.fdopen(os.dup(source.fileno()), "rb") as again:  # the wrapper closes what it reads
            wrapper = format_inspector.InspectWrapper(again)
            while chunk := wrapper.read(CHUNK):
                digest.update(chunk)
                size += len(chunk)
            wrapper.close()
        found = {str(one): one for one in wrapper.formats or ()}
    except format_inspector.ImageFormatError as err:
        raise RefusedError(f"it is not a sound {kind} file: {err}") from err
    names = set(found)
    if not names or not names <= EXPECTED[kind]:
        what = " and ".join(sorted(names)) or "no disk image"
        raise RefusedError(f"it is not a {kind} file: its content is {what}")
    inspector = found[names.pop()]
    try:
        inspector.safety_check()
    except format_inspector.SafetyCheckFailed as err:
        why = "; ".join(NAMES.get(name, str(text)) for name, text in sorted(err.failures.items()))
        raise RefusedError(why) from err
    virtual = size if kind == "raw" else int(inspector.virtual_size)
    return f"sha256:{digest.hexdigest()}", virtual


def check_qcow2(source: IO[bytes], size: int) -> None:
    """Check what oslo.utils leaves to others: tables, snapshots, encryption; RefusedError."""
    source.seek(0, os.SEEK_END)
    length = source.tell()
    source.seek(0)
    head = source.read(SECTOR)
    if len(head) < SECTOR:
        raise RefusedError("it ends within its header")
    (bits,) = struct.unpack_from(">I", head, CLUSTER_BITS)
    crypt, entries = struct.unpack_from(">II", head, CRYPT_METHOD)
    (table_at,) = struct.unpack_from(">Q", head, L1_SIZE + 4)
    refcount_clusters, snapshots = struct.unpack_from(">II", head, REFCOUNT_CLUSTERS)
    if crypt:
        raise RefusedError("it is encrypted")
    if snapshots:
        raise RefusedError(f"it has {snapshots} snapshots; remove them: qemu-img snapshot -d")
    if not 9 <= bits <= CLUSTER_BITS_MAX:
        raise RefusedError(f"its clusters have 2^{bits} bytes; 2^9 to 2^{CLUSTER_BITS_MAX} are possible")
    needed = -(-size // (1 << bits) // ((1 << bits) // 8))
    if entries > needed + 1 or table_at % (1 << bits) or table_at + entries * 8 > length:
        raise RefusedError(f"its first table makes no sense: {entries} entries at byte {table_at}")
    if refcount_clusters << bits > REFCOUNT_BYTES_MAX + (1 << bits):
        raise RefusedError("its table of reference counts is too large")


def _run_convert(source: IO[bytes], kind: str, target: Path, max_bytes: int) -> None:
    """Let qemu-img write the raw file, and end it when the file has too much content."""
    options = f"driver={kind},file.driver=file,file.locking=off,file.filename=/dev/fd/{source.fileno()}"
    argv = ["qemu-img", "convert", "--image-opts", "-O", "raw", "-S", "4k", options, str(target)]
    with tempfile.TemporaryFile() as said:
        with subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said, pass_fds=[source.fileno()]
        ) as run:
            while run.poll() is None:
                time.sleep(POLL_S)
                if _allocated(target) > max_bytes:
                    run.kill()
        if _allocated(target) > max_bytes:
            raise RefusedError(f"it has more than {max_bytes >> 20} MiB when unpacked")
        if run.returncode != 0:
            said.seek(0)
            text = said.read(4000).decode("utf-8", "replace").strip().splitlines()
            raise RefusedError(f"qemu-img cannot convert it: {text[-1][:300] if text else run.returncode}")


def _allocated(path: Path) -> int:
    try:
        return path.stat().st_blocks * SECTOR
    except FileNotFoundError:
        return 0
