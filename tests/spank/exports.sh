#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# exports.sh NM PLUGIN: every exported symbol is one that Slurm's plugin loader looks for.
set -eu
unexpected=$("$1" -D --defined-only "$2" | awk '{print $NF}' |
    grep -vxE 'slurm_spank_[a-z_]+|plugin_(name|type|version)|spank_plugin_version' || true)
if [ -n "$unexpected" ]; then
    echo "exported besides SPANK's symbols: $unexpected"
    exit 1
fi
for symbol in plugin_name plugin_version slurm_spank_init slurm_spank_init_post_opt slurm_spank_task_init; do
    "$1" -D --defined-only "$2" | grep -qw "$symbol" || { echo "$symbol is not exported"; exit 1; }
done
# Their mere presence makes slurmd strip option variables from Prolog's environment.
! "$1" -D --defined-only "$2" | grep -E 'slurm_spank_job_(prolog|epilog)'
