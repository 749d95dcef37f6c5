#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# shellcheck disable=SC1091,SC2154,SC2317
# What the batch script of Open OnDemand (template "basic") does with an app's files, in the folder of a session.
export host port
create_passwd() { tr -cd 'a-zA-Z0-9' </dev/urandom | head -c "$1"; }
clean_up() {
    source clean.sh
    pkill -P "$SCRIPT_PID" 2>/dev/null
    exit "${1:-0}"
}
host=${SLURMD_NODENAME:-$(hostname)}
source before.sh
./script.sh &
SCRIPT_PID=$!
source after.sh
(umask 077 && printf '%s: %s\n' port "$port" host "$host" password "$password" kind "$kind" portal "$portal" \
    >connection.new && mv connection.new connection.yml)
wait "$SCRIPT_PID" || clean_up 1
clean_up
