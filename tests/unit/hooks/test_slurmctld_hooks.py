# SPDX-License-Identifier: Apache-2.0
"""PrologSlurmctld and EpilogSlurmctld: the lease they ask for, and the effect of each kind of failure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from slurmctld_rig import DIGEST, JOB, Controller, controller_of_job

from vhpc_slurm.config import Config, Paths
from vhpc_slurm.config.images import Images
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import FabricError, NodeError, UserError, VhpcError
from vhpc_slurm.hooks import common, slurmctld
from vhpc_slurm.model import (
    CONTINUED,
    HetPlace,
    ImageRef,
    JobRequest,
)
from vhpc_slurm.options import BatchPlace
from vhpc_slurm.slurm.port import SlurmError


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(paths=Paths(state=str(tmp_path), run=str(tmp_path), log=str(tmp_path / "log")))


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    return controller_of_job(monkeypatch)


def test_the_lease_is_opened_as_the_user_asked(
    config: Config, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MEM_RESERVE": "256", "BATCH": "host", "TIMEOUT": "90", "CONSOLE": "c.txt"}.items():
        monkeypatch.setenv(f"SPANK_VHPC_{name}", value)
    assert slurmctld.prolog(config) == 0
    (request,) = controller.opened
    assert request == JobRequest(
        42,
        1,
        2001,
        2001,
        "alice",
        "/scratch/alice",
        ImageRef("debian-minimal", "1"),
        mem_reserve_mib=256,
        batch=BatchPlace.HOST,
        timeout_s=90,
        console="c.txt",
        job_name="sim",
        partition="main",
        unset=("network", "disk_mib", "guests_per_node"),
    )
    assert controller.comments == [f"vhpc: image debian-minimal:1@{DIGEST}"]
    assert controller.cancelled == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [("64", (64, "")), ("2048:/scratch", (2048, "/scratch")), ("16777216:/tmp", (16777216, "/tmp"))],
)
def test_a_disk_may_have_a_mount_point(
    config: Config,
    controller: Controller,
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    expected: tuple[int, str],
) -> None:
    monkeypatch.setenv("SPANK_VHPC_DISK", value)
    assert slurmctld.prolog(config) == 0
    (request,) = controller.opened
    assert (request.disk_mib, request.disk_mount) == expected
    assert "disk_mib" not in request.unset


@pytest.mark.parametrize(
    ("given", "unset"),
    [
        ({}, ("network", "disk_mib", "batch", "guests_per_node")),
        ({"NETWORK": "none", "DISK": "64", "GUESTS_PER_NODE": "1"}, ("batch",)),
        ({"SAVE": "own/mine"}, ("network", "disk_mib", "guests_per_node")),
    ],
)
def test_the_lease_records_values_the_user_did_not_choose(
    config: Config,
    controller: Controller,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, str],
    unset: tuple[str, ...],
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(f"SPANK_VHPC_{name}", value)
    catalogs = Config(paths=config.paths, images=Images(user_catalog="/home/{user}/catalog"))
    assert slurmctld.prolog(catalogs) == 0
    assert controller.opened[0].unset == unset
    assert controller.cancelled == []


def test_the_lease_names_options_of_an_environment_file(
    config: Config, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the plugin's word is the user's to change: names that are no options of this job are left out
    given = {"ENVIRONMENT": "lab.toml", "ENVIRONMENT_SET": "image,disk,vfs,none", "DISK": "64"}
    for name, value in given.items():
        monkeypatch.setenv(f"SPANK_VHPC_{name}", value)
    assert slurmctld.prolog(config) == 0
    assert controller.opened[0].environment == "lab.toml"
    assert controller.opened[0].from_file == ("image", "disk")


@pytest.mark.parametrize("before", ["", "vhpc: image old@sha256:1 // "])
def test_a_comment_of_job_submit_is_kept_behind_the_image(
    config: Config, controller: Controller, before: str
) -> None:
    controller.comment = f'{before}{{"class": 7}}'
    assert slurmctld.prolog(config) == 0
    assert controller.comments == [f'vhpc: image debian-minimal:1@{DIGEST} // {{"class": 7}}']


def test_a_job_runs_without_its_image_in_admin_comment(config: Config, controller: Controller) -> None:
    controller.commentable = False
    assert slurmctld.prolog(config) == 0
    assert len(controller.opened) == 1


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "42"),
        ({"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "3"}, "40_3"),
        ({"SLURM_HET_JOB_ID": "41", "SLURM_HET_JOB_OFFSET": "1"}, "41+1"),
    ],
)
def test_the_comment_is_set_for_this_job_alone(
    config: Config,
    controller: Controller,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    name: str,
) -> None:
    """By the names of scontrol(1): the last element of an array has the JobId of the whole array."""
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert slurmctld.prolog(config) == 0
    assert controller.commented == name


@pytest.mark.promise("image.digest")
def test_a_pinned_image_reaches_the_lease_by_its_digest(
    config: Config, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPANK_VHPC_IMAGE", f"debian-minimal:1@{DIGEST}")
    assert slurmctld.prolog(config) == 0
    assert controller.opened[0].image == ImageRef("debian-minimal", "1", DIGEST)
    assert controller.comments == [f"vhpc: image debian-minimal:1@{DIGEST}"]


def test_a_component_says_its_place(config: Config, controller: Controller) -> None:
    place = HetPlace(41, 1, 2)
    controller.job = replace(JOB, het=place)
    assert slurmctld.prolog(config) == 0
    assert [request.het for request in controller.opened] == [place]


@pytest.mark.parametrize("answer", [None, FabricError("vhpcd does not answer")])
def test_a_component_without_guests_is_announced(
    config: Config,
    controller: Controller,
    monkeypatch: pytest.MonkeyPatch,
    answer: VhpcError | None,
) -> None:
    """Whatever vhpcd answers: the job of this component has nothing to do with vhpc."""
    told: list[tuple[int, int]] = []

    def without_guests(client: ControllerClient, *asked: int) -> None:
        assert client._settings.request_timeout_s <= 5
        told.append(asked)  # type: ignore[arg-type]
        if answer is not None:
            raise answer

    monkeypatch.setattr(ControllerClient, "without_guests", without_guests)
    assert slurmctld.without_guests(config) == 0
    assert told == [], "it is no component"
    monkeypatch.setenv("SLURM_HET_JOB_ID", "41")
    monkeypatch.setenv("SLURM_HET_JOB_OFFSET", "1")
    assert slurmctld.without_guests(config) == 0
    assert told == [(41, 1)]
    assert (controller.opened, controller.comments) == ([], [])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("IMAGE", "no/such name", "image"),
        ("BATCH", "elsewhere", "--vhpc-batch='elsewhere'"),
        ("MEM_RESERVE", "-1", "--vhpc-mem-reserve='-1'"),
        ("TIMEOUT", "1" * 10, "--vhpc-timeout=1111111111"),
        ("TIMEOUT", "٣", "--vhpc-timeout="),
        ("VFS", "257", "--vhpc-vfs=257"),
        ("DISK", "63", "--vhpc-disk=63"),
        ("DISK", "16777217", "--vhpc-disk=16777217"),
        ("DISK", "20P", "--vhpc-disk='20P'"),
        ("DISK", "63:/scratch", "--vhpc-disk='63:/scratch': a size from 64M to 16T"),
        ("NETWORK", "job,wan", "--vhpc-network='job,wan': 'none' or a list"),
        ("NETWORK", "nat,site", "nat and site both lead to other networks"),
        ("MEM_RESERVE", "0", "--vhpc-mem-reserve=0: a size from 1M to 16T"),
        ("CONSOLE", "a\x1b[2J", "the path of a file is expected"),
        ("DISK", "64:", "--vhpc-disk='64:': an absolute path"),
        ("DISK", "64:/a/../etc", "--vhpc-disk='64:/a/../etc': an absolute path"),
        ("DISK", "64:/etc", "--vhpc-disk='64:/etc': this directory belongs to the guest's system"),
        ("DISK", "64:/a\nvhpc.init=/x", "an absolute path"),
        ("DISK", "64:/a:/b", "an absolute path"),
        ("GUESTS_PER_NODE", "0", "--vhpc-guests-per-node=0"),
        ("RESUME", "a/b", "--vhpc-resume='a/b': the name of a checkpoint is expected"),
        ("RESUME", "a", "--vhpc-image and --vhpc-resume cannot be given together"),
        ("SAVE", "debian", "--vhpc-save='debian'"),
        ("SAVE", f"own/a@sha256:{'0' * 64}", "own/NAME[:TAG] is expected"),
        ("SAVE", "own/a", "--vhpc-save=own/a:latest is not possible here"),
    ],
)
def test_a_request_that_bypassed_the_plugin_cancels_its_job(
    config: Config, controller: Controller, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(f"SPANK_VHPC_{name}", value)
    assert slurmctld.prolog(config) == 0, "another exit status only requeues the job"
    assert controller.cancelled == [42]
    (comment,) = controller.comments
    assert comment.startswith("vhpc: ")
    assert words in comment
    assert controller.opened == []


def test_a_job_that_continues_a_checkpoint_names_no_image(
    config: Config, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPANK_VHPC_IMAGE", "checkpoint://run-7")
    monkeypatch.setenv("SPANK_VHPC_RESUME", "run-7")
    assert slurmctld.prolog(config) == 0
    (request,) = controller.opened
    assert (request.resume, request.image) == ("run-7", CONTINUED)
    assert controller.cancelled == []


@pytest.mark.parametrize("resume", [None, "run-8"])
def test_the_name_in_place_of_an_image_is_that_of_the_option(
    config: Config, controller: Controller, monkeypatch: pytest.MonkeyPatch, resume: str | None
) -> None:
    monkeypatch.setenv("SPANK_VHPC_IMAGE", "checkpoint://run-7")
    if resume is not None:
        monkeypatch.setenv("SPANK_VHPC_RESUME", resume)
    assert slurmctld.prolog(config) == 0
    assert controller.cancelled == [42]
    assert controller.opened == []


def test_a_job_of_another_uid_than_slurms_is_cancelled(config: Config, controller: Controller) -> None:
    controller.job = replace(JOB, uid=0)
    assert slurmctld.prolog(config) == 0
    assert controller.cancelled == [42]
    assert "uid 2001" in controller.comments[0]
    assert controller.opened == []


def test_a_refused_lease_is_in_the_admin_comment(config: Config, controller: Controller) -> None:
    controller.refusal = "there is no image no-such-image"
    assert slurmctld.prolog(config) == 0, "the user reads it when his first task starts"
    assert controller.comments == ["vhpc: there is no image no-such-image"]
    assert controller.cancelled == []


@pytest.mark.parametrize("commentable", [True, False])
def test_without_vhpcd_the_job_is_requeued_by_slurm(
    config: Config, controller: Controller, commentable: bool
) -> None:
    controller.answer = FabricError("vhpcd does not answer", "Connection refused")
    controller.commentable = commentable
    with pytest.raises(FabricError, match="does not answer"):
        slurmctld.prolog(config)
    assert controller.comments == ["vhpc: vhpcd does not answer: Connection refused"] * commentable
    assert controller.cancelled == []


def test_a_slurmctld_that_does_not_answer_cancels_nothing(config: Config, controller: Controller) -> None:
    controller.job = SlurmError("scontrol show job failed", "Unable to contact slurm controller")
    with pytest.raises(FabricError, match="scontrol show job failed"):
        slurmctld.prolog(config)
    assert (controller.opened, controller.cancelled) == ([], [])


def test_the_epilog_marks_this_start_of_the_job_as_ending(config: Config, controller: Controller) -> None:
    assert slurmctld.epilog(config) == 0
    assert controller.ended == [(42, 1)]
    controller.answer = FabricError("vhpcd does not answer")
    with pytest.raises(FabricError):
        slurmctld.epilog(config)


@pytest.mark.parametrize("hook", [slurmctld.prolog, slurmctld.epilog])
def test_a_hook_that_slurm_did_not_start_is_refused(
    config: Config, controller: Controller, monkeypatch: pytest.MonkeyPatch, hook: object
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    assert callable(hook)
    with pytest.raises(NodeError, match="a hook that only Slurm can run"):
        hook(config)
    assert (controller.opened, controller.ended) == ([], [])


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("too large", "1 > 0", "ask for less"), "too large: 1 > 0 (ask for less)"),
        (FabricError("vhpcd does not answer"), "vhpcd does not answer"),
        (RuntimeError("unforeseen"), "internal error: RuntimeError('unforeseen')"),
    ],
)
def test_an_error_of_any_kind_is_one_line_and_a_status(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    line: str,
) -> None:
    def fail(_: Config) -> int:
        raise error

    monkeypatch.setattr(common, "load", lambda: config)
    monkeypatch.setattr(common.log, "handlers", [])
    assert common.main("prolog-slurmctld", fail) == 1
    assert capsys.readouterr().err == f"vhpc prolog-slurmctld: {line}\n"
    assert str(error).partition(":")[0] in (Path(config.paths.log) / "hooks.log").read_text()
