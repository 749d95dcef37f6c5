# SPDX-License-Identifier: Apache-2.0
"""Runs the worker of an import: bubblewrap, a system call filter, limits, no network.

The worker reads files that somebody made to be read by others. It sees the system's programs
(read-only), the source (read-only) and one folder to write, in namespaces of its own, without
capabilities; whatever takes it over can spoil that import and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import selectors
import shlex
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import vhpc_slurm
from vhpc_slurm.architecture import named
from vhpc_slurm.errors import UserError
from vhpc_slurm.importing.listing import ROOT
from vhpc_slurm.importing.source import DISKS, Source
from vhpc_slurm.progress import Amount
from vhpc_slurm.terminal import one_line

OUTPUT_MAX = 4 << 20
"""Maximum bytes that the worker may write to its output."""
SIZE_MAX = 1 << 60
TIME_TO_END_S = 10.0
KVM = "/dev/kvm"
ISOLATION = """
    --unshare-all --unshare-user --disable-userns --die-with-parent --new-session --cap-drop ALL
    --clearenv --setenv PATH /usr/bin:/bin --setenv LC_ALL C.UTF-8
    --proc /proc --dev /dev --chdir / --ro-bind /usr /usr
"""
SYSTEM = ("/bin", "/lib", "/lib32", "/lib64", "/sbin", "/etc/alternatives", "/etc/ld.so.cache")
START = "import sys; sys.path.insert(0, {!r}); from vhpc_slurm.importing.worker import main; sys.exit(main())"

# Numbers from the kernel's arch/x86/entry/syscalls/syscall_64.tbl.
_OF_X86_64 = {
    "socket": 41, "socketpair": 53, "ptrace": 101, "pivot_root": 155, "chroot": 161, "mount": 165,
    "umount2": 166, "swapon": 167, "reboot": 169, "init_module": 175, "kexec_load": 246, "add_key": 248,
    "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298, "open_by_handle_at": 304,
    "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "finit_module": 313,
    "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsmount": 432, "pidfd_getfd": 438, "mount_setattr": 442,
}  # fmt: skip
# Numbers from the kernel's include/uapi/asm-generic/unistd.h.
_OF_AARCH64 = {
    "socket": 198, "socketpair": 199, "ptrace": 117, "pivot_root": 41, "chroot": 51, "mount": 40,
    "umount2": 39, "swapon": 224, "reboot": 142, "init_module": 105, "kexec_load": 104, "add_key": 217,
    "request_key": 218, "keyctl": 219, "unshare": 97, "perf_event_open": 241, "open_by_handle_at": 265,
    "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "finit_module": 273,
    "kexec_file_load": 294, "bpf": 280, "userfaultfd": 282, "io_uring_setup": 425, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsmount": 432, "pidfd_getfd": 438, "mount_setattr": 442,
}  # fmt: skip
CALLS = {
    "x86_64": (0xC000003E, _OF_X86_64 | {"clone": 56}),
    "aarch64": (0xC00000B7, _OF_AARCH64 | {"clone": 220}),
}
"""Architecture -> its number in include/uapi/linux/audit.h, and those of calls that the filter knows."""
CLONE3 = 435
FAMILIES = (2, 10, 16)
"""AF_INET, AF_INET6, and AF_NETLINK, by which the C library asks which addresses the host has."""
NEW_NAMESPACES = 0x7E020080
"""All CLONE_NEW… flags of clone(2)."""
_X32_BIT = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38


def run_worker(
    source: Source,
    out: Path,
    request: dict[str, Any],
    timeout_s: float,
    progress: Callable[[str], None],
    boot: Mapping[str, Path] = MappingProxyType({}),
) -> dict[str, Any]:
    """Let the worker read a source and write ``root.erofs`` into ``out``.

    Args:
        source: what to read; with the caller's rights.
        out: an empty folder.
        request: what the worker is told, without the source; ``memory``: bytes that it may write below
            /memory, where files are gone with the sandbox.
        timeout_s: seconds after which it is killed.
        progress: gets a line for each step.
        boot: names in ``/in/boot`` of the sandbox -> files of the site.

    Returns:
        what the worker found; not to be trusted.

    Raises:
        UserError: the source is refused, the worker failed, or a tool is missing.
    """
    if shutil.which("bwrap") is None:
        raise UserError("cannot import an image", "bwrap is missing", "install the package bubblewrap")
    asked = request | {
        "kind": source.kind,
        "name": source.name,
        "variant": source.variant,
        "arch": source.arch,
        "compression": source.compression,
    }
    with (
        call_filter(network=False) as seccomp,
        subprocess.Popen(
            _command(source, out, seccomp, boot, int(request.get("memory", 0))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[seccomp],
        ) as run,
    ):
        try:
            return _talk(run, asked, source, timeout_s, progress)
        finally:
            run.kill()
            _wait_for_end(run)


def confined(*, network: bool) -> list[str]:
    """bwrap with the options that all sandboxes have: namespaces, no capabilities, the system's programs."""
    argv = ["bwrap", *shlex.split(ISOLATION), *(["--share-net"] if network else [])]
    for path in SYSTEM:
        if Path(path).is_symlink():
            argv += ["--symlink", str(Path(path).readlink()), path]
        else:
            argv += ["--ro-bind-try", path, path]
    return argv


def _command(source: Source, out: Path, seccomp: int, boot: Mapping[str, Path], memory: int) -> list[str]:
    package = Path(vhpc_slurm.__file__).parent
    argv = [*confined(network=False), "--setenv", "TMPDIR", "/out"]
    for prefix in dict.fromkeys((sys.base_prefix, sys.prefix, str(package))):
        if not Path(prefix).is_relative_to("/usr"):
            argv += ["--ro-bind", prefix, prefix]
    if source.kind == ROOT:
        argv += ["--uid", "1000", "--gid", "1000"]  # fsck.erofs skips what only root could unpack
    argv += ["--ro-bind", str(source.path), "/in/source", "--bind", str(out), "/out"]
    if memory > 0:
        argv += ["--size", str(memory), "--tmpfs", "/memory"]
    for name, path in boot.items():
        argv += ["--ro-bind", str(path), f"/in/boot/{name}"]
    if source.kind in DISKS:
        argv += ["--dev-bind-try", KVM, KVM]
    argv += ["--seccomp", str(seccomp), "--"]
    return [*argv, sys.executable, "-I", "-B", "-c", START.format(str(package.parent))]


def _talk(
    run: subprocess.Popen[bytes],
    asked: dict[str, Any],
    source: Source,
    timeout_s: float,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Send the request, relay the steps, return the result; errors as ``run_worker``."""
    assert run.stdin is not None
    with contextlib.suppress(BrokenPipeError), run.stdin:
        run.stdin.write(json.dumps(asked).encode())
    noise = ""
    for line in _lines(run, source, time.monotonic() + timeout_s):
        try:
            said = json.loads(line)
            kind, value = next(iter(said.items()))
        except (ValueError, AttributeError, StopIteration, RecursionError):
            noise = line.decode("utf-8", "replace").strip() or noise
            continue
        if kind == "step":
            progress(one_line(str(value)[:200]))
        elif kind == "amount" and (amount := _amount(value)) is not None:
            progress(amount)
        elif kind == "refused":
            raise UserError(f"cannot import {source}", str(value)[:500])
        elif kind == "done" and isinstance(value, dict):
            return value
    status = run.wait(timeout=TIME_TO_END_S)
    raise UserError(f"cannot import {source}", f"its reader ended with status {status}: {noise[-300:]}")


def _amount(value: object) -> Amount | None:
    """An amount of bytes of the worker, which may write anything."""
    match value:
        case [str(what), int(done), int(total)] if 0 <= done < SIZE_MAX and 0 <= total < SIZE_MAX:
            return Amount(one_line(what[:40]), done, total)
        case _:
            return None


def _lines(run: subprocess.Popen[bytes], source: Source, until: float) -> Iterator[bytes]:
    """Lines of the worker's output, up to its end."""
    assert run.stdout is not None
    data, total = b"", 0
    with selectors.DefaultSelector() as ready:
        ready.register(run.stdout, selectors.EVENT_READ)
        while ready.select(max(0.0, until - time.monotonic())):
            chunk = os.read(run.stdout.fileno(), 65536)
            total += len(chunk)
            if not chunk:
                yield data
                return
            if total > OUTPUT_MAX:
                raise UserError(f"cannot import {source}", "its reader wrote too much")
            *lines, data = (data + chunk).split(b"\n")
            yield from lines
    raise UserError(f"cannot import {source}", "it took too long", "images.import_timeout_s is the limit")


def _wait_for_end(run: subprocess.Popen[bytes]) -> None:
    """The kernel ends the sandbox's processes soon after bwrap; the last one closes the pipe."""
    assert run.stdout is not None
    until = time.monotonic() + TIME_TO_END_S
    with selectors.DefaultSelector() as ready:
        ready.register(run.stdout, selectors.EVENT_READ)
        while ready.select(max(0.0, until - time.monotonic())):
            if not os.read(run.stdout.fileno(), 65536):
                return


@contextlib.contextmanager
def call_filter(*, network: bool) -> Iterator[int]:
    """A descriptor with the system call filter, as bwrap --seccomp reads it. ``network``: with sockets."""
    fd = os.memfd_create("filter", 0)
    try:
        os.write(fd, _program(network=network))
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def _program(*, network: bool, arch: str = "") -> bytes:
    """The filter of an architecture, this machine's by default (seccomp(2), struct sock_filter): calls for
    namespaces, mounts, tracing and sockets fail with EPERM, calls of another ABI kill the process.

    With ``network``, sockets of FAMILIES are permitted. Those of Unix are not: in the network namespace of
    the host they reach abstract sockets of other programs.
    """
    number, architecture, first_argument = 0, 4, 16  # offsets in struct seccomp_data
    audit, calls = CALLS[named(arch or platform.machine()).name]
    steps: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, architecture),
        (_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, number),
        (_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _KILL),
        # the C library then uses clone, whose flags can be read
        (_EQUAL, 0, 1, CLONE3),
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),
    ]
    for name, call in calls.items():
        if name == "clone":
            continue  # permitted without new namespaces, below
        if name == "socket" and network:
            steps += [(_EQUAL, 0, 3 + len(FAMILIES), call), (_LOAD, 0, 0, first_argument)]
            steps += [(_EQUAL, len(FAMILIES) - at, 0, one) for at, one in enumerate(FAMILIES)]
            steps += [(_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ALLOW)]
        else:
            steps += [(_EQUAL, 0, 1, call), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    steps += [
        (_EQUAL, 0, 3, calls["clone"]),
        (_LOAD, 0, 0, first_argument),
        (_ANY_BIT, 0, 1, NEW_NAMESPACES),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
