/* SPDX-License-Identifier: Apache-2.0 */
/* Decision: Slurm's commands of an image are covered by the site's */
#include "commands.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

int commands_link(const char *binary, const char *folder, char *const *names, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        char path[PATH_MAX];
        int n = snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        if (n < 0 || (size_t)n >= sizeof path)
            return -ENAMETOOLONG;
        if (symlink(binary, path) < 0 && errno != EEXIST)
            return -errno;
    }
    return 0;
}

/* Whether a file is this command alone, as srun or srun-24.11 are, and not one for many names. */
static bool is_command(const char *file, const char *name)
{
    const char *base = strrchr(file, '/');
    size_t len = strlen(name);
    return base != NULL && strncmp(base + 1, name, len) == 0 &&
           !isalnum((unsigned char)base[1 + len]);
}

static void cover(const char *binary, const struct stat *own, const char *path, const char *name)
{
    char file[PATH_MAX];
    struct stat st;
    if (realpath(path, file) == NULL || stat(file, &st) < 0 || !S_ISREG(st.st_mode) ||
        (st.st_dev == own->st_dev && st.st_ino == own->st_ino))
        return;
    if (!is_command(file, name))
        (void)fprintf(stderr, "vhpc-agent: %s stays the image's, because it leads to %s\n", path,
                      file);
    else if (mount(binary, file, NULL, MS_BIND, NULL) < 0)
        (void)fprintf(stderr, "vhpc-agent: %s stays the image's: %s\n", path, strerror(errno));
}

void commands_cover(const char *binary, const char *path, char *const *names, size_t count)
{
    struct stat own;
    if (stat(binary, &own) < 0)
        return;
    for (const char *folder = path; *folder != '\0'; folder += strspn(folder, ":")) {
        int len = (int)strcspn(folder, ":");
        for (size_t i = 0; i < count && *folder == '/'; i++) {
            char file[PATH_MAX];
            int n = snprintf(file, sizeof file, "%.*s/%s", len, folder, names[i]);
            if (n > 0 && (size_t)n < sizeof file)
                cover(binary, &own, file, names[i]);
        }
        folder += len;
    }
}
