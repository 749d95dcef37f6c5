#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC1091,SC2034,SC2154
# Sourced by the batch script on the node. Sets what the view needs: kind, portal, password and port.
# The relay chooses the port, so no other program can take it first.

source values.sh
export kind portal
case $kind in
desktop) guest_port=6080 size=8 ;; # VNC compares the first eight characters
*) guest_port=8888 size=32 ;;
esac
# connection.yml is YAML, in which a word of digits would be a number
until [[ ${password:-} == [A-Za-z]* ]]; do
    password=$(create_passwd "$size")
done
rm -f ready secret
(umask 077 && printf '%s\n' "$password" >secret)

vhpc forward "$SLURM_JOB_ID" "0:$guest_port" --listen 0.0.0.0 \
    "${admitted[@]}" >forward.log 2>&1 </dev/null &
forward_pid=$!
port=
for _ in {1..300}; do
    port=$(sed -n 's/^vhpc: 0\.0\.0\.0:\([0-9]\{1,5\}\) leads to .*/\1/p' forward.log)
    [[ -n $port ]] && break
    kill -0 "$forward_pid" 2>/dev/null || break
    sleep 0.5
done
if [[ -z $port ]]; then
    echo "The guest cannot be reached:" >&2
    cat forward.log >&2
    clean_up 1
fi
