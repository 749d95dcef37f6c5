#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# manual.sh VHPC_OPTIONS TEMPLATE: the manual names every option and variable, and is valid man(7).
set -eu
page=$("$1" --man "$2")
options=$("$1" --help | sed -n 's/^ *--\(vhpc-[a-z-]*\)=.*/\1/p')
[ "$(printf '%s\n' "$options" | wc -l)" -ge 10 ] || { echo "--help has too few options: $options"; exit 1; }
for option in $options; do
    name=$(printf '%s' "$option" | sed 's/-/\\\\-/g')
    printf '%s\n' "$page" | grep -q "^\.BI .*$name=" || { echo "--$option is missing"; exit 1; }
    variable=$(printf '%s' "$option" | tr a-z- A-Z_)
    printf '%s\n' "$page" | grep -q "^\.B $variable\$" || { echo "$variable is missing"; exit 1; }
done
for name in run_dir= libexec= command=; do
    printf '%s\n' "$page" | grep -q "$name" || { echo "$name is missing"; exit 1; }
done
if printf '%s\n' "$page" | grep '^@'; then
    echo "a marker was not filled in"
    exit 1
fi
if command -v mandoc > /dev/null; then
    printf '%s\n' "$page" | mandoc -T lint -W error
fi
