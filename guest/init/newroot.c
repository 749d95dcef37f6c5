/* SPDX-License-Identifier: Apache-2.0 */
#include "newroot.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "fatal.h"
#include "verity.h"

/* Mount point of the root's layers while the initramfs is still "/". */
#define LOWER_DIR "/lower"
#define RW_DIR "/rw"

#define AGENT_SOURCE "/vhpc-agent"

#define POLL_NS 5000000L /* 5 ms */

static double now_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/*
 * virtio-blk probes asynchronously: some milliseconds pass between the load of its module and the
 * device node.
 */
static void wait_for_device(const char *path, unsigned wait_s)
{
    const struct timespec pause = {.tv_nsec = POLL_NS};
    const double deadline = now_s() + wait_s;
    struct stat st;

    while (stat(path, &st) != 0) {
        if (errno != ENOENT)
            die(errno, "cannot use block device %s", path);
        if (now_s() >= deadline)
            die(0,
                "block device %s did not appear within %u s (no disk, or no driver in the initrd)",
                path, wait_s);
        nanosleep(&pause, NULL);
    }
    if (!S_ISBLK(st.st_mode))
        die(ENOTBLK, "cannot use block device %s", path);
}

/*
 * Programs put files into /dev/shm, and into the writable layer if it is in memory. They share one
 * limit: pages of full file systems belong to no process, so the kernel could not free memory by
 * killing one. The folder shm is next to the layer. /dev moves to the new root with it.
 */
static void mount_shared_memory(bool layer_in_memory, const char *data)
{
    const unsigned long flags = MS_NOSUID | MS_NODEV;

    mkdir_or_die("/dev/shm");
    if (!layer_in_memory) {
        mount_or_die("tmpfs", "/dev/shm", "tmpfs", flags, data);
    } else {
        mkdir_or_die(RW_DIR "/shm");
        mount_or_die(RW_DIR "/shm", "/dev/shm", "bind", MS_BIND, NULL);
        mount_or_die("none", "/dev/shm", "bind", MS_BIND | MS_REMOUNT | flags, NULL);
    }
    if (chmod("/dev/shm", 01777) != 0)
        die(errno, "cannot set the mode of /dev/shm");
}

void mount_root(const struct init_options *options)
{
    const bool layer_in_memory = options->disk[0] == '\0';
    char data[OPTION_SIZE + 64];
    char checked[VERITY_DEVICE_SIZE];
    const char *root = options->root;

    wait_for_device(options->root, options->rootwait_s);
    if (options->verity.blocks != 0) {
        verity_open(&options->verity, options->root, checked);
        root = checked;
    }
    mkdir_or_die(LOWER_DIR);
    mkdir_or_die(RW_DIR);
    mkdir_or_die(NEW_ROOT);
    mount_or_die(root, LOWER_DIR, options->rootfstype, MS_RDONLY, NULL);
    snprintf(data, sizeof data, "mode=0755,size=%s", options->overlay_size);
    if (!layer_in_memory) {
        wait_for_device(options->disk, options->rootwait_s);
        /* noinit_itable: the kernel must not fill the disk with tables that are not needed */
        mount_or_die(options->disk, RW_DIR, "ext4", 0, "noinit_itable");
    } else {
        mount_or_die("tmpfs", RW_DIR, "tmpfs", 0, data);
    }
    if (options->mounted_disk[0] != '\0')
        wait_for_device(options->mounted_disk, options->rootwait_s); /* the agent does not wait */
    mount_shared_memory(layer_in_memory, data);
    mkdir_or_die(RW_DIR "/upper");
    mkdir_or_die(RW_DIR "/work");
    mount_or_die("overlay", NEW_ROOT, "overlay", 0,
                 "lowerdir=" LOWER_DIR ",upperdir=" RW_DIR "/upper,workdir=" RW_DIR "/work");
}

static void copy_file(const char *source, const char *target, mode_t mode)
{
    struct stat st;
    int in = open(source, O_RDONLY | O_CLOEXEC);
    int out;

    if (in < 0 || fstat(in, &st) != 0)
        die(errno, "cannot open %s in the initrd", source);
    out = open(target, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode);
    if (out < 0)
        die(errno, "cannot create %s", target);
    for (off_t left = st.st_size; left > 0;) {
        const ssize_t n = sendfile(out, in, NULL, (size_t)left);

        if (n <= 0)
            die(n < 0 ? errno : EIO, "cannot copy %s to %s", source, target);
        left -= n;
    }
    if (fchmod(out, mode) != 0 || close(out) != 0)
        die(errno, "cannot write %s", target);
    close(in);
}

/* A directory for a file system: a link of the image would lead out of its root. */
static void make_mount_point(const char *path)
{
    struct stat st;

    if (lstat(path, &st) == 0 && S_ISLNK(st.st_mode) && unlink(path) != 0)
        die(errno, "cannot replace the link %s of the image", path);
    mkdir_or_die(path);
}

void install_agent(void)
{
    struct stat st;

    make_mount_point(NEW_ROOT "/run");
    mount_or_die("tmpfs", NEW_ROOT "/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=10%");
    mkdir_or_die(NEW_ROOT "/run/vhpc");
    if (stat(AGENT_SOURCE, &st) != 0 && errno == ENOENT)
        return; /* the image has its own; if not, exec reports it */
    copy_file(AGENT_SOURCE, NEW_ROOT AGENT_TARGET, 0755);
}

/*
 * Removes the contents of the directory fd, without other file systems.  Closes fd. This only frees
 * memory, so errors are ignored.
 */
static void remove_contents(int fd, dev_t device)
{
    DIR *dir = fdopendir(fd);
    struct dirent *entry;

    if (dir == NULL) {
        close(fd);
        return;
    }
    while ((entry = readdir(dir)) != NULL) {
        struct stat st;

        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        if (fstatat(dirfd(dir), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0 ||
            st.st_dev != device)
            continue;
        if (S_ISDIR(st.st_mode)) {
            const int child =
                openat(dirfd(dir), entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);

            if (child >= 0)
                remove_contents(child, device);
            unlinkat(dirfd(dir), entry->d_name, AT_REMOVEDIR);
        } else {
            unlinkat(dirfd(dir), entry->d_name, 0);
        }
    }
    closedir(dir);
}

void switch_root(void)
{
    static const char *const kernel_mounts[] = {"/dev", "/proc", "/sys"};
    struct stat st;
    struct statfs fs;
    int root;

    for (size_t i = 0; i < sizeof kernel_mounts / sizeof *kernel_mounts; i++) {
        char target[64];

        snprintf(target, sizeof target, NEW_ROOT "%s", kernel_mounts[i]);
        make_mount_point(target);
        mount_or_die(kernel_mounts[i], target, NULL, MS_MOVE, NULL);
    }
    root = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root < 0 || fstat(root, &st) != 0 || fstatfs(root, &fs) != 0)
        die(errno, "cannot inspect the initramfs");
    /* Only an initramfs may be emptied: vhpc-init started by mistake must not erase a disk. */
    if (fs.f_type != RAMFS_MAGIC && fs.f_type != TMPFS_MAGIC)
        die(0, "/ is not an initramfs (file system type %#lx)", (unsigned long)fs.f_type);
    if (chdir(NEW_ROOT) != 0)
        die(errno, "cannot enter the new root");
    remove_contents(root, st.st_dev);
    if (mount(".", "/", NULL, MS_MOVE, NULL) != 0 || chroot(".") != 0 || chdir("/") != 0)
        die(errno, "cannot switch to the new root");
}
