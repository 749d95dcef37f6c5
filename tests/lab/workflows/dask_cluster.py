# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Counts a digit in two ranges of numbers: the scheduler is on this host, each worker is a job in a guest."""

import os
import sys

from dask_jobqueue import SLURMCluster
from distributed import Client


def count(first):
    digits = sum(str(number).count("1") for number in range(first, first + 1000))
    return digits, os.uname().release, os.environ["VHPC_JOB_IMAGE"], os.environ["SLURM_JOB_ID"]


if __name__ == "__main__":
    cluster = SLURMCluster(
        cores=1,
        memory="900MB",
        walltime="01:00:00",
        scheduler_options={"host": sys.argv[1]},
        job_extra_directives=["--vhpc-image=debian-minimal", "--vhpc-network=site"],
        local_directory="/tmp",
        log_directory="logs",
        death_timeout=1200,
    )
    cluster.scale(jobs=2)
    with cluster, Client(cluster, timeout=1200) as client:
        client.wait_for_workers(2, timeout=2000)
        workers = sorted(client.scheduler_info()["workers"])
        tasks = [client.submit(count, 1000 * n, workers=[at], pure=False) for n, at in enumerate(workers)]
        # a task that needs the results of both workers: one of them sends its result to the other
        print("total", client.submit(lambda *all_: sum(one[0] for one in all_), *tasks).result(), flush=True)
        for task in tasks:
            print(*task.result(), flush=True)
