# SPDX-License-Identifier: Apache-2.0
"""Changes that others make in shared folders, as a guest sees them, for each cache policy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Lab
from injection import until

pytestmark = pytest.mark.lab

NODE, TOML = "n1", "/etc/vhpc/vhpc.toml"
TREE = "/shared/cached-tree"
FOLDERS = {"home": "/home/alice", "never": "/scratch", "always": TREE}
MAP = (
    "import mmap, sys; "
    'f = open(sys.argv[1], "rb"); mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ); print("mapped", f.name)'
)
# The guest's own clock decides when it has waited longer than the second that the manual states.
SCRIPT = f"""
look() {{ for f in {" ".join(FOLDERS.values())}; do echo "$1 $f $(cat $f/coherence)"; done; }}
echo "ahead $(cat /sys/class/bdi/$(mountpoint -d ~)/read_ahead_kb)"
look first
: > ~/coherence.looked
until [ -e ~/coherence.changed ]; do sleep 0.2; done
echo "at-once /scratch $(cat /scratch/coherence)"
sleep 1.5
look later
touch {TREE}/mine 2>&1
for f in ~/coherence /scratch/coherence; do python3 -c '{MAP}' $f; done 2>&1
"""


def change(lab: Lab, text: str) -> None:
    """Change the files in place, as a program on another host would."""
    for folder, host in ((FOLDERS["home"], "login"), (FOLDERS["never"], "login"), (TREE, "ctl")):
        lab.run(host, "sh", "-c", f"echo {text} > {folder}/coherence; chmod a+r {folder}/coherence")


@pytest.fixture(scope="module")
def seen(lab: Lab) -> Iterator[list[str]]:
    """Lines of a job that looks at files before and after their change on other hosts."""
    lab.run("ctl", "mkdir", "-p", TREE)
    lab.run("login", "sh", "-c", "rm -f /home/alice/coherence* /scratch/coherence")
    lab.run(NODE, "cp", TOML, f"{TOML}.kept")
    keys = f'read_only = ["{TREE}"]\\ncache_always = ["{TREE}"]\\ncache_never = ["/scratch"]'
    lab.run(NODE, "sed", "-i", f's|^site = .*|site = ["/scratch", "{TREE}"]\\n{keys}|', TOML)
    try:
        change(lab, "old")
        job = lab.submit(SCRIPT, "-w", NODE)
        looked = ("ls", "/home/alice/coherence.looked")
        until(lambda: lab.run("login", *looked, check=False).code == 0, "the guest to look", 300)
        change(lab, "changed-elsewhere")
        lab.run("login", "touch", "/home/alice/coherence.changed")
        job.wait("COMPLETED", "FAILED")
        yield job.output().splitlines()
    finally:
        lab.run(NODE, "mv", f"{TOML}.kept", TOML)
        lab.run("ctl", "rm", "-rf", TREE)
        lab.run("login", "sh", "-c", "rm -f /home/alice/coherence* /scratch/coherence")


@pytest.mark.promise("shares.fresh")
def test_a_guest_sees_changes_of_others_after_a_second(seen: list[str]) -> None:
    assert "first /home/alice old" in seen
    assert "later /home/alice changed-elsewhere" in seen


@pytest.mark.promise("shares.fresh")
def test_a_folder_without_a_cache_shows_changes_at_once(seen: list[str]) -> None:
    assert "first /scratch old" in seen
    assert "at-once /scratch changed-elsewhere" in seen


def test_a_folder_without_a_cache_cannot_be_mapped(seen: list[str]) -> None:
    assert [line for line in seen if line.startswith("mapped")] == ["mapped /home/alice/coherence"]
    assert any("No such device" in line for line in seen)  # ENODEV


@pytest.mark.promise("shares.fresh")
def test_a_cached_folder_is_read_once_and_not_written(seen: list[str]) -> None:
    assert f"first {TREE} old" in seen
    assert f"later {TREE} old" in seen  # the reason why only folders that do not change may be listed
    assert any("mine" in line and "Read-only file system" in line for line in seen)


def test_guests_read_a_mebibyte_ahead_in_shared_folders(seen: list[str]) -> None:
    assert "ahead 1024" in seen
