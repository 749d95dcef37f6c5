# SPDX-License-Identifier: Apache-2.0
"""Images: the catalogue, and what users need to import images."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from vhpc_slurm.architecture import of_machine
from vhpc_slurm.catalog import site_catalog
from vhpc_slurm.cli.host.checks import CheckResult, error, ok, warn
from vhpc_slurm.config import Config
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.model import ImageRef

TOOLS = {
    "bwrap": "bubblewrap",
    "mkfs.erofs": "erofs-utils",
    "skopeo": "skopeo",
    "veritysetup": "cryptsetup-bin",
    "zstd": "zstd",
}
_OWN = of_machine(platform.machine())
DISK_TOOLS = {("qemu-img",): "qemu-utils", _OWN.programs: _OWN.qemu_package}
"""Programs of an import, or others instead, with Debian's packages."""
TRIAL = ("--unshare-all", "--unshare-user", "--disable-userns", "--ro-bind", "/", "/", "echo", "works")
TIMEOUT_S = 10.0
SEARCH = "/usr/sbin:/usr/bin:/sbin:/bin"


def catalogue(config: Config) -> CheckResult:
    """Whether the catalogue is readable here and has images."""
    path = Path(config.images.catalog)
    if not path.is_dir():
        return error(
            "catalogue",
            f"{path} does not exist",
            "mount the catalogue, or correct images.catalog in vhpc.toml",
        )
    try:
        images = site_catalog(config.images).images()
    except (VhpcError, OSError) as err:
        return error("catalogue", f"{path} cannot be read: {err}", "make it readable on every node")
    if not images:
        return warn("catalogue", f"{path} has no images", "publish one: docs/image-format.md")
    broken = [entry for entry in images if entry.identity is None]
    if broken:
        more = f", and {len(broken) - 1} more" if len(broken) > 1 else ""
        return warn("catalogue", f"{broken[0].problem}{more}", "publish it again, or remove its name")
    return ok("catalogue", f"{path} has {len(images)} images")


def import_kernel(config: Config) -> Iterator[CheckResult]:
    """Whether the image whose kernel imports get can give one."""
    name, site = config.images.import_kernel, site_catalog(config.images)
    if not name:
        return
    try:
        image = site.resolve(ImageRef.parse(name))
        manifest = site.read_manifest(image.digest, name)
    except VhpcError as err:
        yield error("images.import_kernel", err.line(), "correct images.import_kernel, or publish that image")
        return
    if manifest.verity:
        yield ok("images.import_kernel", f"imports get the kernel of {image.ref}")
    else:
        why = f"the root of {image.ref} has no hash tree, so roots of imports have none"
        yield warn("images.import_kernel", why, "build that image again: docs/image-format.md")


def import_tools(config: Config) -> Iterator[CheckResult]:
    """Whether users can import images on this host."""
    if not (config.images.import_kernel or config.images.user_catalog):
        return
    check = "images.import"
    missing = {package for tool, package in TOOLS.items() if shutil.which(tool, path=SEARCH) is None}
    if missing:
        names = " ".join(sorted(missing))
        yield warn(check, f"users cannot import images here: {names} is missing", f"apt install {names}")
    elif "--tar" not in _output("mkfs.erofs", "--help"):
        hint = "install erofs-utils 1.7 or newer, or let users import on another host"
        yield warn(check, "users cannot import images here: mkfs.erofs does not read tars", hint)
    elif "--disable-userns" in (said := _output("bwrap", *TRIAL)):
        hint = "install bubblewrap 0.8 or newer, or let users import on another host"
        yield warn(check, "users cannot import images here: bwrap does not know --disable-userns", hint)
    elif said.strip() != "works":
        hint = "allow user namespaces without privileges: kernel.unprivileged_userns_clone, AppArmor"
        yield warn(check, "users cannot import images here: bwrap does not work", hint)
    else:
        yield ok(check, "users can import containers here")
        yield _disk_tools("images.import_disks")


def _disk_tools(check: str) -> CheckResult:
    """Whether users can import disk images on this host."""
    missing = [package for tools, package in DISK_TOOLS.items() if not any(map(_found, tools))]
    if missing:
        names = " ".join(missing)
        return warn(
            check, f"users cannot import disk images here: {names} is missing", f"apt install {names}"
        )
    try:
        import_module("oslo_utils.imageutils.format_inspector")
    except ImportError as err:
        hint = "install the Python packages oslo.utils, 8 or newer, and cryptography, for vhpc's Python"
        return warn(check, f"users cannot import disk images here: {err}", hint)
    return ok(check, "users can import disk images here")


def _found(tool: str) -> bool:
    """Whether a program is installed, by its name or path."""
    return shutil.which(tool, path=SEARCH) is not None


def _output(*command: str) -> str:
    """The output of a program; empty if it cannot be run."""
    try:
        done = subprocess.run(
            command, env={"PATH": SEARCH}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return done.stdout + done.stderr
