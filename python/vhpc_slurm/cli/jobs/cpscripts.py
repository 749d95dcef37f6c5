# SPDX-License-Identifier: Apache-2.0
"""What `vhpc cp` runs in a guest: shell scripts that need sh, coreutils or busybox, and tar for folders.

The first argument is the task that is to run (``jobguest.ONLY_TASK``), then come the script's own.
"""

from __future__ import annotations

from vhpc_slurm.cli.jobs.guest import ONLY_TASK

_BEGIN = (
    ONLY_TASK
    + """
set -u
die() { echo "$1" >&2; exit 1; }
cd ~ 2>/dev/null || cd /
case $1 in /*) at=$1 ;; *) at=./$1 ;; esac
"""
)
_WITH_TAR = 'command -v tar >/dev/null || die "the image has no tar, which folders need; copy single files"\n'

SEND = f"""{_BEGIN}
if [ -d "$at" ]; then
    {_WITH_TAR}
    [ -x "$at" ] && [ -r "$at" ] || die "$1: Permission denied"
    echo d && exec tar -c -f - -C "$at" .
elif [ -f "$at" ]; then
    [ -r "$at" ] || die "$1: Permission denied"
    stat -L -c 'f %a %s %Y' "$at" && exec cat "$at"
elif [ -e "$at" ]; then die "$1: neither a file nor a folder"
else die "$1: No such file or directory"
fi
"""
"""Argument: a path.  Writes ``d`` and a tar, or ``f MODE SIZE TIME`` and the content."""

_PLACE = """
if [ -d "$at" ]; then
    [ -n "$2" ] || die "$1: it is a folder; give the name of a file"
    at=${at%/}/$2
    [ ! -d "$at" ] || die "$at: it is a folder"
fi
case $at in */) die "$1: No such folder" ;; esac
[ -d "${at%/*}/" ] || die "$1: No such folder"
"""
RECEIVE_FILE = f"""{_BEGIN}{_PLACE}
[ ! -L "$at" ] || at=$(readlink -f "$at") || die "$1: a link that leads nowhere"
if [ -e "$at" ] && [ ! -f "$at" ]; then exec cat > "$at"; fi
part=$at.vhpc-cp.$$
# Messages of the system have the temporary name; their last part is the reason.
name=$1
try() {{ said=$("$@" 2>&1) || die "$name: ${{said##*: }}"; }}
write() {{ umask 077; cat > "$part"; }}
trap 'rm -f "$part"' EXIT
trap 'exit 1' HUP INT TERM
try write
[ -z "$3" ] || [ "$(($(wc -c < "$part")))" = "$3" ] || die "$1: the copy is incomplete"
if [ -n "$4" ]; then try chmod "$4" "$part"; try touch -d "@$5" "$part"
else try chmod "$(printf %o $((0666 & ~0$(umask))))" "$part"
fi
try mv -f "$part" "$at"
"""
"""Arguments: a path, the name in it if it is a folder, and size, mode and time (all empty: not known)."""

RECEIVE_FOLDER = f"""{_BEGIN}{_WITH_TAR}
if [ -d "$at" ]; then
    [ -z "$2" ] || at=${{at%/}}/$2
fi
[ -d "$at" ] || mkdir -m "$3" "$at" || exit 1
exec tar -x -p -o -f - -C "$at"
"""
"""Arguments: a path, the name in it if it is a folder (empty: into the folder itself), mode of a new one."""
