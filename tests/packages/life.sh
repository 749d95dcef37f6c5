#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# life.sh NEWER [PROGRAMS]: in a bare Debian tree, install the packages of /packages, use them, upgrade to those of
# /packages/NEWER, remove and purge them.  Writes to /packages/report/: what each step has left, and which
# services maintainer scripts would have started, stopped or restarted.
# NEWER is empty: no upgrade.
# PROGRAMS: a script in /packages that uses the packages, too; the tree has what they depend on, and APT, which in an
# emulator takes minutes to read Debian's lists, is left out.
set -euo pipefail
newer=/packages/$1 programs=${2:-} report=/packages/report
mkdir -p $report

# every file with type, mode, owner and content, but for what APT and dpkg keep
look() {
    find / -xdev \( -path /proc -o -path /run -o -path /dev -o -path /tmp -o -path /packages -o -path /var/cache \
        -o -path /var/lib/dpkg -o -path /var/lib/apt -o -path /var/log -o -path /root -o -name __pycache__ \) -prune \
        -o ! -type d -printf '%y %m %u:%g %s %p\n' | sort -k 5 > "$report/$1"
    find / -xdev \( -path /proc -o -path /packages -o -path /dev -o -path /tmp \) -prune -o -path '*vhpc*' -print |
        sort > "$report/$1.names"
}
# what would happen to services, if this were a host with systemd
services() { mkdir -p /run/systemd/system; : > /tmp/services; }
# shellcheck disable=SC2016 # its own shell expands it
printf '#!/bin/sh\necho "$1 $2" >> /tmp/services\nexit 0\n' > /usr/sbin/policy-rc.d

if [ -z "$programs" ]; then
    apt-get -q update
    outside=$(for file in /packages/*.deb; do dpkg-deb -f "$file" Depends | tr ',' '\n'; done |
        sed 's/^ *//' | grep -v '^vhpc-' | sort -u | paste -sd ,)
    apt-get -q -y --no-install-recommends satisfy "$outside"
fi
look before

services
if [ -z "$programs" ]; then
    apt-get -q -y --no-install-recommends install /packages/*.deb
else
    dpkg --install /packages/*.deb
fi
cp /tmp/services $report/services.install
look installed
mapfile -t packages < <(dpkg-query -W -f '${Package}\n' 'vhpc-*')
dpkg --audit > $report/audit
for package in "${packages[@]}"; do dpkg -L "$package" > "$report/files.$package"; done
getent passwd vhpc > $report/account

# what works without Slurm
{
    vhpc --version
    vhpc config --describe | head -n 3
    /usr/sbin/vhpcd --version
    /usr/libexec/vhpc/prolog && echo "prolog: no guests"
    grep -h -o 'exec .*' /usr/libexec/vhpc/{prolog,epilog,healthcheck} | while read -r _ python _ _ _ module _; do
        "$python" -I -c "import $module" && echo "$module: imported"
    done
    python3 -I /usr/libexec/vhpc/vmimages/build --help | head -n 1
    systemd-analyze verify --man=no /usr/lib/systemd/system/vhpc*.service && echo "units: valid"
    systemd-analyze security --offline=true --no-pager /usr/lib/systemd/system/vhpcd.service | tail -n 1
    logrotate --debug /etc/logrotate.d/vhpc-node 2>&1 | grep -i error || echo "logrotate: valid"
} > $report/used 2>&1
[ -z "$programs" ] || bash "/packages/$programs" > $report/programs 2>&1 || echo "exit status $?" >> $report/programs
mkdir -p /run/vhpc/jobs /var/lib/vhpc/{vhpcd,journal,images/blobs,catalog} /var/log/vhpc
touch /var/lib/vhpc/vhpcd/leases.sqlite /var/lib/vhpc/journal/1 /var/log/vhpc/hooks.log

services
mkdir -p /run/vhpc/jobs/7
if [ -n "$1" ]; then
    dpkg --install "$newer"/*.deb
    cp /tmp/services $report/services.upgrade
    dpkg-query -W -f '${Package} ${Version} ${db:Status-Status}\n' 'vhpc-*' > $report/upgraded
fi

# a node whose job has guests keeps its package
dpkg --remove vhpc-node > $report/refused 2>&1 && echo "removed" >> $report/refused
rmdir /run/vhpc/jobs/7

services
dpkg --remove "${packages[@]}"
cp /tmp/services $report/services.remove
look removed
rmdir /var/lib/vhpc/catalog
dpkg --purge "${packages[@]}"
look purged
