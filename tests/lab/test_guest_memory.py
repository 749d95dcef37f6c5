# SPDX-License-Identifier: Apache-2.0
"""The memory of a guest: what programs know of it, and what happens when it is used up."""

from __future__ import annotations

import re

import pytest
from cluster import Job, Lab

pytestmark = pytest.mark.lab

# Small pieces: the kernel refuses one that is larger than all memory, and kills nothing.
HOG = """
held = []
while True:
    held.append(bytearray(b'x') * (1 << 20))
    print("held", len(held), flush=True)
"""
KILLED = r"\.{step}: a program in the guest of n1 was killed for memory .* has (\d+) MiB for programs"


def figure(job: Job, name: str) -> int:
    """The number that the script has printed last behind this word."""
    return int(re.findall(rf"^{name} (\d+)$", job.output(), re.M)[-1])


@pytest.mark.promise("memory.figure", "memory.kill", "usage.oom")
def test_a_program_that_needs_too_much_memory_ends_with_137(lab: Lab) -> None:
    """In the script and in a step. The agent, whose score is not that of programs, starts both."""
    script = f"""cat > hog.py <<'EOF'\n{HOG}EOF
    echo memory $VHPC_MEM_MB
    echo agent $(tr -d - < /proc/1/oom_score_adj)
    echo own $(cat /proc/self/oom_score_adj)
    sh -c 'echo -1 > /proc/self/oom_score_adj' 2>/dev/null; echo lower $?
    python3 hog.py > hog-script
    echo script $?
    tail -n 1 hog-script
    VHPC_MEM_MB=7 srun sh -c 'echo step $VHPC_MEM_MB; exec python3 hog.py > hog-step'
    echo srun $?
    srun true && echo went on
    rm hog.py hog-script hog-step
    """
    job = lab.finish(script, "-n1", "--mem=700", "-w", "n1")
    assert "\nwent on\n" in job.output(), job.output()
    assert (figure(job, "agent"), figure(job, "own"), figure(job, "lower")) == (1000, 0, 1)
    assert (figure(job, "script"), figure(job, "srun")) == (137, 137)
    memory = figure(job, "memory")
    assert memory == figure(job, "step") < 700
    assert 0.9 * memory <= figure(job, "held") <= 1.05 * memory
    for step in ("batch", "0"):
        assert re.findall(KILLED.format(step=step), job.output()) == [str(memory)], job.output()
    assert job.accounted("State,ExitCode") == ["COMPLETED", "0:0"]


@pytest.mark.promise("memory.files")
@pytest.mark.parametrize("options", [(), ("--vhpc-disk=64M",)], ids=["layer-in-memory", "layer-on-disk"])
def test_full_file_systems_leave_memory_for_programs(lab: Lab, options: tuple[str, ...]) -> None:
    """The writable layer, /dev/shm and /run, at the same time."""
    script = """
    fill() { $2 dd if=/dev/zero of=$1/full bs=1M 2>&1 | grep -o 'No space left on device'; }
    total=$(awk '/^MemTotal/ { print int($2 / 1024) }' /proc/meminfo)
    echo total $total
    echo shm $(df -m --output=size /dev/shm | tail -n 1)
    stat -fc %T /dev/shm; stat -c %a /dev/shm
    grep -c ' /dev/shm .*nosuid,nodev' /proc/mounts
    fill /dev/shm & fill /tmp & fill /run sudo & wait
    df --output=avail / /dev/shm /run | tail -n +2 | tr -d ' ' | tr '\\n' ' '; echo
    python3 -c "import mmap; open('/dev/shm/full', 'ab').write(bytes(1 << 20))" 2>&1 | grep -o 'OSError.*'
    python3 -c 'held = bytearray(32 << 20); print("python ran")'
    rm /dev/shm/full; echo again > /dev/shm/new; cat /dev/shm/new
    """
    job = lab.finish(script, "-n1", "--mem=700", "-w", "n1", *options)
    lines = job.output().splitlines()
    assert job.accounted("State,ExitCode") == ["COMPLETED", "0:0"], job.output()
    assert abs(figure(job, "shm") - figure(job, "total") // 2) <= 2, job.output()
    assert lines[2:5] == ["tmpfs", "1777", "1"]
    assert lines[5:8] == ["No space left on device"] * 3
    assert lines[8:] == ["0 0 0 ", "OSError: [Errno 28] No space left on device", "python ran", "again"]
