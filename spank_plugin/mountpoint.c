/* SPDX-License-Identifier: Apache-2.0 */
#include "mountpoint.h"

#include <stddef.h>
#include <string.h>

#include "bounds.h"

#define PLAIN "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._+-"

/* No disk is mounted on these, nor below those in `trees`. */
static const char *const places[] = {"/", "/var", "/var/lib"};
static const char *const trees[] = {"/bin",   "/boot",   "/dev",  "/etc", "/home", "/lib", "/lib32",
                                    "/lib64", "/libx32", "/proc", "/run", "/sbin", "/sys", "/usr"};

/* Absolute; no part is empty, "." or ".."; a path in this form has one text only. */
static bool is_normal(const char *path)
{
    if (path[0] != '/' || strlen(path) > VHPC_MOUNT_POINT_MAX)
        return false;
    if (path[1] == '\0')
        return true;
    while (*path != '\0') {
        size_t length = strspn(++path, PLAIN);
        if (length == 0 || (length == 1 && path[0] == '.') ||
            (length == 2 && path[0] == '.' && path[1] == '.'))
            return false;
        path += length;
        if (*path != '/' && *path != '\0')
            return false;
    }
    return true;
}

static bool is_reserved(const char *path)
{
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++)
        if (strcmp(path, places[i]) == 0)
            return true;
    for (size_t i = 0; i < sizeof trees / sizeof trees[0]; i++) {
        size_t length = strlen(trees[i]);
        if (strncmp(path, trees[i], length) == 0 && (path[length] == '/' || path[length] == '\0'))
            return true;
    }
    return false;
}

bool vhpc_mount_point_check(const char *path, const char **why)
{
    if (!is_normal(path)) {
        *why =
            "after the colon an absolute path of at most 255 letters, digits, '/', '.', '_', '+' "
            "and '-' is expected, without '.' or '..' as a part and without '/' at its end, as in "
            "--vhpc-disk=20G:/local";
        return false;
    }
    if (is_reserved(path)) {
        *why =
            "this directory belongs to the guest's system or to homes: choose one that is not /, "
            "/var or /var/lib, nor on or below /bin, /boot, /dev, /etc, /home, /lib*, /proc, /run, "
            "/sbin, /sys or /usr, as in --vhpc-disk=20G:/local";
        return false;
    }
    return true;
}
