# SPDX-License-Identifier: Apache-2.0
"""The threads of a guest's vCPUs, as the kernel of the node shows them."""

from __future__ import annotations

THREADS = """
for task in /proc/[0-9]*/task/[0-9]*; do
    read -r name < $task/comm 2>/dev/null || continue
    case $name in CPU\\ *) ;; *) continue ;; esac
    tr '\\0' ' ' < ${task%/task/*}/cmdline | grep -q 'guest=vhpc-JOB-' || continue
    echo "$name: $(sed -n 's/^Cpus_allowed_list:\\t//p' $task/status)"
done
"""
"""Shell: name and Cpus_allowed_list of each vCPU thread of the guests of job JOB."""
