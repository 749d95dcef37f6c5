#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs inside the new root, as its root, when all packages are installed:
#   finish.sh KERNEL_PACKAGE
# puts the kernel's modules in place, and removes what is of the build host or of the moment.
# What the builder takes out again lies in /.vhpc, which is not part of the image.
set -eu

kernel_package=$1
export PYTHONHASHSEED=0

# The kernel is unpacked, not installed: its package would bring initramfs-tools and all that needs.
# linux-image-cloud-amd64 is a name for the newest one; the package with the files is what it depends on.
cd /.vhpc
real=$(apt-cache depends --important "$kernel_package" |
	sed -n 's/^ *Depends: \(linux-image-[0-9].*\)$/\1/p' | head -n 1)
apt-get -qq -o APT::Sandbox::User=root download "${real:-$kernel_package}"
mkdir kernel
dpkg-deb -x ./*.deb kernel
rm -- ./*.deb
modules=kernel/usr/lib/modules
[ -d "$modules" ] || modules=kernel/lib/modules
release=$(ls "$modules")
mkdir -p /usr/lib/modules
mv "$modules/$release" /usr/lib/modules/
depmod "$release"
mv "kernel/boot/vmlinuz-$release" vmlinuz
chmod 0644 vmlinuz
printf '%s\n' "$release" >release
rm -r kernel
dpkg-query -W -f '${Package} ${Version} ${Architecture}\n' >packages
cd /

# Compiled Python files are checked by the source's hash, not its time: all times in the image are one.
# Without them each start of python3 would compile its library anew, under software emulation for seconds.
if command -v python3 >/dev/null; then
	find /usr/lib/python3* /usr/share/python3 -depth -name __pycache__ -exec rm -r {} + 2>/dev/null || :
	python3 -m compileall -q --invalidation-mode checked-hash "/usr/lib/$(readlink -f /usr/bin/python3 | sed 's,.*/,,')"
fi

: >/etc/machine-id
: >/etc/resolv.conf
echo localhost >/etc/hostname
printf '127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n' >/etc/hosts
rm -f /etc/*- /etc/.pwd.lock /etc/ssh/ssh_host_* /root/.bash_history /root/.wget-hsts
rm -f /var/lib/dpkg/*-old /var/lib/systemd/random-seed /var/cache/debconf/*-old
rm -f /boot/* /var/cache/ldconfig/aux-cache 2>/dev/null || :
find /var/log /var/cache/apt /var/lib/apt/lists -type f -delete
