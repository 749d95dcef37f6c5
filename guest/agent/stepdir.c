/* SPDX-License-Identifier: Apache-2.0 */
#include "stepdir.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { DEPTH_MAX = 8, ENTRIES_MAX = 10000, NUMBER_DIGITS = 10 };

/* A number of at most ten digits; the character after it, or NULL. */
static const char *skip_number(const char *p)
{
    size_t digits = strspn(p, "0123456789");
    return digits > 0 && digits <= NUMBER_DIGITS ? p + digits : NULL;
}

bool stepdir_name(const char *nspace, uint32_t uid, char name[STEPDIR_NAME_MAX])
{
    static const char prefix[] = "slurm.pmix.";
    if (nspace == NULL || strncmp(nspace, prefix, sizeof prefix - 1) != 0)
        return false;
    nspace += sizeof prefix - 1;
    const char *dot = skip_number(nspace), *end = dot != NULL && *dot == '.' ? dot + 1 : NULL;
    end = end != NULL ? skip_number(end) : NULL;
    if (end == NULL || *end != '\0')
        return false;
    (void)snprintf(name, STEPDIR_NAME_MAX, "spmix_appdir_%u_%s", uid, nspace);
    return true;
}

static int open_directory(int parent, const char *name)
{
    return openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

int stepdir_make(const char *base, const char *name, uint32_t uid, uint32_t gid)
{
    int parent = open_directory(AT_FDCWD, base), rc = 0;
    if (parent < 0)
        return -errno;
    if (mkdirat(parent, name, 0700) == 0) {
        if (fchownat(parent, name, uid, gid, AT_SYMLINK_NOFOLLOW) < 0)
            rc = -errno;
    } else if (errno != EEXIST) {
        rc = -errno;
    }
    (void)close(parent);
    return rc;
}

/* A directory that is being emptied. */
struct place {
    uint32_t uid;
    int left; /* entries that may still be removed */
};

static void remove_at(struct place *place, int parent, const char *name, int depth);

static void empty(struct place *place, int fd, int depth)
{
    DIR *dir = fdopendir(fd);
    if (dir == NULL) {
        (void)close(fd);
        return;
    }
    for (struct dirent *e; place->left > 0 && (e = readdir(dir)) != NULL;)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            remove_at(place, dirfd(dir), e->d_name, depth);
    (void)closedir(dir);
}

static void remove_at(struct place *place, int parent, const char *name, int depth)
{
    struct stat st;
    place->left--;
    if (unlinkat(parent, name, 0) == 0 || (errno != EISDIR && errno != EPERM))
        return;
    int fd = depth < DEPTH_MAX ? open_directory(parent, name) : -1;
    if (fd < 0)
        return;
    if (fstat(fd, &st) < 0 || st.st_uid != place->uid) {
        (void)close(fd);
        return;
    }
    empty(place, fd, depth + 1);
    (void)unlinkat(parent, name, AT_REMOVEDIR);
}

void stepdir_remove(const char *base, const char *name, uint32_t uid)
{
    struct place place = {.uid = uid, .left = ENTRIES_MAX};
    struct stat st;
    int parent = open_directory(AT_FDCWD, base);
    if (parent < 0)
        return;
    if (fstatat(parent, name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(st.st_mode))
        remove_at(&place, parent, name, 0);
    (void)close(parent);
}
