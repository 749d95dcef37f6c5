# SPDX-License-Identifier: Apache-2.0
"""Figures of GPUs from an agent's answer to the rows of seff and report; absent and impossible ones."""

from __future__ import annotations

import struct

import pytest

from vhpc_slurm.cli.jobs import usagerows
from vhpc_slurm.model import Generation, GuestUsage, NodeUsage, job_usage
from vhpc_slurm.node.guest import usage
from vhpc_slurm.node.guest.channel import ChannelError
from vhpc_slurm.node.guest.wire import Op, Tag


def field(tag: Tag, value: bytes) -> bytes:
    return struct.pack("<HHI", tag, 0, len(value)) + value


def figure(tag: Tag, value: int) -> bytes:
    return field(tag, struct.pack("<Q", value))


def gpu(address: bytes, *figures: bytes) -> bytes:
    return field(Tag.GPU, field(Tag.GPU_ADDRESS, address) + b"".join(figures))


class Agent:
    """Answers every request with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer

    def ask(self, op: Op, body: bytes, timeout_s: float) -> bytes:
        return self.answer


def asked(answer: bytes) -> GuestUsage:
    return usage.ask(Agent(answer), 0, 1.0)  # type: ignore[arg-type]


def lines(answer: bytes) -> list[str]:
    node = NodeUsage(Generation(7, 0, "0123abcd"), "n1", (asked(answer),))
    return usagerows.gpu_lines(job_usage([node]))


@pytest.mark.promise("usage.gpus")
def test_a_gpu_has_a_line_with_what_is_known() -> None:
    first = gpu(
        b"0000:05:00.0",
        figure(Tag.BUSY_E4, 8340),
        figure(Tag.MEMORY_BYTES, 10 << 30),
        figure(Tag.POWER_MW, 312500),
    )
    said = lines(first + gpu(b"0000:06:00.0", figure(Tag.BUSY_E4, 0)))
    assert said[0].startswith("GPU 0000:05:00.0: 83.4% busy, peak memory ")
    assert said[0].endswith(", 312.5 W (guest 0 on n1)")
    assert said[1] == "GPU 0000:06:00.0: 0.0% busy (guest 0 on n1)"


def test_an_agent_without_figures_of_gpus_has_no_lines() -> None:
    assert lines(b"") == []


def test_a_library_that_failed_has_one_line() -> None:
    said = lines(field(Tag.GPU_MISSING, b"NVML of the image was ended by signal 11\x1b[2J"))
    assert len(said) == 1
    assert said[0].startswith("no figures of GPUs of guest 0 on n1: NVML of the image was ended by signal 11")
    assert "\x1b" not in said[0]


@pytest.mark.parametrize("address", [b"", b"0000:05:00", b"0000:05:00.0\n", b"zzzz:05:00.0"])
def test_an_invalid_address_of_a_gpu_is_refused(address: bytes) -> None:
    with pytest.raises(ChannelError):
        asked(gpu(address))


def test_more_gpus_than_a_guest_has_are_refused() -> None:
    with pytest.raises(ChannelError):
        asked(gpu(b"0000:05:00.0") * (usage.GPUS_MAX + 1))


def test_impossible_figures_are_not_known() -> None:
    (found,) = asked(gpu(b"0000:05:00.0", figure(Tag.BUSY_E4, 10_001), figure(Tag.MEMORY_BYTES, 2**60))).gpus
    assert (found.busy_e4, found.memory_bytes, found.power_mw) == (None, None, None)
