/* SPDX-License-Identifier: Apache-2.0 */
/* /init of the initrd: mounts the image's root and hands over to its PID 1.
 *
 * It says nothing unless something fails: under software emulation each line
 * on a serial console costs the boot about a millisecond.
 */
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

_Noreturn void die(int err, const char *format, ...)
{
    char what[512];
    char line[640];
    va_list args;
    int length;

    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    /* One write, so that a message of the kernel does not land in its middle. */
    length = snprintf(line, sizeof line, "vhpc-init: %s%s%s\n", what, err != 0 ? ": " : "",
                      err != 0 ? strerror(err) : "");
    if (write(STDERR_FILENO, line, (size_t)length) == length)
        tcdrain(STDERR_FILENO);
    if (getpid() == 1) {
        sync();
        reboot(RB_POWER_OFF);
    }
    _exit(1); /* as PID 1: a kernel panic, which panic=-1 turns into an end as well */
}

void mkdir_or_die(const char *path)
{
    struct stat st;

    if (mkdir(path, 0755) == 0 || errno == EEXIST)
        return;
    /* A read-only layer in between answers EROFS before EEXIST. */
    const int err = errno;
    if (stat(path, &st) != 0 || !S_ISDIR(st.st_mode))
        die(err, "cannot create directory %s", path);
}

void mount_or_die(const char *source, const char *target, const char *type, unsigned long flags,
                  const char *data)
{
    if (mount(source, target, type, flags, data) == 0)
        return;
    if ((flags & MS_MOVE) != 0)
        die(errno, "cannot move mount %s to %s", source, target);
    /* The kernel answers ENODEV for a file system type that it does not know. */
    if (errno == ENODEV)
        die(0, "cannot mount %s: the kernel does not know file system type %s", source, type);
    die(errno, "cannot mount %s as %s at %s", source, type, target);
}

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

    if (argc == 2 && strcmp(argv[1], "--version") == 0) {
        puts("vhpc-init " VHPC_VERSION);
        return 0;
    }
    if (getpid() != 1)
        die(0, "this is the first process of a guest's initrd and does nothing elsewhere");
    umask(0022);
    mount_kernel_filesystems();
    read_options(&options);
    load_modules();
    mount_root(&options);
    install_agent();
    switch_root();

    arguments[0] = strcmp(options.init, "agent") == 0 ? agent : options.init;
    execve(arguments[0], arguments, environment);
    die(errno, "cannot execute %s of the image", arguments[0]);
}
