# SPDX-License-Identifier: Apache-2.0
"""Every partitions file that OpenSM takes amiss, put under a running vhpcd by hand."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from controller_lab import Munged, wait_for
from fabric_lab import DEFAULT, GUIDS, SimulatedFabric, sets
from partition_files import BAD
from vhpcd_fabric import HAVE_ALL, NEEDED, a_vhpcd, opened
from vhpcd_process import Vhpcd

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import partitions

pytestmark = pytest.mark.skipif(not HAVE_ALL, reason=NEEDED)


@pytest.fixture(scope="module")
def lasting_vhpcd(
    tmp_path_factory: pytest.TempPathFactory, daemon: Munged, lasting: SimulatedFabric
) -> Iterator[Vhpcd]:
    lasting.replace(DEFAULT)
    lasting.sweep()
    with a_vhpcd(tmp_path_factory.mktemp("vhpcd"), daemon, lasting) as started:
        opened(started, 1, "n1", "n2")
        yield started


def noticed(vhpcd: Vhpcd) -> int:
    """How often a file was restored before OpenSM read it, or the fabric was told again after that."""
    return vhpcd.log.count("vhpcd has restored it") + vhpcd.log.count("tells the fabric again")


DAMAGE = [(text.encode(), does) for text, _, _, does in BAD]


@pytest.mark.promise("fabric.file")
@pytest.mark.parametrize(
    "damage", [*(text for text, _ in DAMAGE), None], ids=[*(f"{row}" for row in range(len(DAMAGE))), "gone"]
)
def test_a_damaged_file_is_noticed_by_vhpcd_and_repaired(
    lasting_vhpcd: Vhpcd, lasting: SimulatedFabric, damage: bytes | None
) -> None:
    """Every row of what OpenSM takes amiss; the sweep that a link trap would start is ours."""
    good = lasting.partitions.read_bytes()
    before = noticed(lasting_vhpcd)

    def spoil() -> None:
        if damage is None:
            lasting.partitions.unlink()
        else:
            lasting.replace(damage)
        lasting.opensm.send_signal(signal.SIGHUP)

    def cured() -> bool:
        try:
            same = partitions.parse(lasting.partitions.read_bytes()) == partitions.parse(good)
        except (OSError, FabricError):
            return False
        if same and noticed(lasting_vhpcd) == before:
            # the repair of the case before may still have been writing, and have replaced the damage
            spoil()
            return False
        return same

    spoil()
    wait_for(cured, "not cured")
    expected = {
        GUIDS[0]: {0x7FFF, 0x9000},
        GUIDS[1]: {0x7FFF, 0x9000},
        GUIDS[2]: {0x7FFF},
        GUIDS[15]: {0x7FFF},
    }
    wait_for(lambda: sets(lasting, *expected) == expected, "not cured")
    wait_for(lambda: lasting_vhpcd.client.status().fabric.what == "", "not well again")
