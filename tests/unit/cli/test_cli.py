# SPDX-License-Identifier: Apache-2.0
"""The `vhpc` command as its users meet it: arguments, output, exit status, manual, images, plans."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_tree import commands, in_new_python
from machine_tree import gpu_node
from vhpc_command import Vhpc

from vhpc_slurm import __version__
from vhpc_slurm.cli import output
from vhpc_slurm.cli.site import configuration
from vhpc_slurm.node.guest import libvirtd as node_guest
from vhpc_slurm.node.guest import refusal
from vhpc_slurm.options import OPTIONS

ROOT = Path(__file__).parents[3]


# --- the command -------------------------------------------------------------


def test_version_and_help_need_no_optional_parts() -> None:
    code = (
        "import sys; from vhpc_slurm.cli.main import main; main(['--help']);"
        " late = ('rich.', 'libvirt', 'msgspec', 'jinja2', 'vhpc_slurm.node', 'vhpc_slurm.controller');"
        " print(sorted(m for m in sys.modules if m.startswith(late)))"
    )
    printed = in_new_python(code)
    assert printed.splitlines()[-1] == "[]"
    assert re.search(r"reconcile +Repair what a crash left on this node\.", printed)


def test_version(vhpc: Vhpc) -> None:
    assert vhpc("--version") == f"vhpc {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["bogus"], "No such command"),
        (["console"], "Missing argument"),
        (["timeline", "x1"], "JOBID"),
        (["timeline", "0"], "JOBID"),
        (["ps", "--all", "--local"], "exclude each other"),
        (["plan"], "either JOBID or --image"),
        (["plan", "7", "--image", "tiny"], "either JOBID or --image"),
        (["plan", "7", "--cpus", "1"], "the job has its allocation"),
        (["console", "7", "--follow", "--json"], "exclude each other"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(vhpc: Vhpc, argv: list[str], says: str) -> None:
    assert vhpc(*argv, code=2) == ""
    assert says in vhpc.error


def test_a_broken_configuration_is_the_nodes_fault(vhpc: Vhpc) -> None:
    (vhpc.folder / "vhpc.toml").write_text("[paths]\nrum = '/run'\n")
    vhpc("image", "ls", code=3)
    assert "unknown field `rum`" in vhpc.error


def test_without_a_reader_it_ends_quietly(vhpc: Vhpc) -> None:
    shell = f"set -o pipefail; {sys.executable} -m vhpc_slurm.cli.main config --describe | true"
    done = subprocess.run(
        ["bash", "-c", shell],
        env={"PYTHONPATH": str(ROOT / "python"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- manual ------------------------------------------------------------------


def test_the_manual_has_every_command_and_every_option() -> None:
    """`vhpc plan` and `vhpc policy` have options of sbatch, with vhpc-spank(8) as their manual."""
    manual = (ROOT / "docs/man/vhpc.1").read_text().replace("\\-", "-")
    of_sbatch = {f"--{option.name}" for option in OPTIONS}
    for name, command in commands().items():
        assert not name or name == "image" or f".SS vhpc {name}" in manual
        for parameter in command.params:
            for option in parameter.opts if parameter.param_type_name == "option" else ():
                if name.partition(" ")[0] not in ("plan", "policy") or option not in of_sbatch:
                    assert option in manual, f"vhpc {name} {option}"


def test_the_manual_of_the_configuration_is_up_to_date(vhpc: Vhpc) -> None:
    assert vhpc("config", "--man") == (ROOT / "docs/man/vhpc.toml.5").read_text(), (
        "run: vhpc config --man > docs/man/vhpc.toml.5"
    )
    assert configuration._roff(".it's a\\b") == "\\&.it\\(aqs a\\eb"


def test_config_marks_values_that_were_set(vhpc: Vhpc) -> None:
    lines = {line.split()[0]: line.split()[1:] for line in vhpc("config").splitlines()}
    assert lines["guests.accelerator"] == ['"tcg"', "*"]
    assert lines["guests.qemu_group"] == ['"kvm"']
    assert vhpc.json("config")["controller"]["port"] == 1
    (entry,) = [key for key in vhpc.json("config", "--describe") if key["key"] == "uid_count"]
    assert (entry["section"], entry["default"], entry["meaning"]) == ("guests", 8192, "size of that range")


# --- output ------------------------------------------------------------------


def test_tables_in_a_pipe_cut_nothing_and_markup_in_data_is_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    long = "x" * 300
    output.write_table(("A", "B"), [("1", long), ("[red]2[/red]", "\x1b[31m:smile:")], right=("A",))
    assert capsys.readouterr().out == (f"           A  B\n           1  {long}\n[red]2[/red]  ?[31m:smile:\n")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["n1", "n2", "n3", "n7"], "n[1-3,7]"),
        (["n10", "n9", "login"], "n[9-10],login"),
        (["n01", "n02"], "n01,n02"),
        (["r1n1", "r1n2", "r2n1"], "r1n[1-2],r2n1"),
        (["n0", "n1"], "n[0-1]"),
        (["n"], "n"),
        ([], ""),
    ],
)
def test_node_names_are_folded_as_slurm_writes_them(names: list[str], text: str) -> None:
    assert output.node_list(names) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0s"), (59.9, "59s"), (61, "1m01s"), (3600, "1h00m"), (90061, "1d01h")],
)
def test_time_spans_have_two_units(seconds: float, text: str) -> None:
    assert output.span(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")]
)
def test_sizes_are_binary(count: int, text: str) -> None:
    assert output.size(count) == text


# --- images ------------------------------------------------------------------


def test_images_are_listed_with_broken_ones_among_them(vhpc: Vhpc) -> None:
    head, good, bad = vhpc("image", "ls").splitlines()
    assert head.split() == ["IMAGE", "DIGEST", "SIZE", "MIN", "MEMORY", "CREATED", "HERE", "DESCRIPTION"]
    assert good.startswith("tiny:1 ")
    assert good.endswith("3.5 KiB     300 MiB  2026-01-02T03:04:05Z  no    for [bold]tests[/bold]")
    assert "BROKEN: image tiny:broken is broken" in bad
    listed = vhpc.json("image", "ls", "tiny")
    assert [(image["image"], image.get("size")) for image in listed] == [
        ("tiny:1", 3584),
        ("tiny:broken", None),
    ]


def test_an_image_is_here_when_the_store_has_all_its_blobs(vhpc: Vhpc) -> None:
    here = {line.split()[0]: line.split()[-1] for line in vhpc("image", "show", "tiny:1").splitlines()[-3:]}
    assert here == {"kernel": "yes", "initrd": "no", "root": "no"}
    assert vhpc.json("image", "show", "tiny:1")["here"] is False
    for path in (vhpc.folder / "catalog/blobs/sha256").iterdir():
        (vhpc.folder / "store/blobs/sha256" / path.name).write_bytes(path.read_bytes())
    assert vhpc.json("image", "show", "tiny:1")["here"] is True


@pytest.mark.parametrize(
    "argv", [("image", "show", "tinny:1"), ("image", "ls", "tinny"), ("image", "show", "A B")]
)
def test_an_unknown_image_is_the_users_mistake(vhpc: Vhpc, argv: tuple[str, ...]) -> None:
    assert vhpc(*argv, code=1) == ""
    assert "vhpc image ls" in vhpc.error


# --- plan --------------------------------------------------------------------


def test_a_plan_maps_slurms_cpu_ids_to_the_machines(vhpc: Vhpc) -> None:
    plan = vhpc.json(
        "plan", "--image", "tiny:1", "--cpus", "2-5", "--memory", "1001", "--user", "daemon", "--chdir", "/"
    )
    (guest,) = plan["guests"]
    # socket 0 has the cores (0,4) and (2,6), socket 1 (1,5) and (3,7): Slurm's ids 2-5 are 2, 6, 1, 5
    assert [(pin["vcpu"], pin["abstract"], pin["os_cpu"]) for pin in guest["pins"]] == [
        (0, 2, 2),
        (1, 3, 6),
        (2, 4, 1),
        (3, 5, 5),
    ]
    assert guest["topology"] == {"sockets": 2, "clusters": 1, "cores": 1, "threads": 2}
    # 1001 - 256 = 745, and guests have whole 2 MiB pages
    assert (plan["job_memory_mib"], plan["reserve_mib"], guest["memory_mib"]) == (1001, 256, 744)
    assert (plan["accelerator"], plan["accelerator_reason"]) == ("tcg", "guests.accelerator = tcg")
    assert plan["generation"] is None
    assert plan["node"] == "n1"


def test_a_plan_for_people_shows_arithmetic_and_sharing(vhpc: Vhpc, public_dir: Path) -> None:
    share = public_dir / "scratch"
    share.mkdir()
    text = (vhpc.folder / "vhpc.toml").read_text().replace("/usr/share", str(share))
    (vhpc.folder / "vhpc.toml").write_text(text)
    share.chmod(0o755)
    out = vhpc(
        "plan", "--image", "tiny:1", "--cpus", "0-1", "--memory", "1001",
        "--mem-reserve", "100", "--user", "daemon", "--chdir", "/",
    )  # fmt: skip
    assert (
        "1001 MiB of the job - 100 MiB outside (--vhpc-mem-reserve) - 1 MiB of rounding"
        " = 900 MiB for the guest; the image needs 300 MiB"
    ) in out
    assert "1 sockets x 1 clusters x 1 cores x 2 threads" in out
    assert f"{share}  read-write  site" in out
    assert "note: site '/proc' is a place of the guest's own system: not shared" in out


def test_a_plan_shows_where_a_disk_is_mounted(vhpc: Vhpc) -> None:
    wish = (
        "plan",
        "--image",
        "tiny:1",
        "--cpus",
        "0-1",
        "--memory",
        "1001",
        "--user",
        "daemon",
        "--chdir",
        "/",
    )
    (guest,) = vhpc.json(*wish, "--disk", "1G:/local")["guests"]
    assert (guest["disk_mib"], guest["disk_mount"]) == (1024, "/local")
    assert "1024 MiB, mounted at /local, " in vhpc(*wish, "--disk", "1024:/local")
    (guest,) = vhpc.json(*wish, "--disk", "64")["guests"]
    assert (guest["disk_mib"], guest["disk_mount"]) == (64, "")
    for disk in ("63", "1G:", "1G:local", "1G:/etc/a", "17T"):
        vhpc(*wish, "--disk", disk, code=2)


def test_a_plan_shows_folders_at_second_places(vhpc: Vhpc, tmp_path: Path) -> None:
    size = ("--image", "tiny:1", "--cpus", "0-1", "--memory", "1001")
    wish = ("plan", *size, "--user", "daemon", "--chdir", str(tmp_path))
    assert "mounts" not in vhpc(*wish)
    assert re.search(
        rf"^mounts +{tmp_path}/a:/data:ro$", vhpc(*wish, "--mount", f"{tmp_path}/a:/data:ro"), re.M
    )
    assert "/nowhere is in no folder of the hosts" in vhpc(*wish, "--mount", "/nowhere:/data", code=1)
    vhpc(*wish, "--mount", "/a:/etc", code=2)


def test_a_refusal_has_all_reasons_and_the_deciding_status(vhpc: Vhpc) -> None:
    argv = ("plan", "--image", "tiny:1", "--cpus", "0,9", "--memory", "400")
    refused = vhpc.json(*argv, code=1)["refused"]
    assert {reason["kind"] for reason in refused} == {"user", "node"}
    assert "needs 300 MiB" in vhpc.error
    assert "CPU ids 9" in vhpc(*argv, code=1)
    vhpc("plan", "--image", "tiny:1", "--cpus", "0,9", "--memory", "1000", code=3)
    assert "CPU ids 9" in vhpc.error


def gpu_host(vhpc: Vhpc, cores: int = 4) -> None:
    """Exchange the test's machine for one with GPUs, and map them."""
    tree = gpu_node(vhpc.folder / "gpus", cores=cores)
    text = (vhpc.folder / "vhpc.toml").read_text()
    text = text.replace(f'sysfs_root = "{vhpc.folder}/sys"', f'sysfs_root = "{tree.sys}"')
    (vhpc.folder / "vhpc.toml").write_text(f'{text}[placement]\ngpu_map = "{vhpc.folder}/gpu.map"\n')
    (vhpc.folder / "gpu.map").write_text("# two of eight\n0 0000:0b:00.0\n\n1 0000:83:00.0 # far\n")


def test_a_plan_shows_devices_and_where_the_guest_sees_them(vhpc: Vhpc) -> None:
    gpu_host(vhpc)
    wish = ("plan", "--image", "tiny:1", "--cpus", "0-7", "--memory", "4096", "--gpus", "0", "--vfs", "1")
    lines = [line.split() for line in vhpc(*wish).splitlines()]
    place = "bus 251 of guest cell 0, root-port, switch-upstream-port, switch-downstream-port"
    assert ["0000:0b:00.0", "gpu", "pci0000:08", "0", *place.split()] in lines
    assert ["0000:0d:00.1", "vf", "pci0000:08", "0", *place.split()] in lines
    text = (vhpc.folder / "vhpc.toml").read_text().replace("[guests]", '[guests]\nqemu_group = "daemon"')
    (vhpc.folder / "vhpc.toml").write_text(text)
    domain = ET.fromstring(vhpc(*wish, "--xml"))
    assert len(domain.findall("devices/hostdev")) == 2


def test_a_plan_of_several_guests_shows_each(vhpc: Vhpc) -> None:
    gpu_host(vhpc)
    wish = ("plan", "--image", "tiny:1", "--memory", "4096", "--guests-per-node", "2", "--vfs", "2")
    guests = vhpc.json(*wish)["guests"]
    assert [guest["hostname"] for guest in guests] == ["n1-g0", "n1-g1"]
    assert [[device["address"] for device in guest["devices"]] for guest in guests] == [
        ["0000:0d:00.1"],
        ["0000:85:00.1"],
    ]
    assert "for 2 guests" in vhpc(*wish)


@pytest.mark.parametrize(
    ("wish", "code", "says"),
    [
        (("--gpus", "7"), 3, "the GPU map has 2 entries"),
        (("--gpus", "x"), 1, "--gpus='x'"),
        (("--vfs", "99"), 1, "--vhpc-vfs=99 is more than a node has"),
        (("--guests-per-node", "64"), 1, "--vhpc-guests-per-node=64 is not possible"),
    ],
)
def test_unplannable_devices_are_refused_with_the_reason(
    vhpc: Vhpc, wish: tuple[str, str], code: int, says: str
) -> None:
    gpu_host(vhpc)
    vhpc("plan", "--image", "tiny:1", "--memory", "4096", *wish, code=code)
    assert says in vhpc.error


@pytest.mark.parametrize("line", ["0", "0 0b:00.0", "1 0000:0b:00.0", "0 0000:0b:00.8", "0 0000:0b:00.0 x"])
def test_a_bad_gpu_map_is_a_node_error_that_names_the_line(vhpc: Vhpc, line: str) -> None:
    gpu_host(vhpc)
    (vhpc.folder / "gpu.map").write_text(f"# comment\n{line}\n")
    vhpc("plan", "--image", "tiny:1", "--memory", "4096", "--gpus", "0", code=3)
    assert f"line 2 of {vhpc.folder}/gpu.map is not valid" in vhpc.error


def test_a_plan_says_when_qemu_gives_no_guest_so_many_vcpus(
    vhpc: Vhpc, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_host(vhpc, cores=128)
    wish = ("plan", "--image", "tiny:1", "--memory", "65536")
    asked: list[int] = []

    @contextmanager
    def connected(*_: object) -> Iterator[None]:
        yield None

    def most(*_: object) -> int:
        asked.append(1)
        return 288

    monkeypatch.setattr(node_guest, "connect", connected)
    monkeypatch.setattr(refusal, "most_vcpus", most)
    vhpc(*wish, code=1)
    assert "a guest of 512 vCPUs is too large for n1: the QEMU installed there gives a guest at most 288" in (
        vhpc.error
    )
    guests = vhpc.json(*wish, "--guests-per-node", "2")["guests"]
    assert [len(guest["pins"]) for guest in guests] == [256, 256]
    assert len(asked) == 2
    vhpc(*wish, "--cpus", "0-254")
    assert len(asked) == 2


def test_the_xml_of_a_plan_is_a_domain(vhpc: Vhpc) -> None:
    text = (vhpc.folder / "vhpc.toml").read_text().replace("[guests]", '[guests]\nqemu_group = "daemon"')
    (vhpc.folder / "vhpc.toml").write_text(text)
    xml = vhpc("plan", "--image", "tiny:1", "--cpus", "6-7", "--memory", "1000", "--xml")
    assert "<domain type='qemu'" in xml.replace('"', "'")
    assert "cpuset='3'" in xml.replace('"', "'")
    assert "cpuset='7'" in xml.replace('"', "'")


@pytest.mark.parametrize(
    "argv", [("--cpus", "3-1"), ("--cpus", "a"), ("--user", "no-such-user"), ("--node", "a b")]
)
def test_a_plan_of_nonsense_is_the_users_mistake(vhpc: Vhpc, argv: tuple[str, str]) -> None:
    vhpc("plan", "--image", "tiny:1", *argv, code=1)
