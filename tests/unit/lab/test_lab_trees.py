# SPDX-License-Identifier: Apache-2.0
"""`vlab up --tree`: requirements for a system tree, and the places of the tree's Slurm."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LAB = Path(__file__).resolve().parents[3] / "lab"
CHECK = """
import sys
from pathlib import Path
from vlablib.report import LabError
from vlablib.slurmtree import check
try:
    found = check(Path(sys.argv[1]))
except LabError as err:
    sys.exit(str(err))
print(found.prefix, found.conf, found.plugins, found.version, found.bin)
"""
ACCOUNTS = "root slurm munge mysql libvirt-qemu vhpc alice bob"
FILES = """
usr/sbin/munged usr/sbin/mariadbd usr/sbin/libvirtd usr/bin/qemu-system-x86_64 usr/libexec/virtiofsd
usr/bin/python3 usr/bin/setpriv opt/vhpc/bin/python usr/bin/vhpc usr/sbin/vhpcd
"""
FOLDERS = """
scratch shared usr/libexec/vhpc etc/vhpc var/log/vlab home var/lib/mysql/mysql
opt/vhpc/lib/python3.13/site-packages/vhpc_slurm
"""
OF_SLURM = """
sbin/slurmctld sbin/slurmd sbin/slurmdbd bin/scontrol bin/squeue bin/sinfo bin/scancel bin/sacctmgr bin/sacct
bin/sbatch bin/srun bin/salloc bin/sbcast lib/slurm/auth_munge.so lib/slurm/accounting_storage_mysql.so
"""
STRINGS = b"\x7fELF\0/run/slurm/conf/slurm.conf\0%s: no slurm.conf\0/opt/slurm/etc/slurm.conf\0"


def touch(path: Path, data: bytes = b"") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def headers(prefix: Path) -> None:
    touch(prefix / "include/slurm/slurm_version.h", b"#define SLURM_VERSION_NUMBER 0x190b07\n")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = tmp_path / "tree"
    prefix = top / "opt/slurm"
    touch(top / "etc/passwd", "".join(f"{name}:x:1:1::/:/\n" for name in ACCOUNTS.split()).encode())
    for path in (*(top / name for name in FILES.split()), *(prefix / name for name in OF_SLURM.split())):
        touch(path)
    for name in FOLDERS.split():
        (top / name).mkdir(parents=True)
    headers(prefix)
    touch(prefix / "lib/slurm/libslurmfull.so", STRINGS)
    return top


def check(tree: Path) -> tuple[str, str]:
    """What vlab says of a tree: stdout and stderr."""
    command = [sys.executable, "-c", CHECK, str(tree)]
    done = subprocess.run(command, cwd=LAB, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip(), done.stderr.strip()


def test_a_slurm_in_opt_is_found_with_its_folders(tree: Path) -> None:
    assert check(tree) == ("/opt/slurm /opt/slurm/etc /opt/slurm/lib/slurm 25.11.7 /opt/slurm/bin", "")


@pytest.mark.parametrize(
    ("lost", "hint"),
    [
        ("opt/slurm/sbin/slurmdbd", "install all of Slurm below /opt/slurm"),
        ("opt/slurm/lib/slurm/accounting_storage_mysql.so", "libmariadb-dev"),
        ("opt/slurm/lib/slurm/auth_munge.so", "libmunge-dev"),
        ("opt/slurm/include/slurm/slurm_version.h", "make install"),
        ("usr/sbin/libvirtd", "start from a copy of a tree that vlab made"),
        ("etc/passwd", "not a system tree"),
    ],
)
def test_missing_parts_of_a_tree_are_named(tree: Path, lost: str, hint: str) -> None:
    (tree / lost).unlink()
    out, said = check(tree)
    assert (out, lost.rpartition("/")[2] in said, hint in said) == ("", True, True), said


def test_a_missing_account_and_folder_are_named_together(tree: Path) -> None:
    (tree / "etc/passwd").write_text("slurm-old:x:1:1::/:/\n")
    (tree / "shared").rmdir()
    said = check(tree)[1]
    assert "no account slurm in etc/passwd" in said
    assert "no folder shared" in said


def test_a_tree_with_two_slurms_is_refused(tree: Path) -> None:
    headers(tree / "usr")
    said = check(tree)[1]
    assert "several Slurms, in /opt/slurm and /usr;" in said


def test_a_link_to_the_release_in_use_is_one_slurm(tree: Path) -> None:
    (tree / "opt/slurm").rename(tree / "opt/slurm-25.11.7")
    (tree / "opt/slurm").symlink_to("slurm-25.11.7")
    out, said = check(tree)
    assert said == ""
    assert out.split()[:2] == ["/opt/slurm", "/opt/slurm/etc"]


def test_the_plugin_is_built_without_the_trees_libc_headers(tree: Path, tmp_path: Path) -> None:
    """A Slurm in /usr has its headers in the folder of the tree's libc."""
    shutil.rmtree(tree / "opt/slurm")
    headers(tree / "usr")
    touch(tree / "usr/include/stdint.h", b"#error of another libc\n")
    program = (
        "#include <stdint.h>\n#include <slurm/slurm_version.h>\nint64_t number = SLURM_VERSION_NUMBER;\n"
    )
    touch(tmp_path / "plugin.c", program.encode())
    link = "from pathlib import Path; from vlablib.slurmtree import link_headers"
    call = "; print(link_headers(Path(sys.argv[1]), Path(sys.argv[2])))"
    for _ in range(2):  # the second finds the link
        command = [sys.executable, "-c", f"import sys; {link}{call}", str(tree), str(tmp_path / "made")]
        folder = subprocess.run(command, cwd=LAB, check=True, capture_output=True, text=True).stdout.strip()
        gcc = ["cc", "-isystem", folder, "-fsyntax-only", str(tmp_path / "plugin.c")]
        subprocess.run(gcc, check=True, timeout=60)


BECOME = """
import os, sys
from vlablib.machine import _become
os.set_inheritable(os.open("/dev/zero", os.O_RDONLY), True)
_become("/bin/sh", "-c", f"ls -l /proc/self/fd > {sys.argv[1]}")
"""


def test_a_host_of_the_lab_holds_no_descriptor_of_the_caller(tmp_path: Path) -> None:
    """Such as the lock of `flock FILE lab/vlab up`."""
    out = tmp_path / "fds"
    subprocess.run([sys.executable, "-c", BECOME, out], cwd=LAB, check=True, timeout=60)
    assert "/dev/null" in out.read_text()
    assert "/dev/zero" not in out.read_text()
