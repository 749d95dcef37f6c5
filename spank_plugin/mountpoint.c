/* SPDX-License-Identifier: Apache-2.0 */
#include "mountpoint.h"

#include <stddef.h>
#include <string.h>

#include "bounds.h"

#define PLAIN "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._+-"

/* Nothing is mounted on these, nor below those in `trees`. */
static const char *const places[] = {"/", "/var", "/var/lib"};
static const char *const trees[] = {"/bin",   "/boot",   "/dev",  "/etc", "/home", "/lib", "/lib32",
                                    "/lib64", "/libx32", "/proc", "/run", "/sbin", "/sys", "/usr"};

/* Absolute, and no part is empty, "." or ".."; any: its parts have other characters, too. */
static bool has_parts(const char *path, bool any)
{
    if (path[0] != '/')
        return false;
    while (*path != '\0') {
        size_t length = any ? strcspn(++path, "/") : strspn(++path, PLAIN);
        if (length == 0 || (length == 1 && path[0] == '.') ||
            (length == 2 && path[0] == '.' && path[1] == '.'))
            return false;
        path += length;
        if (*path != '/' && *path != '\0')
            return false;
    }
    return true;
}

/* A path in this form has one text only. */
static bool is_normal(const char *path)
{
    return strcmp(path, "/") == 0 ||
           (strlen(path) <= VHPC_MOUNT_POINT_MAX && has_parts(path, false));
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
            "for a directory of the guest an absolute path of at most 255 letters, digits, '/', "
            "'.', '_', '+' and '-' is expected, without '.' or '..' as a part and without '/' at "
            "its end, such as /local";
        return false;
    }
    if (is_reserved(path)) {
        *why =
            "this directory belongs to the guest's system or to homes: choose one that is not /, "
            "/var or /var/lib, nor on or below /bin, /boot, /dev, /etc, /home, /lib*, /proc, /run, "
            "/sbin, /sys or /usr, such as /local";
        return false;
    }
    return true;
}

/* Whether one of two directories is the other one, or above it. */
static bool is_same_or_above(const char *one, const char *other)
{
    size_t length = strlen(one);

    return strncmp(one, other, length) == 0 && (other[length] == '/' || other[length] == '\0');
}

/* One SRC:DST[:ro], which is cut into its parts; NULL, or its DST. */
static const char *check_mount(char *item, const char **why)
{
    char *target = strchr(item, ':');
    char *access;

    if (target == NULL)
        return NULL;
    *target++ = '\0';
    access = strchr(target, ':');
    if (access != NULL)
        *access++ = '\0';
    if ((access != NULL && strcmp(access, "ro") != 0) || !has_parts(item, true) ||
        !vhpc_mount_point_check(target, why))
        return NULL;
    return target;
}

bool vhpc_mounts_check(char *text, const char **why)
{
    const char *targets[VHPC_MOUNTS_MAX];
    size_t count = 0;

    for (char *item = text, *next; item != NULL; item = next) {
        next = strchr(item, ',');
        if (next != NULL)
            *next++ = '\0';
        if (count == VHPC_MOUNTS_MAX || (targets[count] = check_mount(item, why)) == NULL)
            return false;
        for (size_t i = 0; i < count; i++) {
            if (is_same_or_above(targets[i], targets[count]) ||
                is_same_or_above(targets[count], targets[i])) {
                *why = "one of the directories in the guest is on or below another one: they must "
                       "be apart";
                return false;
            }
        }
        count++;
    }
    return true;
}
