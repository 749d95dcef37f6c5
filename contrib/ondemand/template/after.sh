#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2154
# Sourced by the batch script: waits until the program in the guest listens, or has ended.

for _ in {1..600}; do
    [[ -e ready ]] && break
    if ! kill -0 "$SCRIPT_PID" 2>/dev/null; then
        echo "The program in the guest has ended." >&2
        clean_up 1
    fi
    sleep 0.5
done
if [[ ! -e ready ]]; then
    echo "The program in the guest does not listen after 5 minutes." >&2
    clean_up 1
fi
