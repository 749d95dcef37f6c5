# SPDX-License-Identifier: Apache-2.0
"""A job is paused for a day: connections between its guests continue, its clocks are right, timers are quiet.

The day is simulated: the Prologs of the second job have a clock that is 24 hours ahead.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster import Lab, vlab_status
from injection import prints, said, settled
from saving import checkpoint, checkpoints_on, written

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(900)]

DAY_S = 86400
TURNS = 60
# Two tasks exchange numbers over one connection; each turn says what the clocks of the guest say.
PROGRAM = f"""
import os, signal, socket, time
rank, names = int(os.environ["SLURM_PROCID"]), os.environ["VHPC_NODELIST"].split(",")
ticks = 0
def tick(*_):
    global ticks
    ticks += 1
signal.signal(signal.SIGALRM, tick)
signal.setitimer(signal.ITIMER_REAL, 1, 1)
if rank == 0:
    server = socket.create_server(("", 7000))
    link = server.accept()[0]
else:
    for _ in range(300):
        try:
            link = socket.create_connection((names[0], 7000), 1)
            break
        except OSError:
            time.sleep(0.2)
    link.settimeout(None)
start = time.monotonic()
for turn in range(1, {TURNS} + 1):
    link.sendall(turn.to_bytes(4, "big"))
    got = link.recv(4, socket.MSG_WAITALL)
    assert int.from_bytes(got, "big") == turn, (turn, got)
    print("rank", rank, "turn", turn, "wall", time.time(), "steady", time.monotonic() - start, "ticks", ticks,
          flush=True)
    time.sleep(0.5)
"""
SCRIPT = f"cat > ~/day.py <<'END'\n{PROGRAM}\nEND\nsrun python3 ~/day.py; echo status $?"
SHAPE = ("-N2", "--ntasks-per-node=1")
LINE = re.compile(r"rank (\d) turn (\d+) wall ([\d.]+) steady ([\d.]+) ticks (\d+)\Z")
TOMORROW = f"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *t)
{{
    int rc = (int)syscall(SYS_clock_gettime, id, t);
    t->tv_sec += id == CLOCK_REALTIME ? {DAY_S} : 0;
    return rc;
}}
"""


@pytest.fixture(scope="module")
def library() -> Iterator[str]:
    """A library with which programs of the nodes live a day later."""
    folder = Path(vlab_status()["paths"]["scratch"], "tomorrow")
    folder.mkdir()
    command = ["cc", "-shared", "-fPIC", "-O2", "-xc", "-", "-o", str(folder / "tomorrow.so")]
    subprocess.run(command, input=TOMORROW, text=True, check=True, timeout=60)
    yield f"/scratch/{folder.name}/tomorrow.so"
    shutil.rmtree(folder)


def wrap_prologs(lab: Lab, library: str, undo: ExitStack) -> None:
    """Run the Prologs of all nodes, which have one file of it, with a library."""
    host, prolog = lab.nodes[0], "/usr/libexec/vhpc/prolog"
    script = f"#!/bin/sh\\nLD_PRELOAD={library} exec {prolog}.now\\n"
    lab.run(host, "mv", prolog, f"{prolog}.now")
    undo.callback(lab.run, host, "mv", f"{prolog}.now", prolog)
    lab.run(host, "sh", "-c", f"printf '{script}' > {prolog}; chmod 755 {prolog}")


@pytest.mark.promise("checkpoint.day")
def test_connections_survive_a_day_and_clocks_are_right(lab: Lab, library: str) -> None:
    with checkpoints_on(lab), ExitStack() as undo:
        job = lab.submit(SCRIPT, *SHAPE, "--vhpc-network=job")
        prints(job, "turn 10 ", 300)
        checkpoint(lab, str(job.id), "--stop", "--name", "day")
        job.leave_queue()
        before = job.output()
        wrap_prologs(lab, library, undo)
        second = lab.submit("echo never", *SHAPE, "--vhpc-resume=day", image=None)
        assert second.wait(timeout=300) == "COMPLETED", said(lab, second)
        # the host's clock writes this time, when the last turn is over
        ended = (
            float(lab.run("login", "stat", "-c", "%.3Y", f"/home/alice/slurm-{second.id}.out").out) + DAY_S
        )
        lines = [line for line in written(job) + written(second) if line != "status 0"]
        matches = [LINE.match(line) for line in lines]
        assert None not in matches, lines
        found = [[float(number) for number in match.groups()] for match in matches if match is not None]
        for rank in (0, 1):
            own = [row[1:] for row in found if row[0] == rank]
            assert [row[0] for row in own] == list(range(1, TURNS + 1)), (before, second.output())
            (cut,) = (at for at in range(1, TURNS) if own[at][1] - own[at - 1][1] > DAY_S / 2)
            assert 0 < own[cut][2] - own[cut - 1][2] < 10, own  # steady clocks stood still meanwhile
            assert own[cut][3] - own[cut - 1][3] <= 10, own  # the interval timer did not make up for a day
            assert abs(own[-1][1] - ended) < 3, (own[-1], ended)
        settled(lab)
