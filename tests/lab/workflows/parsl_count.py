# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Counts a digit in two ranges of numbers by workers in guests: parsl_count.py ADDRESS SECONDS."""

import sys

import parsl
from parsl.config import Config
from parsl.executors import HighThroughputExecutor
from parsl.providers import SlurmProvider

ADDRESS, SECONDS = sys.argv[1], int(sys.argv[2])


@parsl.python_app
def count(first, seconds):
    import os
    import time

    time.sleep(seconds)
    digits = sum(str(number).count("1") for number in range(first, first + 1000))
    return digits, os.uname().release, os.environ["VHPC_JOB_IMAGE"], os.environ["SLURM_JOB_ID"]


provider = SlurmProvider(
    partition="main",
    exclusive=False,
    cores_per_node=1,
    init_blocks=2,
    max_blocks=2,
    walltime="00:30:00",
    cmd_timeout=60,
    scheduler_options="#SBATCH --vhpc-image=debian-minimal --vhpc-network=nat",
    worker_init=". ~/flows/bin/activate",
)
executor = HighThroughputExecutor(
    label="guests", address=ADDRESS, max_workers_per_node=1, heartbeat_threshold=600, provider=provider
)

if __name__ == "__main__":
    with parsl.load(Config(executors=[executor], strategy="none")):
        for task in [count(0, SECONDS), count(1000, SECONDS)]:
            print(*task.result(), flush=True)
