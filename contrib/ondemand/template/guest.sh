#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs in the guest, in the folder of the session, which the guest shares with the node. Servers
# listen on 127.0.0.1 of the guest, which only the relay reaches. The batch script has exported
# the variables below.
set -u
: "${kind:?} ${host:?} ${port:?} ${portal:?}"
session=$PWD

need() {
    command -v "$1" >/dev/null && return
    echo "The image has no $1; it needs $2. Choose another image." >&2
    exit 1
}

# listens PORT PID: waits until a server listens; false if it has ended, or after 5 minutes.
listens() {
    for _ in {1..600}; do
        (: <"/dev/tcp/127.0.0.1/$1") 2>/dev/null && return
        kill -0 "$2" 2>/dev/null || return 1
        sleep 0.5
    done
    return 1
}

# Tells the batch script that a server listens.
announce() {
    listens "$1" $$ && touch "$session/ready"
}

run_jupyter() {
    need jupyter "JupyterLab, with jupyter_server 2 or newer"
    JUPYTER_TOKEN=$(<secret)
    export JUPYTER_TOKEN
    announce 8888 &
    cd ~ || exit 1
    exec jupyter lab --no-browser --ServerApp.ip=127.0.0.1 --ServerApp.port=8888 \
        --ServerApp.port_retries=0 --ServerApp.base_url="/node/$host/$port/" \
        --ServerApp.allow_origin="$portal" --ServerApp.allow_remote_access=True
}

run_desktop() {
    local desktop xvnc novnc=${VHPC_NOVNC:-/usr/share/novnc}
    need Xvnc "TigerVNC's server (Debian: tigervnc-standalone-server)"
    need vncpasswd "TigerVNC's tools (Debian: tigervnc-tools)"
    need websockify "websockify"
    need dbus-run-session "D-Bus (Debian: dbus-bin)"
    if [[ ! -f $novnc/vnc.html ]]; then
        echo "The image has no $novnc/vnc.html; it needs noVNC (Debian: novnc). Choose another image." >&2
        exit 1
    fi
    for desktop in startxfce4 mate-session startlxqt startlxde xterm; do
        command -v "$desktop" >/dev/null && break
    done
    need "$desktop" "a desktop, such as Xfce"
    (umask 077 && vncpasswd -f <secret >vnc.passwd)
    trap 'kill $(jobs -p) 2>/dev/null' EXIT
    Xvnc :1 -geometry 1600x900 -depth 24 -localhost -nolisten tcp -rfbport 5901 \
        -SecurityTypes VncAuth -rfbauth "$session/vnc.passwd" -AlwaysShared >vnc.log 2>&1 &
    xvnc=$!
    websockify --web "$novnc" 127.0.0.1:6080 127.0.0.1:5901 >websockify.log 2>&1 &
    announce 6080 &
    if ! listens 5901 "$xvnc"; then
        cat vnc.log >&2
        exit 1
    fi
    export DISPLAY=:1
    cd ~ || exit 1
    dbus-run-session -- "$desktop"
}

case $kind in
desktop) run_desktop ;;
*) run_jupyter ;;
esac
