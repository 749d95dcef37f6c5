# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Counts a digit in two ranges of numbers, by scheduler, client and workers in the tasks of one srun."""

import os

from dask_jobqueue.slurm import SLURMRunner
from distributed import Client


def count(first):
    digits = sum(str(number).count("1") for number in range(first, first + 1000))
    return digits, os.uname().nodename, os.uname().release, os.environ["VHPC_JOB_IMAGE"]


if __name__ == "__main__":
    with SLURMRunner() as runner, Client(runner) as client:
        client.wait_for_workers(runner.n_workers)
        print("scheduler", client.scheduler.address, flush=True)
        workers = sorted(client.scheduler_info()["workers"])
        tasks = [client.submit(count, 1000 * n, workers=[at], pure=False) for n, at in enumerate(workers)]
        # a task that needs the results of two workers: one of them sends its result to the other
        print("total", client.submit(lambda *all_: sum(one[0] for one in all_), *tasks).result(), flush=True)
        for task in tasks:
            print(*task.result(), flush=True)
