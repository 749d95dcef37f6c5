#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# rpm.sh NEWER: in a Debian tree that has rpm, and whose python3 is as old as RHEL 9's, install the RPM packages of
# /packages, use them, upgrade to those of /packages/NEWER, and erase them.  Writes to /packages/report/.
set -euo pipefail
newer=/packages/$1 report=/packages/report
mkdir -p $report

rm /usr/bin/python3
printf '#!/bin/sh\necho "this is Python 3.9: $*" >&2\nexit 9\n' > /usr/bin/python3
# what would happen to services, and whether hooks wait meanwhile; scriptlets have a /tmp of their own
mkdir -p /run/systemd/system
rm -f /usr/bin/systemctl
cat > /usr/bin/systemctl <<'STUB'
#!/bin/sh
[ ! -e /run/vhpc-upgrading ] || echo "hooks wait" >> /var/log/services
echo "$*" >> /var/log/services
STUB
chmod 755 /usr/bin/python3 /usr/bin/systemctl
services() { : > /var/log/services; }
names() {
    find / -xdev \( -path /proc -o -path /packages -o -path /dev -o -path /tmp -o -path /var/lib/selinux \
        -o -path /root \) -prune -o -path '*vhpc*' -print | sort
}
names > $report/before

for file in /packages/*.rpm; do
    name=$(rpm -qp --qf '%{NAME}' "$file")
    rpm -qp --requires "$file" > "$report/requires.$name"
    rpm -qpl "$file" > "$report/files.$name"
done

services
# dependencies have names of RHEL
rpm --install --nodeps /packages/*.rpm > $report/install 2>&1
cp /var/log/services $report/services.install
getent passwd vhpc > $report/account
semodule -l > $report/modules
rpm --verify --nodeps --all > $report/verify || true

{
    vhpc --version
    vhpc config --describe | head -n 3
    vhpcd --version
    /usr/libexec/vhpc/prolog && echo "prolog: no guests"
    grep -h -o 'exec .*' /usr/libexec/vhpc/{prolog,epilog,healthcheck} | while read -r _ python _ _ _ module _; do
        "$python" -I -c "import $module" && echo "$module: imported"
    done
    /usr/libexec/vhpc/hook-paths --always
    /usr/libexec/vhpc/vmimages/build --help | head -n 1
    home=$(rpm --eval '%{_libdir}')/vhpc
    "$home/bin/python3" -I -c 'import libvirt; print("libvirt:", libvirt.open("test:///default").getType())'
    /usr/bin/python3.13 -I -c 'import msgspec' 2>&1 | tail -n 1
    logrotate --debug /etc/logrotate.d/vhpc-node 2>&1 | grep -i error || echo "logrotate: valid"
    systemd-analyze verify --man=no /usr/lib/systemd/system/vhpc*.service 2>&1 | grep -v 'Unit .*not found' || echo "units: valid"
    grep -l apache /usr/lib/systemd/system/vhpc-web.service
} > $report/used 2>&1 || true
names > $report/installed

mkdir -p /run/vhpc/jobs/7 /var/lib/vhpc/journal
services
rpm --upgrade --nodeps "$newer"/*.rpm > $report/upgrade 2>&1
cp /var/log/services $report/services.upgrade
rpm -qa --qf '%{NAME} %{RELEASE}\n' 'vhpc-*' > $report/upgraded
ls /run > $report/run

# a node whose job has guests keeps its package
rpm --erase --nodeps vhpc-node > $report/refused 2>&1 && echo "erased" >> $report/refused
rmdir /run/vhpc/jobs/7
services
mapfile -t packages < <(rpm -qa --qf '%{NAME}\n' 'vhpc-*')
rpm --erase "${packages[@]}" > $report/erase 2>&1
cp /var/log/services $report/services.erase
semodule -l > $report/modules.after
names > $report/after
