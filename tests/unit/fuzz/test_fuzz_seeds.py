# SPDX-License-Identifier: Apache-2.0
"""The committed seeds of the Python fuzz targets: inputs that once found something stay harmless."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import ModuleType

import fuzz_control
import fuzz_files
import fuzz_forwarding
import fuzz_import
import fuzz_peers
import fuzz_slurm
import fuzz_vhpcd
import pytest

from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.node.store.peers import server
from vhpc_slurm.node.store.peers.wire import PeerError

CORPUS = Path(fuzz_files.__file__).parent / "corpus"
TARGETS: dict[str, ModuleType] = {
    "control": fuzz_control,
    "files": fuzz_files,
    "forwarding": fuzz_forwarding,
    "import": fuzz_import,
    "peers": fuzz_peers,
    "slurm": fuzz_slurm,
    "vhpcd": fuzz_vhpcd,
}
SEEDS = sorted(path for name in TARGETS for path in (CORPUS / name).iterdir())


@pytest.mark.promise("fuzz.seeds")
@pytest.mark.parametrize("seed", SEEDS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_seed_finds_nothing(seed: Path) -> None:
    TARGETS[seed.parent.name].one_input(seed.read_bytes())


def test_one_request_of_a_peer_is_granted_among_the_seeds() -> None:
    asked = sorted((CORPUS / "peers").iterdir())
    granted = []
    for path in asked:
        with contextlib.suppress(PeerError):
            message = path.read_bytes().partition(b"\n")[0]
            found = server._judge(fuzz_peers.Root(), fuzz_peers.NODE, "127.0.0.1", message)
            granted += [path.name] if found.blob.size else []
    assert granted == ["ask"]


def test_the_whole_life_of_a_lease_is_among_the_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lest the fuzzer start from requests that are all refused."""
    heard: list[wire.Answer] = []
    check = fuzz_vhpcd._check

    def listening(payload: bytes) -> wire.Answer:
        heard.append(check(payload))
        return heard[-1]

    monkeypatch.setattr(fuzz_vhpcd, "_check", listening)
    fuzz_vhpcd.one_input((CORPUS / "vhpcd/whole-life").read_bytes())
    assert not any(isinstance(answer, wire.Failure) for answer in heard)
    states = [
        page.records[0].lease.state for page in heard if isinstance(page, wire.LeasePage) and page.records
    ]
    assert [str(state) for state in states] == ["ending", "released"]
