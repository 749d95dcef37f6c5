# SPDX-License-Identifier: Apache-2.0
"""`vhpc report`: the same facts as text, JSON and HTML, and nothing of it is taken for markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from controller_lab import identity, request

from html_page import Page
from vhpc_slurm.cli.jobs import report as reports
from vhpc_slurm.cli.jobs import reportdata, reporthtml
from vhpc_slurm.device import PassthroughDevice
from vhpc_slurm.errors import UserError
from vhpc_slurm.hardware import PciFunction
from vhpc_slurm.hooks.told import MAX_BYTES, Told
from vhpc_slurm.model import (
    Allocation,
    Figures,
    Generation,
    GuestCell,
    GuestPlacement,
    GuestPlan,
    GuestTopology,
    HostCell,
    HostCpu,
    HostInventory,
    ImageRef,
    JobUsage,
    Lease,
    LeaseRecord,
    LeaseState,
    NetworkIdentity,
    NodeAllocation,
    NodePlan,
    NodeReport,
    SharedIo,
    Stage,
    StepUsage,
    Timeline,
    VcpuPin,
)

GENERATION = Generation(42, 0, "0123abcd")
HOSTILE = "</title></td><script>alert(1)</script><img src=http://x/ onerror=x>&amp;\x1b[2J\x07\u202e\"'"
GPU_AT, PF_AT, VF_AT = "0000:3b:00.0", "0000:5e:00.0", "0000:5e:00.2"


def function(address: str, code: int, **more: Any) -> PciFunction:
    return PciFunction(address, code, 0x10DE, 0x2330, "vfio-pci", 0, (), "pci0000:3a", **more)


HOST = HostInventory(
    node="n1",
    cpu_vendor="GenuineIntel",
    cpus=tuple(HostCpu(cpu, cpu, cpu // 4, cpu // 4) for cpu in range(8)),
    cells=tuple(HostCell(cell, 4096, tuple(range(4 * cell, 4 * cell + 4)), ()) for cell in range(2)),
    abstract=tuple(range(8)),
    kvm=True,
    kvm_reason="",
    pci=(
        function(GPU_AT, 0x030200),
        function("0000:3c:00.0", 0x030200),
        function(PF_AT, 0x020700, virtfns=("0000:5e:00.1", VF_AT)),
        function("0000:5e:00.1", 0x020700, physfn=PF_AT),
        function(VF_AT, 0x020700, physfn=PF_AT),
    ),
)
GUEST = GuestPlacement(0, "n1", (5, 4), ((1, 1024),), devices=((GPU_AT, "gpu"), (VF_AT, "vf")))


def line(node: str, detail: str = "") -> Timeline:
    stages = (
        Stage("start g0", 100.0, 101.0, detail),
        Stage("setup g0", 101.0, 103.5),
        Stage("release", 900.0, 901.0, "failed: a VF stays"),
    )
    return Timeline(GENERATION, node, stages)


def record(text: str = "job", **more: Any) -> LeaseRecord:
    nodes = tuple(NodeAllocation(node, (4, 5), 2048) for node in ("n1", "n2"))
    fields: dict[str, Any] = {"network": NetworkIdentity("ib", pkey=0x1234)} | more
    lease = Lease(
        GENERATION, LeaseState.READY, request(job_name=text), Allocation(nodes), identity(), **fields
    )
    lines = (line("n1", text), line("n2"))
    return LeaseRecord(lease, 1000.0, 2000.0, ("n2",), lines, ("n1", "n2"), (("n1", text),))


def found(text: str = "job") -> reportdata.JobReport:
    said = (f"warning: {text}",)
    other = NodeReport(replace(GENERATION, restart=1), "n2", HOST, (GUEST,), ("of another generation",))
    return reportdata.make(record(text), [NodeReport(GENERATION, "n1", HOST, (GUEST,), said), other])


def test_the_document_has_all_known_values() -> None:
    document: dict[str, Any] = json.loads(msgspec.json.encode(reportdata.document(found())))
    assert (document["job"], document["image"]["digest"]) == (42, "sha256:" + "a" * 64)
    assert document["network"]["partition_key"] == "0x1234"
    first, second = document["nodes"]
    (guest,) = first["guests"]
    assert (guest["os_cpus"], guest["memory_mib"]) == ([5, 4], 1024)
    assert [(d["address"], d["role"], d["kind"]) for d in guest["devices"]] == [
        (GPU_AT, "gpu", "GPU"),
        (VF_AT, "vf", "InfiniBand"),
    ]
    assert (first["ready_s"], first["released"], second["guests"], second["released"]) == (
        3.5,
        False,
        None,
        True,
    )
    assert [(entry["from"], entry["line"]) for entry in document["lines"]] == [
        ("n1", "warning: job"),
        ("n1", "release: failed: a VF stays"),
        ("n2", "release: failed: a VF stays"),
        ("n1", "not clean: job"),
    ]
    assert document["usage"] is None


def test_the_figures_of_programs_are_in_every_form(capsys: pytest.CaptureFixture[str]) -> None:
    step = StepUsage("0", Figures(cpu_us=61_500_000, peak_bytes=3 << 20), tasks=4)
    used = JobUsage(
        step.figures,
        (step,),
        guests=2,
        missing=(("n2", 0, "the guest had ended"),),
        shared=SharedIo(1 << 20, 3 << 30),
        so_far_s=75.25,
    )
    made = replace(found(), usage=used)
    usage = json.loads(msgspec.json.encode(reportdata.document(made)))["usage"]
    assert (usage["total"]["cpu_us"], usage["total"]["rss_bytes"]) == (61_500_000, None)
    assert [(one["step"], one["tasks"], one["peak_bytes"]) for one in usage["steps"]] == [("0", 4, 3 << 20)]
    assert usage["missing"] == [{"node": "n2", "guest": 0, "why": "the guest had ended"}]
    assert usage["shared_folders"] == {"read_bytes": 1 << 20, "written_bytes": 3 << 30}
    assert usage["so_far"] == {"age_s": 75.2}
    reports._show(made)
    text = " ".join(capsys.readouterr().out.split())
    assert "0 4 00:01:01.50 - - 3.0 MiB - - - -" in text
    assert "no figures of guest 0 on n2: the guest had ended" in text
    said = ("shared folders: read 1.0 MiB, written 3.0 GiB", "the job runs; figures: so far, 1m15s ago")
    page = Page(reporthtml.render(made))
    assert "00:01:01.50" in page.texts
    for one in said:
        assert one in text
        assert one in page.texts


def test_options_of_the_user_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    made = record()
    asked = replace(
        made.lease.request, disk_mib=2048, disk_mount="/local", guests_per_node=2, defaults=(("batch", "a"),)
    )
    reports._show(reportdata.make(replace(made, lease=replace(made.lease, request=asked)), []))
    text = " ".join(capsys.readouterr().out.split())
    assert "guests 2 on each node --vhpc-disk 2048M:/local set by policy batch = guest, by rule 'a'" in text
    assert "--vhpc" not in text.partition("2048M")[2]
    document = reportdata.document(found())
    assert (document["guests_per_node"], document["batch"]) == (1, "guest")
    assert (document["disk_mib"], document["disk_mount"]) == (None, "")


def test_a_refusal_is_said_once() -> None:
    made = record()
    refused = replace(made, lease=replace(made.lease, refusal="too small"))
    said = reportdata.lines(
        reportdata.make(refused, [NodeReport(GENERATION, "n1", HOST, (), ("too small",))])
    )
    assert [entry for entry in said if entry[1] == "too small"] == [("vhpcd", "too small")]


@pytest.mark.promise("attack.report")
def test_html_has_no_markup_of_others() -> None:
    text = reporthtml.render(found(HOSTILE))
    page = Page(text)
    assert set(page.tags) == {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "div", "footer"),
        *("table", "thead", "tbody", "tr", "th", "td", "wbr", "svg", "rect", "text"),
    }
    assert not any(name.startswith("on") or name in ("src", "href") for name, _ in page.attributes)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
    shown = HOSTILE.replace("\x1b", "?").replace("\x07", "?").replace("\u202e", "?")
    assert "".join(page.texts).count(shown) >= 4, "name, stage, node's line and acknowledgement are shown"


@pytest.mark.promise("attack.report")
def test_html_is_whole_by_itself() -> None:
    text = reporthtml.render(found())
    addresses = set(re.findall(r"https?://[^\"' <]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}, "only the name of SVG"
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_html_draws_placement_and_stages() -> None:
    text = reporthtml.render(found())
    page = Page(text)
    assert page.tags.count("svg") == 1 + 2 + 6, "one placement, the scales of boot and teardown, six stages"
    words = "".join(page.texts)
    assert "42.0.0123abcd g0: CPUs 4-5, 1024 MiB of cell 1, 3b:00.0, 5e:00.2" in words
    assert "n1 setup g0: from 1.000 s, 2.500 s" in words
    # boot: from 100 s to 103.5 s; 1 s is 28.57 % of it
    bars = re.findall(r'<rect class="(bar(?:-failed)?)" x="([\d.]+)%" y="3" width="([\d.]+)%"', text)
    assert bars[:4] == [("bar", "0.00", "28.57"), ("bar", "28.57", "71.43")] * 2
    assert [kind for kind, *_ in bars[4:]] == ["bar-failed", "bar-failed"]
    assert re.findall(r'<text x="(\d+)%"[^>]*>([\d.]+) s<', text)[:3] == [
        ("0", "0.00"),
        ("25", "0.88"),
        ("50", "1.75"),
    ]


def test_nodes_with_one_placement_share_a_picture() -> None:
    second = NodeReport(GENERATION, "n2", replace(HOST, node="n2"), (replace(GUEST, hostname="n2"),))
    first = NodeReport(GENERATION, "n1", HOST, (GUEST,))
    text = reporthtml.render(reportdata.make(record(), [first, second]))
    assert "<h3>n[1-2]</h3>" in text
    other = replace(second, guests=(replace(GUEST, cpus=(6, 7)),))
    text = reporthtml.render(reportdata.make(record(), [first, other]))
    assert ("<h3>n1</h3>" in text, "<h3>n2</h3>" in text) == (True, True)


def test_a_report_without_reports_of_nodes_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    bare = replace(record(), timelines=(), unclean=())
    refused = replace(
        bare, lease=replace(bare.lease, image=None, refusal="no such image\x1b[2J", state=LeaseState.REFUSED)
    )
    one = reportdata.make(refused, [])
    assert "Nothing." not in reporthtml.render(one)
    reports._show(one)
    out = capsys.readouterr().out
    assert "vhpcd: no such image?[2J" in out
    assert "\x1b" not in out


def test_the_digest_of_an_image_is_written_out_once(capsys: pytest.CaptureFixture[str]) -> None:
    digest = "sha256:" + "a" * 64
    one = record()
    pinned = replace(one.lease, request=replace(one.lease.request, image=ImageRef("tiny", "1", digest)))
    reports._show(reportdata.make(replace(one, lease=pinned), []))
    out = capsys.readouterr().out
    assert re.findall(r"^(?:image|digest) +(.*)$", out, re.MULTILINE) == ["tiny:1@sha256:" + "a" * 12, digest]
    # no image was found: nothing else has it
    refused = replace(pinned, image=None, state=LeaseState.REFUSED)
    reports._show(reportdata.make(replace(one, lease=refused), []))
    assert re.search(rf"^image +tiny:1@{digest}$", capsys.readouterr().out, re.MULTILINE)


def test_text_names_guests_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    reports._show(found(HOSTILE))
    out = capsys.readouterr().out
    (row,) = [one for one in out.splitlines() if one.startswith("n1    ") and GPU_AT in one]
    assert row.split() == ["n1", "0", "4-5", "1024", "1", "gpu", GPU_AT, "vf", VF_AT, "3.500"]
    assert re.search(r"partition key +0x1234", out)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", out)


def test_a_file_is_written_as_a_whole_or_not(tmp_path: Path) -> None:
    target = tmp_path / "job.html"
    reports._write_html(found(), str(target))
    assert target.read_text().endswith("</html>\n")
    assert list(tmp_path.iterdir()) == [target]
    with pytest.raises(UserError, match=r"cannot write .*: No such file"):
        reports._write_html(found(), str(tmp_path / "absent/job.html"))
    with pytest.raises(UserError, match="cannot write"):
        reports._write_html(found(), str(tmp_path))


# --- what a node tells ------------------------------------------------------------------


def plan() -> NodePlan:
    guest = GuestPlan(
        index=0,
        hostname="n1",
        pins=(VcpuPin(1, 4, 0), VcpuPin(0, 5, 0)),
        topology=GuestTopology(1, 1, 2, 1),
        cells=(GuestCell(0, (0, 1), 1024, 1),),
        memory_mib=1024,
        emulator_cpus=(4,),
        emulator_choice="",
    )
    return NodePlan(GENERATION, "n1", (guest,), 2048, 512)


def test_a_node_tells_of_its_guests_devices_only() -> None:
    one = plan()
    devices = (PassthroughDevice(GPU_AT, "gpu", 0, "x"), PassthroughDevice(VF_AT, "vf", 0, "x"))
    told = Told(GENERATION, "n1")
    told.place(HOST, replace(one, guests=(replace(one.guests[0], devices=devices),)))
    report = told.report()
    assert report.guests == (replace(GUEST, hostname="n1"),)
    assert report.host is not None
    assert [(f.address, f.virtfns) for f in report.host.pci] == [
        (GPU_AT, ()),
        (PF_AT, (VF_AT,)),
        (VF_AT, ()),
    ]
    assert report.host.cpus == HOST.cpus


def test_a_nodes_report_is_bounded() -> None:
    told = Told(GENERATION, "n1")
    told.say("", "one", "one", "x" * 5000, *(f"line {number}" for number in range(100)))
    lines = told.report().lines
    assert (lines[0], len(lines[1]), len(lines)) == ("one", 2000, 32)
    many = replace(HOST, cpus=tuple(HostCpu(cpu, cpu, 0, 0) for cpu in range(5000)))
    told.place(many, plan())
    report = told.report()
    assert report.host is None
    assert len(msgspec.json.encode(report)) < MAX_BYTES
    assert [guest.cpus for guest in report.guests] == [(5, 4)]
