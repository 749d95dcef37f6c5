# SPDX-License-Identifier: Apache-2.0
"""MIG mode that a user of a whole GPU left on, with a fake of NVIDIA's tool."""

from __future__ import annotations

import pytest
from device_rig import Rig, clear, device_rig, quarantined, take
from fake_gpu_tools import V100, GpuTools, gpu_tools

from vhpc_slurm.errors import NodeError
from vhpc_slurm.node.devices import mig, scrub
from vhpc_slurm.node.devices.quarantine import QuarantinedError
from vhpc_slurm.node.host.attribute import Until

rig, tools = device_rig, gpu_tools
QUERY, FORCE = "--query-mig-mode", "--force-mig-off-after-reset"
CLEAR = "--reset-with-sbr --clear-memory"


@pytest.mark.promise("devices.mig-mode")
def test_mig_mode_ends_with_the_job_that_turned_it_on(rig: Rig, tools: GpuTools) -> None:
    gpu = rig.gpus[0]
    journal = take(rig, gpu)
    tools.mig(gpu, on=True)
    clear(rig, journal)
    assert tools.file(gpu, "mode").read_text() == "disabled"
    assert tools.asked(gpu) == [QUERY, FORCE, QUERY, CLEAR]
    assert (gpu.was_reset, quarantined(rig)) == (2, [])


@pytest.mark.promise("devices.mig-mode")
def test_without_mig_mode_there_is_no_second_reset(rig: Rig, tools: GpuTools) -> None:
    one, other = rig.gpus  # the other one is a GPU whose mode ends with each reset: it is not asked
    journal = take(rig, one, other)
    tools.mig(one, on=False)
    clear(rig, journal)
    assert (tools.asked(one), tools.asked(other)) == ([QUERY, CLEAR], [CLEAR])
    assert (one.was_reset, other.was_reset) == (1, 1)


@pytest.mark.promise("devices.mig-mode")
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("stuck", "MIG mode of GPU {} is still on: it survived a reset"),
        ("silent", "MIG mode of GPU {} was not read: nvidia_gpu_tools.py does not print it"),
    ],
)
def test_a_gpu_that_stays_in_mig_mode_is_quarantined(
    rig: Rig, tools: GpuTools, fault: str, words: str
) -> None:
    gpu = rig.gpus[0]
    journal = take(rig, gpu)
    tools.mig(gpu, on=True)
    tools.file(gpu, fault).touch()
    with pytest.raises(QuarantinedError) as caught:
        clear(rig, journal)
    assert words.format(gpu.address) in caught.value.line()
    assert quarantined(rig) == [gpu.address]


def test_a_gpu_whose_memory_cannot_be_cleared_is_quarantined(rig: Rig, tools: GpuTools) -> None:
    gpu = rig.gpus[0]
    journal = take(rig, gpu)
    tools.file(gpu, "unsupported").touch()
    with pytest.raises(QuarantinedError, match=f"GPU {gpu.address} was not cleared: .* does not support it"):
        clear(rig, journal)
    assert quarantined(rig) == [gpu.address]


def test_the_tool_does_not_clear_gpus_before_turing(rig: Rig, tools: GpuTools) -> None:
    """Without it no V100 is worse off: the reset is all that there is."""
    gpu = rig.gpus[0]
    tools.model(gpu, V100)
    clear(rig, take(rig, gpu))
    assert not (tools.state / "log").exists()
    assert quarantined(rig) == []


def test_without_the_tool_nothing_is_known(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tools: GpuTools
) -> None:
    gpu = rig.gpus[0]
    tools.mig(gpu, on=True)
    root = rig.layout.config.host.sysfs_root
    with pytest.raises(NodeError, match="is in MIG mode: MIG and NVSwitch partitions exclude each other"):
        mig.check(root, gpu.address, Until(5))
    monkeypatch.setattr(scrub, "WHERE", "/nowhere")
    mig.check(root, gpu.address, Until(5))
