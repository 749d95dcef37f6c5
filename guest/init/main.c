/* SPDX-License-Identifier: Apache-2.0 */
/*
 * /init of the initrd: mounts the image's root and executes its PID 1.
 *
 * It prints nothing unless something fails: under software emulation each line on a serial console
 * costs about a millisecond of the boot.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fatal.h"
#include "modules.h"
#include "newroot.h"
#include "unit.h"

static void mount_kernel_filesystems(void)
{
    mkdir_or_die("/dev");
    mkdir_or_die("/proc");
    mkdir_or_die("/sys");
    mount_or_die("devtmpfs", "/dev", "devtmpfs", MS_NOSUID, "mode=0755");
    mount_or_die("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    mount_or_die("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
}

static void read_options(struct init_options *options)
{
    char cmdline[4096]; /* COMMAND_LINE_SIZE of x86 is 2048 */
    char error[512];
    const int fd = open("/proc/cmdline", O_RDONLY | O_CLOEXEC);
    const ssize_t n = fd < 0 ? -1 : read(fd, cmdline, sizeof cmdline - 1);

    if (n < 0)
        die(errno, "cannot read /proc/cmdline");
    close(fd);
    cmdline[n] = '\0';
    if (options_parse(options, cmdline, error, sizeof error) != 0)
        die(0, "%s", error);
}

int main(int argc, char **argv)
{
    static char *const environment[] = {
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "TERM=linux", "HOME=/",
        NULL};
    static char agent[] = AGENT_TARGET;
    struct init_options options;
    char *arguments[2] = {NULL, NULL};
    bool agent_is_init;

    if (argc == 2 && strcmp(argv[1], "--version") == 0) {
        puts("vhpc-init " VHPC_VERSION);
        return 0;
    }
    if (getpid() != 1)
        die(0, "this program runs only as the first process of a guest's initrd");
    umask(0022);
    mount_kernel_filesystems();
    read_options(&options);
    load_modules(MODULES_ALWAYS);
    if (options.verity.blocks != 0)
        load_modules(MODULES_FOR_VERITY);
    if (options.disk[0] != '\0' || options.mounted_disk[0] != '\0')
        load_modules(MODULES_FOR_DISK);
    agent_is_init = strcmp(options.init, "agent") == 0;
    mount_root(&options);
    install_agent();
    if (!agent_is_init)
        install_unit(NEW_ROOT);
    switch_root();

    arguments[0] = agent_is_init ? agent : options.init;
    execve(arguments[0], arguments, environment);
    die(errno, "cannot execute %s of the image", arguments[0]);
}
