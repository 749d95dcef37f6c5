#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The first process of the guest that reads a user's disk (diskguest.py): it mounts the file systems of
# /dev/vdb, writes their files as a tar to one port and its result, one line, to another.
set -u
export PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8

port() {
    for folder in /sys/class/virtio-ports/*; do
        [ "$(cat "$folder/name")" != "$1" ] || echo "/dev/${folder##*/}"
    done
}

end() {
    echo "$1" >"$(port status)"
    sync
    echo b >/proc/sysrq-trigger # QEMU ends instead of a restart
    sleep 60
}

# Tries to mount a device on a folder, read-only; the kernel loads the drivers of file systems.
mounted() {
    [ -n "$2" ] && mount -t "$2" -o ro,nosuid,nodev,noexec "$1" "$3" 2>/dev/null
}

is_root() {
    [ -e "$1/etc/os-release" ] || [ -L "$1/etc/os-release" ] || [ -e "$1/usr/lib/os-release" ]
}

mount -t tmpfs tmpfs /mnt || end "the guest that reads the disk cannot mount /mnt"
mkdir /mnt/root /mnt/look
seen='' root='' boot=''
for device in /sys/class/block/vdb*; do
    device=/dev/${device##*/}
    kind=$(blkid -p -o value -s TYPE "$device" 2>/dev/null)
    [ -z "$kind" ] || seen="$seen ${device#/dev/} ($kind)"
    case $kind in
    ext[234] | xfs | btrfs | vfat | erofs | squashfs | f2fs) ;;
    *) continue ;;
    esac
    mounted "$device" "$kind" /mnt/look || continue
    where=''
    for folder in . root @ @rootfs; do # btrfs: the root is often a subvolume
        [ -n "$where" ] || ! is_root "/mnt/look/$folder" || where=$folder
    done
    if [ -z "$root" ] && [ -n "$where" ]; then
        root=$device
        mount --bind "/mnt/look/$where" /mnt/root || end "the root of the disk, $device, cannot be mounted"
    elif [ -z "$boot" ] && ls /mnt/look/vmlinuz-* >/dev/null 2>&1; then
        boot=$device boot_kind=$kind
    fi
    umount /mnt/look
done
[ -n "$root" ] || end "the disk has no file system with a Linux system that can be read; it has:${seen:- nothing known}"
[ -z "$boot" ] || mounted "$boot" "$boot_kind" /mnt/root/boot || end "the file system of /boot, $boot, cannot be mounted"
command -v tar >/dev/null || end "the image of the site whose kernel imports get has no tar"
tar --create --file="$(port files.tar)" --format=posix --directory=/mnt/root --numeric-owner --sort=name \
    --xattrs --xattrs-include=security.capability --xattrs-include='user.*' --warning=no-file-ignored \
    --anchored --exclude='./dev/*' --exclude='./proc/*' --exclude='./run/*' --exclude='./sys/*' \
    --exclude='./tmp/*' --exclude='./var/tmp/*' --exclude='./lost+found' --exclude='./swapfile' --exclude='./swap.img' \
    . 2>/run/errors || end "the files of the disk cannot be read: $(tail -n 1 /run/errors)"
end "done"
