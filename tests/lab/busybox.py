# SPDX-License-Identifier: Apache-2.0
"""A container with the tools of busybox, made by umoci and skopeo."""

from __future__ import annotations

import subprocess
from pathlib import Path

BUSYBOX = Path("/bin/busybox")  # static; package busybox-static


def umoci(*arguments: str | Path) -> None:
    subprocess.run(["umoci", *arguments], check=True, capture_output=True)


def docker_archive(top: Path) -> Path:
    """A container of two layers in a folder, as ``docker save`` writes it."""
    image = f"{top}/layout:box"
    umoci("init", "--layout", top / "layout")
    umoci("new", "--image", image)
    umoci("unpack", "--image", image, top / "one")
    root = top / "one/rootfs"
    for name in ("bin", "etc", "opt/tool/bin", "removed"):
        (root / name).mkdir(parents=True)
    (root / "bin/busybox").write_bytes(BUSYBOX.read_bytes())
    (root / "bin/busybox").chmod(0o755)
    listed = subprocess.run([BUSYBOX, "--list"], check=True, capture_output=True, text=True).stdout
    for name in listed.split():
        if name != "busybox":
            (root / "bin" / name).symlink_to("busybox")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nservice:x:990:990::/:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    (root / "opt/tool/bin/tool").write_text("#!/bin/sh\necho the tool of the container\n")
    (root / "opt/tool/bin/tool").chmod(0o755)
    (root / "removed/file").write_text("x")
    (root / "owned").write_text("x")
    umoci("repack", "--image", image, top / "one")
    umoci("unpack", "--image", image, top / "two")
    root = top / "two/rootfs"
    (root / "removed/file").unlink()
    (root / "removed").rmdir()
    subprocess.run(["chown", "990:990", root / "owned"], check=True)
    umoci("repack", "--image", image, top / "two")
    umoci(
        "config", "--image", image, "--config.env", "PATH=/opt/tool/bin:/usr/bin:/bin",
        "--config.env", "GREETING=hello from the image", "--config.entrypoint", "tool",
        "--config.env", "com.example.conf-dir=/etc/x", "--config.env", "BASH_FUNC_m%%=() {\n}",
    )  # fmt: skip
    subprocess.run(
        ["skopeo", "copy", "--quiet", f"oci:{image}", f"docker-archive:{top}/box.tar:box:1"], check=True
    )
    return top / "box.tar"
