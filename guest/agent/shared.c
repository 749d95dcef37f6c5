/* SPDX-License-Identifier: Apache-2.0 */
#include "shared.h"

#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>

/* of virtiofs, and of the snapshot of a share; the image's own EROFS is below an overlay */
#define FUSE_MAGIC 0x65735546U
#define EROFS_MAGIC 0xE0F5E1E2U

bool path_is_shared(const char *path)
{
    struct statfs fs;
    if (statfs(path, &fs) < 0)
        return false;
    uint32_t type = (uint32_t)fs.f_type; /* on some architectures it is a signed word */
    return type == FUSE_MAGIC || type == EROFS_MAGIC;
}

/* The folder of a path, in the same buffer. */
static const char *cut_to_folder(char *path)
{
    char *slash = strrchr(path, '/');
    if (slash == NULL)
        return ".";
    if (slash == path)
        return "/";
    *slash = '\0';
    return path;
}

bool path_is_local(const char *path)
{
    char text[PATH_MAX], folder[PATH_MAX];
    struct stat st;
    size_t len = strcspn(path, "%");
    if (len >= sizeof text)
        return false;
    (void)snprintf(text, sizeof text, "%.*s", (int)len, path);
    (void)snprintf(folder, sizeof folder, "%s", text);
    const char *there = cut_to_folder(folder);
    /*
     * In a shared folder the file itself is not looked at: the guest's kernel would keep its size
     * for a second, and programs that read what the host's command writes there would miss the
     * rest.
     */
    if (path_is_shared(there))
        return false;
    if (path[len] != '%' && stat(text, &st) == 0)
        return !S_ISCHR(st.st_mode) && !path_is_shared(text);
    return stat(there, &st) == 0; /* else not in the guest either: Slurm reports what is wrong */
}
