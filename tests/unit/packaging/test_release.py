# SPDX-License-Identifier: Apache-2.0
"""make release, on a small repository; the version and the record of this one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from datetime import date
from pathlib import Path

import pytest

from next_checkout import make_next
from releases import Release, releases
from vhpc_slurm import __version__

ROOT = Path(__file__).parents[3]
CHANGELOG = "# Changelog\n\n## Unreleased\n\n## 1.2.0\n\n### Jobs\n- They run.\n\n## 1.1.0\n\n- Older.\n"
BUILD = """#!/bin/sh
# build --release --suite SUITE --output FOLDER
[ "$1 $2 $4" = "--release --suite --output" ] && mkdir "$5" && echo "$3" > "$5/vhpc_1.2.0.deb"
"""


class Checkout:
    """A repository that has what a release needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("init", "--quiet", "--initial-branch=main")
        self.write("packaging/releases", "# version, date, commit\n1.1.0 2026-01-31 " + "0" * 40 + "\n")
        self.write("CHANGELOG.md", CHANGELOG)
        self.write("python/vhpc_slurm/__init__.py", '__version__ = "1.2.0"  # here\n')
        self.write("tests/data/release/fields.json", "before\n")
        self.write("tests/unit/support/message_fields.py", "print('after')\n")
        self.write(".gitignore", "/build/\n")
        self.write("packaging/build", BUILD)
        (folder / "packaging/build").chmod(0o755)
        (folder / "scripts").mkdir()
        for script in ("release", "slow"):
            shutil.copy(ROOT / "scripts" / script, folder / "scripts")
        self.write("packaging/slow-checks", "# record\n")
        self.commit()

    def git(self, *words: str) -> str:
        who = ("-c", "user.name=x", "-c", "user.email=x@y.invalid", "-c", "commit.gpgsign=false")
        command = ["git", *who, *words]
        return subprocess.run(command, cwd=self.folder, check=True, capture_output=True, text=True).stdout

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "-m", "x")

    def release(self) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "scripts/release"]
        return subprocess.run(command, cwd=self.folder, check=False, capture_output=True, text=True)

    def record(self) -> list[str]:
        return (self.folder / "packaging/releases").read_text().splitlines()[1:]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_a_release_has_archive_packages_notes_and_checksums(checkout: Checkout) -> None:
    commit = checkout.git("rev-parse", "HEAD").strip()
    done = checkout.release()
    assert (done.returncode, done.stderr) == (0, "")
    found = checkout.folder / "build/release/1.2.0"
    assert sorted(str(path.relative_to(found)) for path in found.rglob("*") if path.is_file()) == [
        "NOTES.md", "SHA256SUMS", "bookworm/vhpc_1.2.0.deb", "trixie/vhpc_1.2.0.deb", "vhpc-1.2.0.tar.gz",
    ]  # fmt: skip
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=found, check=True)
    text = (found / "NOTES.md").read_text()
    assert text.startswith("# vhpc 1.2.0\n\n### Jobs\n- They run.\n\n## Slow checks\n\n```\nfuzz  ")
    assert text.count("no pass on record") == text.count("\n") - 9
    with tarfile.open(found / "vhpc-1.2.0.tar.gz") as archive:
        assert "vhpc-1.2.0/python/vhpc_slurm/__init__.py" in archive.getnames()
        assert archive.pax_headers["comment"] == commit
    old, new = checkout.record()
    assert re.fullmatch(rf"1\.2\.0 \d{{4}}-\d\d-\d\d {commit}", new)
    assert old.startswith("1.1.0 ")
    assert (checkout.folder / "tests/data/release/fields.json").read_text() == "after\n"
    changed = checkout.git("status", "--porcelain").split()[1::2]
    assert changed == ["packaging/releases", "tests/data/release/fields.json"]


def test_the_same_commit_gives_the_same_archive(checkout: Checkout) -> None:
    archive = checkout.folder / "build/release/1.2.0/vhpc-1.2.0.tar.gz"
    assert checkout.release().returncode == 0
    first = archive.read_bytes()
    checkout.git("checkout", "--quiet", "--", ".")
    assert checkout.release().returncode == 0
    assert archive.read_bytes() == first


REFUSED = [
    ("1.1.0 was released", "python/vhpc_slurm/__init__.py", '__version__ = "1.1.0"\n'),
    ("is not like 1.2.3", "python/vhpc_slurm/__init__.py", '__version__ = "1.2"\n'),
    ("has no section 1.2.0", "CHANGELOG.md", "# Changelog\n\n## 1.1.0\n- Older.\n"),
    ("has no section 1.2.0", "CHANGELOG.md", "# Changelog\n\n## 1.2.0\n\n## 1.1.0\n- Older.\n"),
    ("has entries under Unreleased", "CHANGELOG.md", CHANGELOG.replace("d\n", "d\n- New.\n", 1)),
    ("packaging/build has failed", "packaging/build", "#!/bin/sh\nexit 1\n"),
    ("the checkout has changed", "packaging/build", BUILD + "echo >> CHANGELOG.md\n"),
]


@pytest.mark.parametrize(("why", "name", "text"), REFUSED)
def test_an_impossible_release_is_refused(checkout: Checkout, why: str, name: str, text: str) -> None:
    checkout.write(name, text)
    checkout.commit()
    before = checkout.record()
    done = checkout.release()
    assert done.returncode == 1
    assert why in done.stderr
    assert checkout.record() == before
    assert not (checkout.folder / "build/release/1.2.0").exists()


PASSED = "hw passed 2026-01-31 " + "1" * 40 + " 300\n"
FAILED = "hw failed 2026-02-28 " + "2" * 40 + " 20\n"


def test_notes_say_when_a_slow_check_passed(checkout: Checkout) -> None:
    checkout.write("packaging/slow-checks", "# record\n" + PASSED)
    assert checkout.release().returncode == 0
    notes = (checkout.folder / "build/release/1.2.0/NOTES.md").read_text()
    assert "\nhw               passed 2026-01-31 on 1111111111 (not in this clone), 300 s  [" in notes


def test_a_slow_check_that_has_failed_since_is_refused(checkout: Checkout) -> None:
    checkout.write("packaging/slow-checks", "# record\n" + PASSED + FAILED)
    before = checkout.record()
    done = checkout.release()
    assert done.returncode == 1
    assert "slow checks have failed since they passed" in done.stderr
    assert "hw               passed 2026-01-31" in done.stderr
    assert checkout.record() == before


def test_uncommitted_changes_are_refused(checkout: Checkout) -> None:
    checkout.write("new", "")
    done = checkout.release()
    assert done.returncode == 1
    assert "uncommitted changes:\n?? new" in done.stderr


def test_a_version_with_a_tag_is_refused(checkout: Checkout) -> None:
    checkout.git("tag", "v1.2.0")
    done = checkout.release()
    assert done.returncode == 1
    assert "the tag v1.2.0 exists" in done.stderr


# --- this repository ------------------------------------------------------------------------------


def test_the_record_of_releases_can_be_read() -> None:
    found = releases()
    for one in found:
        assert re.fullmatch(r"\d+\.\d+\.\d+ [0-9a-f]{40}", f"{one.version} {one.commit}")
        date.fromisoformat(one.day)
    versions = [one.numbers for one in found]
    assert versions == sorted(set(versions))
    assert versions[-1:] <= [Release(__version__, "", "").numbers]


def test_the_version_is_written_in_one_place() -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    folders = (
        "CMakeLists.txt",
        "cmake/",
        "debian/",
        "docs/man/",
        "guest/",
        "packaging/",
        "pyproject",
        "python/",
    )
    names = [name for name in tracked.stdout.split("\0") if name.startswith(folders)]
    found = {
        name
        for name in names
        if (path := ROOT / name).is_file() and __version__.encode() in path.read_bytes()
    }
    assert found - {"packaging/releases"} == {"python/vhpc_slurm/__init__.py"}


def test_the_changelog_has_the_version() -> None:
    assert f"\n## {__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_next_version_is_higher_by_one(tmp_path: Path) -> None:
    """The test of upgrades makes packages of it."""
    shutil.copytree(ROOT / "python", tmp_path / "python", ignore=shutil.ignore_patterns("__pycache__"))
    script = (
        "from vhpc_slurm import __version__; from vhpc_slurm.controller.api import versions\n"
        "from vhpc_slurm.controller.store import schema\n"
        "print(__version__, versions.OLDEST, versions.VERSION, schema.SCHEMA_VERSION)"
    )

    def said(folder: Path) -> list[str]:
        command = [sys.executable, "-c", script]
        environment = {"PYTHONPATH": str(folder / "python")}
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return done.stdout.split()

    version, oldest, protocol, schema = said(ROOT)
    make_next(tmp_path)
    series, _, last = version.rpartition(".")
    higher = (int(protocol) + 1, int(schema) + 1)
    assert said(tmp_path) == [f"{series}.{int(last) + 1}", oldest, *map(str, higher)]
