# SPDX-License-Identifier: Apache-2.0
"""vhpc save: what it asks srun for, what becomes of the files, and what it refuses.

srun is a script, and the reader of the tar a function; tests/lab/test_writable_space.py saves a real guest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from site_catalog import publish, whole

from vhpc_slurm.catalog import FolderCatalog
from vhpc_slurm.cli import options
from vhpc_slurm.cli.jobs import save
from vhpc_slurm.config import Config
from vhpc_slurm.config.controller import Controller
from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.importing import imports
from vhpc_slurm.importing.source import Source

SRUN = """#!/bin/sh
echo "$*" >> {folder}/asked
[ -z "$VHPC_IMAGE$SLURM_JOB_ID" ] || exit 99
printf 'said by the site\\n\\nvhpc-begin\\n'
{files}
"""


class Site:
    """A site with an image, a user with a catalogue, and an srun."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.catalog, self.own = folder, folder / "site", folder / "root/images"
        digest = publish(self.catalog, "base", b"root of the base")
        self.name, self.files = f"base:latest@{digest}", "echo a tar"
        self.digest = digest
        images = Images(catalog=str(self.catalog), user_catalog=f"{folder}/{{user}}/images", import_max_mib=1)
        self.config = Config(images=images, controller=Controller(slurm_bin=str(folder)))

    def worker(self, source: Source, out: Path, *_: object) -> dict[str, Any]:
        self.read = source.path.read_bytes()
        assert (source.kind, source.compression) == ("tar", "")
        (out / "root.erofs").write_bytes(b"new root")
        return {"digest": f"sha256:{'12' * 32}", "special": 0, "process": {}}

    def run(self, target: str = "own/mine", name: str = "") -> None:
        shown = f"echo 'JobId=7 JobName=x AdminComment=vhpc: image {self.name} StdErr=/x'"
        scripts = {
            "scontrol": f"#!/bin/sh\n[ \"$*\" = '-o show job 7' ] || exit 99\n{name or shown}\n",
            "srun": SRUN.format(folder=self.folder, files=self.files),
        }
        for program, text in scripts.items():
            (self.folder / program).write_text(text)
            (self.folder / program).chmod(0o755)
        assert save.save(7, target, as_json=True) == 0


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    found = Site(tmp_path)
    monkeypatch.setattr(imports, "run_worker", found.worker)
    monkeypatch.setattr(options, "config", lambda: found.config)
    monkeypatch.setenv("VHPC_IMAGE", "of-the-caller")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    return found


@pytest.mark.promise("tools.save")
def test_a_saved_image_is_its_parent_with_other_files(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.run()
    assert site.read == b"a tar\n"
    said = json.loads(capsys.readouterr().out)
    assert (said["image"], said["parent"], said["changed"]) == ("own/mine:latest", site.digest, True)
    found = FolderCatalog(site.own).read_manifest(said["digest"])
    parent = FolderCatalog(site.catalog).read_manifest(site.digest)
    assert (found.kernel, found.initrd, found.drivers) == (parent.kernel, parent.initrd, parent.drivers)
    assert (found.process, found.cmdline, found.labels) == (parent.process, parent.cmdline, parent.labels)
    origin = found.provenance
    assert (origin.builder, origin.parent, origin.source) == ("vhpc save", site.digest, "saved from job 7")
    assert found.description == "saved from job 7, which ran base:latest"
    assert found.root.size == 8
    assert whole(site.own) == ["mine:latest"]


def test_its_steps_overlap_those_of_the_job(site: Site) -> None:
    site.run()
    asked = (site.folder / "asked").read_text()
    options = "--jobid 7 --overlap -N1 -n1 --relative=0 --input=none"
    assert asked.startswith(f"{options} /bin/sh -c ")
    assert "--one-file-system" in asked
    for path in ("./etc/hostname", "./tmp/*", "./etc/sudoers.d/vhpc"):
        assert f"--exclude='{path}'" in asked


def test_an_image_of_the_users_own_can_be_the_parent(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.run()
    first = json.loads(capsys.readouterr().out)["digest"]
    site.name = f"own/mine:latest@{first}"
    site.run("own/again")
    found = FolderCatalog(site.own).read_manifest(json.loads(capsys.readouterr().out)["digest"])
    assert found.provenance.parent == first


@pytest.mark.promise("tools.save")
@pytest.mark.parametrize(
    ("name", "files", "target", "says"),
    [
        ("echo JobId=7", "", "own/mine", "job 7 has no guests: its AdminComment names no image"),
        (
            "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
            "",
            "own/mine",
            "7 is unknown",
        ),
        ("", "exit 1", "own/mine", "the step in job 7 failed: exit status 1"),
        (
            "",
            "echo 'srun: error: Unable to create step: Access/permission denied' >&2; exit 1",
            "own/mine",
            "the step in job 7 failed: srun: error: Unable to create step: Access/permission denied",
        ),
        (
            "",
            "echo the image has no tar >&2; echo 'srun: error: n1: exit 1' >&2; exit 1",
            "own/mine",
            "has no tar",
        ),
        ("", "head -c 1048577 /dev/zero", "own/mine", "its files have more than 1 MiB (delete some;"),
        ("", "", f"own/mine@sha256:{'0' * 64}", "it has a digest"),
    ],
)
def test_a_failed_save_leaves_no_image(site: Site, name: str, files: str, target: str, says: str) -> None:
    site.files = files or site.files
    with pytest.raises(VhpcError) as caught:
        site.run(target, name)
    assert says in caught.value.line()
    assert [path for path in site.own.rglob("*") if path.is_file() and path.name != ".lock"] == []


def test_a_host_without_slurm_is_reported(site: Site) -> None:
    with pytest.raises(VhpcError, match=r"scontrol failed: .*No such file"):
        save.save(7, "own/mine")
