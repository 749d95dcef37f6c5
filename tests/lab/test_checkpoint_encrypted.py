# SPDX-License-Identifier: Apache-2.0
"""Encrypted checkpoints: a text of the guest's memory is in no file, and the guest continues elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Lab
from injection import prints, settled
from saving import FOLDER, checkpoint, checkpoints_on

pytestmark = pytest.mark.lab

TEXT = "memory-of-the-guest"
# The text is put together in the guest, so that no file of the host has it.
SCRIPT = """
text=memory-of; text=$text-the-guest; echo $text > /tmp/text
for turn in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do echo turn $turn; sleep 0.5; done
test "$(cat /tmp/text)" = "$text" && exit 7
"""


@pytest.fixture(scope="module", autouse=True)
def _checkpoints(lab: Lab) -> Iterator[None]:
    with checkpoints_on(lab, "encrypt = true\\n"):
        yield


@pytest.mark.promise("attack.saved")
@pytest.mark.slow
def test_an_encrypted_checkpoint_is_continued(lab: Lab) -> None:
    first = lab.submit(SCRIPT, "-w", "n1", "-n1", "--mem=600")
    prints(first, "turn 3", 240)
    checkpoint(lab, str(first.id), "--stop", "--name", "hidden")
    first.leave_queue()
    assert lab.run("n2", "sh", "-c", f"ls {FOLDER}/*/0.state").out
    assert lab.run("n2", "grep", "-rla", TEXT, FOLDER, check=False).out == ""
    assert lab.run("n2", "grep", "-rla", "Linux version", FOLDER, check=False).out == ""
    second = lab.submit("echo never", "-w", "n2", "-n1", "--mem=600", "--vhpc-resume=hidden", image=None)
    assert second.wait(timeout=300) == "FAILED"
    assert second.accounted() == ["FAILED", "7:0"]
    settled(lab)
