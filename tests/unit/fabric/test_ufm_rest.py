# SPDX-License-Identifier: Apache-2.0
"""The backend ufm-rest against a stand-in for UFM (see fake_ufm); ports are read by smpquery."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from backend_site import verify
from controller_lab import allocation, identity, request
from fabric_lab import DEFAULT, GUIDS, SM_GUID, SimulatedFabric
from fake_ufm import TOKEN, FakeUfm, fake_ufm
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ufm_site import ALICE, MARK, Site, soon_again, ufm_server, ufm_site

from pace import examples
from vhpc_slurm.config.fabric import Fabric
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.readback import Readback
from vhpc_slurm.fabric.select import backend
from vhpc_slurm.fabric.smp import FabricReader
from vhpc_slurm.fabric.ufm_client import UfmBusyError, UfmClient
from vhpc_slurm.model import LeaseState

_soon_again = soon_again
ufm = ufm_server
site = ufm_site

pytestmark = pytest.mark.long


# --- with a fabric ------------------------------------------------------------------------------


@pytest.fixture
def managed(
    lasting: SimulatedFabric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[SimulatedFabric, FakeUfm, Readback]]:
    monkeypatch.chdir(lasting.folder)
    lasting.replace(DEFAULT)
    lasting.sweep()
    with fake_ufm(tmp_path, lasting) as ufm, closing(FabricReader(environment=lasting.environment)) as reader:
        reader.scan(60.0)
        yield lasting, ufm, Readback(reader, 2.0)


def tables(fabric: SimulatedFabric, *holders: tuple[int, int]) -> bool:
    """Whether exactly these ports have these keys, and the default one as all others."""
    wanted = {guid: {0x7FFF} for guid in GUIDS} | {SM_GUID: {0xFFFF}}
    for guid, pkey in holders:
        wanted[guid] = {0x7FFF, 0x8000 | pkey}
    return {guid: set(has) for guid, has in fabric.tables().items()} == wanted


def test_ports_have_their_key_only_while_the_job_runs(
    managed: tuple[SimulatedFabric, FakeUfm, Readback], tmp_path: Path
) -> None:
    fabric, ufm, readback = managed
    site = Site(ufm, tmp_path, readback)
    site.backend.validate(site.snapshot)
    assert site.open(1, "n1", "n2").lease.state is LeaseState.READY
    assert site.open(2, "n1").lease.network.pkey == 0x1001
    assert tables(fabric, (GUIDS[0], 0x1000), (GUIDS[1], 0x1000), (GUIDS[4], 0x1001))
    assert fabric.tables(GUIDS[0])[GUIDS[0]][0] == 0x9000, "at index 0, as NCCL and IPoIB expect it"
    assert site.backend.audit(site.snapshot) == ()
    site.service.end(1, 0)
    assert tables(fabric, (GUIDS[4], 0x1001))
    assert site.states() == {1: "quarantine", 2: "active"}
    site.service.end(2, 0)
    assert tables(fabric)
    assert set(ufm.keys) == {MARK}


@pytest.mark.promise("ufm.proof")
def test_a_key_in_ufm_without_ports_is_no_proof(
    managed: tuple[SimulatedFabric, FakeUfm, Readback], tmp_path: Path
) -> None:
    fabric, ufm, readback = managed
    site = Site(ufm, tmp_path, readback)
    ufm.reaches_fabric = False
    with pytest.raises(FabricError, match="the fabric does not carry key 0x1000"):
        site.open(1, "n1")
    assert ufm.members(0x1000) == {GUIDS[0]}
    assert site.states() == {1: "applied"}
    ufm.reaches_fabric = True
    ufm.keys[0x1000].ports.clear()  # an operator makes UFM do it again
    assert site.open(1, "n1").lease.state is LeaseState.READY
    assert tables(fabric, (GUIDS[0], 0x1000))
    ufm.reaches_fabric = False
    site.service.end(1, 0)
    assert site.states() == {1: "draining"}, "the port still has the key"
    assert {finding.port_guid for finding in site.backend.audit(site.snapshot)} >= {0}


def test_the_auditor_sees_ports_that_ufm_does_not_list(
    managed: tuple[SimulatedFabric, FakeUfm, Readback], tmp_path: Path
) -> None:
    fabric, ufm, readback = managed
    site = Site(ufm, tmp_path, readback)
    site.open(1, "n1", "n2")
    fabric.replace(b"")  # OpenSM fails open
    fabric.sweep()
    assert {finding.port_guid for finding in site.backend.audit(site.snapshot)} == set(GUIDS)


# --- without: what UFM itself does ----------------------------------------------------------------


def test_without_a_fabric_the_proof_sees_no_port(site: Site, ufm: FakeUfm) -> None:
    record = site.open(1, "n1", "n2")
    assert ufm.members(0x1000) == ALICE
    assert ufm.keys[0x1000].ports["02cc100000000000"] == ("full", True)
    proof = verify(site.backend, record.lease.generation, site.snapshot)
    assert (proof.scanned, proof.seen, proof.absent) == (0, 0, 2)
    site.service.end(1, 0)
    assert ufm.members(0x1000) == set()
    assert site.states() == {1: "quarantine"}


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("GET", 500),
        ("GET", 503),
        ("GET", "cut"),
        ("POST", 409),
        ("POST", 429),
        ("POST", 502),
        ("POST", "cut"),
        ("POST", "cut-after"),
        ("POST", "half"),
        ("POST", "accept"),
    ],
)
def test_a_start_survives_temporary_faults(site: Site, ufm: FakeUfm, method: str, kind: int | str) -> None:
    ufm.fail(method, kind, times=2, pkey=None if method == "GET" else 0x1000)
    assert site.open(1, "n1", "n2").lease.state is LeaseState.READY
    assert ufm.members(0x1000) == ALICE


@pytest.mark.parametrize("kind", [409, 500, "cut", "cut-after", "half", "accept"])
def test_an_end_survives_temporary_faults(site: Site, ufm: FakeUfm, kind: int | str) -> None:
    site.open(1, "n1", "n2")
    ufm.fail("DELETE", kind)
    site.service.end(1, 0)
    assert ufm.members(0x1000) == set()
    assert site.states() == {1: "quarantine"}


@pytest.mark.promise("ufm.proof")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (400, r"0x1000 lacks 2 ports: .* refuses: POST /resources/pkeys/: HTTP 400"),
        (403, "denies access.*System_Admin"),
        (404, r"refuses: POST /resources/pkeys/: HTTP 404"),
        (302, "HTTP 302"),
        (500, r"did not apply the key of .* within 1 s: .*HTTP 500"),
        ("accept", "0x1000 lacks 2 ports: UFM has accepted it"),
        ("half", "0x1000 lacks 1 ports: UFM has accepted it"),
        ("cut", r"lacks 2 ports: UFM at .* does not answer"),
    ],
)
def test_a_failed_proof_keeps_the_job_from_starting(
    ufm: FakeUfm, tmp_path: Path, kind: int | str, message: str
) -> None:
    site = Site(ufm, tmp_path, timeout_s=1.0)
    ufm.fail("POST", kind, times=99, pkey=0x1000)
    with pytest.raises(FabricError, match=message):
        site.open(1, "n1", "n2")
    stays = "reserved" if kind == 403 else "applied"
    assert site.states() == {1: stays}
    ufm.faults.clear()
    assert site.open(1, "n1", "n2").lease.state is LeaseState.READY, "and it can be tried again"


def test_one_job_s_trouble_is_not_the_other_s(ufm: FakeUfm, tmp_path: Path) -> None:
    site = Site(ufm, tmp_path, timeout_s=1.0)
    ufm.fail("POST", 500, times=99, pkey=0x1000)
    first, second = (
        site.service.reserve(request(job_id), allocation("n1"), identity(0)).lease.generation
        for job_id in (1, 2)
    )
    results = site.service.batches.run([first, second])
    assert isinstance(results[first], FabricError)
    assert site.states() == {1: "applied", 2: "active"}


@pytest.mark.promise("ufm.proof")
def test_a_key_that_does_not_go_stays_the_job_s(ufm: FakeUfm, tmp_path: Path) -> None:
    site = Site(ufm, tmp_path, timeout_s=1.0)
    site.open(1, "n1")
    ufm.fail("DELETE", "accept", times=99)
    site.service.end(1, 0)
    assert site.states() == {1: "draining"}
    ufm.faults.clear()
    site.service.settle()
    assert site.states() == {1: "quarantine"}


def test_an_answer_without_end_is_not_waited_for(ufm: FakeUfm, tmp_path: Path) -> None:
    site = Site(ufm, tmp_path, timeout_s=1.0, request_timeout_s=1.0)
    ufm.fail("GET", "slow", times=99)
    with pytest.raises(UfmBusyError, match=r"timed out|the answer was not complete in time"):
        site.backend.validate(site.snapshot)


def test_a_login_page_is_an_error(site: Site, ufm: FakeUfm) -> None:
    ufm.fail("GET", "html", times=99)
    with pytest.raises(FabricError, match=r"cannot be read.*login page"):
        site.backend.validate(site.snapshot)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["0x1000", "0x8001", "guids", "guid", "membership", ""]), inner)
    ),
    max_leaves=8,
)


@given(data=st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
@example(data=b'{"0x1000": {"guids": [{"guid": "02cc100000000000", "membership": "limited"}]}}')
@example(data=b'{"0x1000": {"guids": [{"guid": "0x2cc"}]}}')
@example(data=b'{"x": {}}')
@example(data=b'{"0x1000": {"guids": null}}')
@settings(max_examples=examples(300), deadline=None)
def test_any_answer_of_ufm_is_parsed_or_refused(data: bytes) -> None:
    client = UfmClient("https://ufm.example", Path("/none"), "", 1.0)
    client._ask = lambda *_, **__: data  # type: ignore[method-assign]
    try:
        found = client.partitions()
    except FabricError:
        return
    for pkey, members in found.items():
        assert 0 <= pkey <= 0x7FFF
        assert all(0 <= guid < 1 << 64 and full in (True, False) for guid, full in members.items())


def test_an_unreachable_ufm_is_reported(ufm: FakeUfm, tmp_path: Path) -> None:
    site = Site(ufm, tmp_path, timeout_s=0.5)
    ufm.stop()
    with pytest.raises(FabricError, match=r"does not answer: .*refused"):
        site.open(1, "n1")
    assert site.states() == {1: "reserved"}


# --- authentication -------------------------------------------------------------------------------


def test_a_wrong_token_is_refused_and_never_shown(site: Site, ufm: FakeUfm, tmp_path: Path) -> None:
    ufm.token = "another"
    with pytest.raises(FabricError, match=r"refuses the token.*HTTP 401") as caught:
        site.backend.validate(site.snapshot)
    assert TOKEN not in caught.value.line()
    (tmp_path / "token").write_text("another\n")
    site.backend.validate(site.snapshot)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda token: token.chmod(0o640), "is readable by other users: it has to be secret"),
        (lambda token: token.write_text(""), "has no token"),
        (lambda token: token.write_text("a\r\nX-Evil: b"), "has no token"),
        (lambda token: token.unlink(), "cannot read UFM's token"),
        (lambda token: (token.rename(token.parent / "t"), token.symlink_to("t")), "cannot read UFM's token"),
    ],
)
def test_an_invalid_token_is_not_sent(
    site: Site, ufm: FakeUfm, tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(tmp_path / "token")
    with pytest.raises(FabricError, match=message):
        site.backend.validate(site.snapshot)
    assert ufm.asked == []


def test_a_certificate_of_another_ca_is_refused(ufm: FakeUfm, tmp_path: Path) -> None:
    site = Site(ufm, tmp_path)
    client = UfmClient(ufm.url, tmp_path / "token", "", 5.0)  # the system's CAs
    with pytest.raises(FabricError, match=r"cannot be trusted.*fabric.ufm_ca"):
        client.version()
    assert site.client.version() == "6.22.1-3"


@pytest.mark.promise("keys.renew")
def test_a_renewed_ca_is_used_without_a_restart(site: Site, ufm: FakeUfm, tmp_path: Path) -> None:
    assert site.client.version() == "6.22.1-3"
    old = (tmp_path / "ca.pem").read_bytes()
    ufm.renew()
    assert site.client.version() == "6.22.1-3"
    (tmp_path / "ca.pem").write_bytes(old)
    with pytest.raises(FabricError, match="cannot be trusted"):
        site.client.version()


def test_a_certificate_of_another_host_is_refused(tmp_path: Path) -> None:
    with fake_ufm(tmp_path, host="ufm.example") as ufm:
        site = Site(ufm, tmp_path, timeout_s=1.0)
        with pytest.raises(FabricError, match=r"cannot be trusted.*127.0.0.1"):
            site.open(1, "n1")
        assert ufm.asked == []


@pytest.mark.parametrize(
    "url", ["", "http://ufm.example", "https://", "https://u.example/ufmRest", "https://u.example:x", "ufm"]
)
def test_an_invalid_address_of_ufm_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(FabricError, match="is not the address of a UFM"):
        UfmClient(url, tmp_path / "token", "", 5.0)


def test_invalid_certificates_are_refused(tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("none")
    for path in (tmp_path / "ca", tmp_path / "absent"):
        with pytest.raises(FabricError, match="cannot read the certificates"):
            UfmClient("https://ufm.example", tmp_path / "token", str(path), 5.0)


def test_a_mark_within_the_pool_is_refused() -> None:
    with pytest.raises(FabricError, match="ufm_mark_pkey 0x1002 is a key for jobs"):
        backend(
            Fabric(backend="ufm-rest", ufm_url="https://ufm.example", ufm_mark_pkey=0x1002),
            lambda _epoch, _tag: False,
        )
