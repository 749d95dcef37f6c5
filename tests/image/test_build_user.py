# SPDX-License-Identifier: Apache-2.0
"""The builder run by an ordinary user with a range in /etc/subuid: files keep their owners."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
UID, FIRST, COUNT = 4321, 2_000_000, 65536
NAME = "imagebuilder"
PYTHON = "/usr/bin/python3"
"""The builder needs the standard library only; the tests' interpreter may be in a folder of root's."""
NAMESPACE = """
set -eu
for name in passwd group subuid subgid; do mount --bind "$1/$name" /etc/$name; done
exec runuser -u imagebuilder -- env HOME="$1/home" SOURCE_DATE_EPOCH=1700000000 "$2" "$3" --json \
    --output "$1/home/catalog" --cache "$1/home/cache" --agent "$4" --init "$5" "$6"
"""
"""The account exists in a mount namespace of the test only."""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder for others, too: each session of pytest closes the folder of all its temporary ones."""
    with tempfile.TemporaryDirectory(prefix="vhpc-test-", dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.promise("build.user")
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="run as root: the test makes an account")
@pytest.mark.skipif(shutil.which("newuidmap") is None, reason="apt install uidmap")
def test_an_ordinary_user_builds_an_image(open_folder: Path, standin: Path, init: Path) -> None:
    accounts, home = Path("/etc/passwd").read_text(), open_folder / "home"
    (open_folder / "passwd").write_text(f"{accounts}{NAME}:x:{UID}:{UID}::{home}:/bin/sh\n")
    (open_folder / "group").write_text(f"{Path('/etc/group').read_text()}{NAME}:x:{UID}:\n")
    for name in ("subuid", "subgid"):
        (open_folder / name).write_text(f"{NAME}:{FIRST}:{COUNT}\n")
    home.mkdir()
    os.chown(home, UID, UID)
    programs = [Path(shutil.copy(program, open_folder)) for program in (standin, init)]
    builder, recipe = CHECKOUT / "vmimages/build", CHECKOUT / "vmimages/recipes/debian-minimal.toml"
    words = [open_folder, PYTHON, builder, *programs, recipe]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", NAMESPACE, "sh", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    made = json.loads(done.stdout)
    catalog = home / "catalog"
    manifest = json.loads((catalog / f"manifests/sha256/{made['digest'][7:]}.json").read_text())
    root = catalog / "blobs/sha256" / manifest["root"]["sha256"]
    assert root.stat().st_uid == UID
    owners = {path: owner(root, path) for path in ("/etc/shadow", "/usr/bin/chage", "/")}
    assert owners == {"/etc/shadow": (0, 42, "0640"), "/usr/bin/chage": (0, 42, "0755"), "/": (0, 0, "0755")}
    assert not list((home / "cache").glob("*.work*")), "nothing is left that only a namespace can remove"


def owner(root: Path, path: str) -> tuple[int, int, str]:
    """Owner, group and mode of a file of a root, as dump.erofs prints them, which is without setuid bits."""
    done = subprocess.run(["dump.erofs", f"--path={path}", root], check=True, capture_output=True, text=True)
    words = done.stdout.replace(":", " ").split()
    at = {word: words[number + 1] for number, word in enumerate(words[:-1])}
    return int(at["Uid"]), int(at["Gid"]), at["Access"].partition("/")[0]
