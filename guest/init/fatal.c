/* SPDX-License-Identifier: Apache-2.0 */
#include "fatal.h"

#include <errno.h>
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
    /* One write, so that a message of the kernel cannot appear within it. */
    length = snprintf(line, sizeof line, "vhpc-init: %s%s%s\n", what, err != 0 ? ": " : "",
                      err != 0 ? strerror(err) : "");
    if (write(STDERR_FILENO, line, (size_t)length) == length)
        tcdrain(STDERR_FILENO);
    if (getpid() == 1) {
        sync();
        reboot(RB_POWER_OFF);
    }
    _exit(1); /* as PID 1: a kernel panic; panic=-1 then ends the guest */
}

void mkdir_or_die(const char *path)
{
    struct stat st;

    if (mkdir(path, 0755) == 0 || errno == EEXIST)
        return;
    /* If a layer in between is read-only, the answer is EROFS and not EEXIST. */
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
