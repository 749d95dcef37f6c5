#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs on the node, in the folder of the session; its only task runs in the guest.
exec srun --overlap --nodes=1 --ntasks=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
    /bin/bash "$PWD/guest.sh"
