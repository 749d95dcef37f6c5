#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# manual.sh VHPC_OPTIONS TEMPLATE: the manual names every option and variable, and is valid man(7).
set -eu
page=$("$1" --man "$2")
for word in image mem-reserve batch timeout console vfs guests-per-node network disk save; do
    name=$(printf 'vhpc-%s' "$word" | sed 's/-/\\\\-/g')
    printf '%s\n' "$page" | grep -q "^\.BI .*$name=" || { echo "--vhpc-$word is missing"; exit 1; }
done
for name in VHPC_IMAGE VHPC_MEM_RESERVE VHPC_BATCH VHPC_TIMEOUT VHPC_CONSOLE VHPC_VFS VHPC_GUESTS_PER_NODE VHPC_NETWORK VHPC_DISK VHPC_SAVE run_dir= libexec= command=; do
    printf '%s\n' "$page" | grep -q "$name" || { echo "$name is missing"; exit 1; }
done
if printf '%s\n' "$page" | grep '^@'; then
    echo "a marker was not filled in"
    exit 1
fi
if command -v mandoc > /dev/null; then
    printf '%s\n' "$page" | mandoc -T lint -W error
fi
