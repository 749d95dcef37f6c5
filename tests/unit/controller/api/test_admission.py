# SPDX-License-Identifier: Apache-2.0
"""Limits of unknown peers, the connections that are closed at a limit, and the log of that."""

from __future__ import annotations

import asyncio
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vhpc_slurm.controller.api.admission import SHARES, Admission, Peer, PeerGroup, Quota, scaled
from vhpc_slurm.controller.api.attempts import REMEMBERED, Attempts
from vhpc_slurm.controller.api.ratelimited_log import RateLimitedLog

SMALL = {
    PeerGroup.TRUSTED: Quota(8, 8, 1000, 1000),
    PeerGroup.MEMBER: Quota(6, 3, 600, 300),
    PeerGroup.OTHER: Quota(4, 2, 200, 100),
}


class Hall:
    """Peers by name, and who was dropped in which order."""

    def __init__(self) -> None:
        self.dropped: list[str] = []
        self.peers: dict[str, Peer] = {}
        self.why: list[str] = []
        self.admission = Admission(SMALL, lambda _peer, why: self.why.append(why))

    def enter(self, name: str, address: str, group: PeerGroup = PeerGroup.OTHER) -> Peer:
        peer = self.peers[name] = Peer(address, group, lambda: self.dropped.append(name))
        self.admission.enter(peer)
        return peer


@pytest.fixture
def hall() -> Hall:
    return Hall()


def test_the_oldest_of_an_address_goes_not_the_newest(hall: Hall) -> None:
    for name in "abc":
        hall.enter(name, "1")
    hall.enter("d", "2")
    assert hall.dropped == ["a"]
    assert hall.why == ["its address has too many connections"]
    hall.admission.leave(hall.peers["b"])
    hall.enter("e", "1")
    assert hall.dropped == ["a"], "who has ended takes no room"


def test_over_all_limits_the_largest_address_is_closed(hall: Hall) -> None:
    for name, address in (("a", "1"), ("b", "2"), ("c", "2"), ("d", "3"), ("e", "4")):
        hall.enter(name, address)
    assert hall.dropped == ["b"]
    assert hall.why == ["other hosts have too many connections"]


def test_no_group_takes_the_room_of_another(hall: Hall) -> None:
    for number in range(50):
        hall.enter(f"o{number}", str(number))
        hall.enter(f"m{number}", "m", PeerGroup.MEMBER)
    trusted = [hall.enter(f"t{number}", "m", PeerGroup.TRUSTED) for number in range(8)]
    assert not any(name.startswith("t") for name in hall.dropped)
    assert {group: hall.admission.count(group) for group in PeerGroup} == {
        PeerGroup.TRUSTED: 8,
        PeerGroup.MEMBER: 3,
        PeerGroup.OTHER: 4,
    }
    for peer in trusted:
        hall.admission.grew(peer, 100)
    assert not any(name.startswith("t") for name in hall.dropped)


def test_the_largest_of_an_address_goes(hall: Hall) -> None:
    small, large = hall.enter("small", "1"), hall.enter("large", "1")
    hall.admission.grew(large, 60)
    hall.admission.grew(small, 39)
    assert hall.dropped == []
    hall.admission.grew(small, 2)
    assert hall.dropped == ["large"]
    hall.admission.grew(large, 1000)
    assert hall.dropped == ["large"], "it is gone, whatever it had in its hands"
    hall.admission.grew(small, 59)
    assert hall.dropped == ["large"], "and what it held is free"
    hall.admission.grew(small, 1)
    assert hall.dropped == ["large", "small"], "a single one may be too large as well"


def test_the_address_with_most_bytes_is_closed_first(hall: Hall) -> None:
    for name, count in (("a", 70), ("b", 90), ("c", 20)):
        hall.admission.grew(hall.enter(name, name), count)
    hall.admission.grew(hall.peers["c"], 25)
    assert hall.dropped == ["b"]
    assert hall.why == ["other hosts hold too many bytes"]


def test_as_many_connections_close_as_needed(hall: Hall) -> None:
    for name, address, count in (("a", "1", 45), ("b", "1", 46), ("c", "2", 90), ("d", "3", 19)):
        hall.admission.grew(hall.enter(name, address), count)
    assert hall.dropped == []
    hall.admission.grew(hall.peers["d"], 60)
    assert hall.dropped == ["b", "c"], "the first held less than what came"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(PeerGroup)), st.sampled_from("123"), st.integers(0, 400), st.booleans()
        ),
        max_size=60,
    )
)
def test_no_peer_exceeds_its_share(
    steps: list[tuple[PeerGroup, str, int, bool]],
) -> None:
    alive: dict[Peer, None] = {}
    admission = Admission(SMALL, lambda peer, _why: alive.pop(peer))
    for group, address, count, leaves in steps:
        peer = Peer(address, group, lambda: None)
        alive[peer] = None
        admission.enter(peer)
        admission.grew(peer, count)
        if leaves:
            admission.leave(peer)
            admission.leave(peer)
            alive.pop(peer, None)
        for one in PeerGroup:
            mine = [other for other in alive if other.group is one]
            assert admission.count(one) == len(mine) <= SMALL[one].connections
            assert sum(other.held for other in mine) <= SMALL[one].bytes
            for place in "123":
                there = [other for other in mine if other.address == place]
                assert len(there) <= SMALL[one].connections_each
                assert sum(other.held for other in there) <= SMALL[one].bytes_each
    for peer in alive:
        admission.leave(peer)
    assert [admission.count(group) for group in PeerGroup] == [0, 0, 0]


def test_a_process_with_few_descriptors_has_smaller_shares() -> None:
    assert scaled(SHARES, 100_000) == SHARES
    few = scaled(SHARES, 512)
    assert sum(share.connections for share in few.values()) <= 512 + 8 * 3
    assert all(share.connections_each >= 4 for share in few.values())
    assert {group: share.bytes for group, share in few.items()} == {
        group: share.bytes for group, share in SHARES.items()
    }


# --- attempts -----------------------------------------------------------------------------------


def test_an_address_has_a_burst_and_then_a_rate() -> None:
    now = 0.0
    attempts = Attempts(rate=10.0, burst=5.0, clock=lambda: now)
    assert [attempts.another("1") for _ in range(7)] == [True] * 5 + [False] * 2
    assert attempts.another("2"), "another address has its own"
    now = 0.25
    assert [attempts.another("1") for _ in range(3)] == [True, True, False]
    now = 100.0
    assert sum(attempts.another("1") for _ in range(10)) == 5


def test_addresses_are_forgotten_after_a_while() -> None:
    attempts = Attempts(burst=1.0, clock=lambda: 0.0)
    assert attempts.another("0")
    for number in range(1, REMEMBERED + 10):
        attempts.another(str(number))
    assert len(attempts._buckets) == REMEMBERED


# --- the log -------------------------------------------------------------------------------------


@pytest.mark.promise("attack.log-fill")
def test_lines_of_a_kind_are_limited_and_the_rest_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "sparing")

    async def say() -> None:
        sparing = RateLimitedLog(logging.getLogger("sparing"), lines=2, window_s=0.1)
        for number in range(1000):
            sparing.warning("message %d", number)
        sparing.warning("another kind")
        await asyncio.sleep(0.3)
        sparing.warning("message %d", 1000)
        await asyncio.sleep(0.3)

    asyncio.run(say())
    assert [record.getMessage() for record in caplog.records] == [
        "message 0",
        "message 1",
        "another kind",
        "998 more like this within 0.1 s, the last: message 999",
        "message 1000",
    ]
