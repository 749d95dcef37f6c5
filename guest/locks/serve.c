/* SPDX-License-Identifier: Apache-2.0 */
#include "serve.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

int locks_server_add(struct locks_server *s, char *spec, bool read_only)
{
    char *rest = spec;
    const char *tag = strsep(&rest, ":"), *mode = strsep(&rest, ":");
    if (rest == NULL || tag[0] == '\0' || rest[0] != '/' ||
        (strcmp(mode, "cluster") != 0 && strcmp(mode, "refuse") != 0))
        return -EINVAL;
    size_t used = strlen(s->list), line = strlen(mode) + strlen(tag) + 2;
    if (s->shares == LOCKS_SHARES || used + line >= sizeof s->list)
        return -E2BIG;
    int root = open(rest, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root < 0)
        return -errno;
    (void)snprintf(s->list + used, sizeof s->list - used, "%s %s\n", mode, tag);
    s->share[s->shares++] =
        (struct locks_share){.tag = tag, .mode = mode, .read_only = read_only, .root = root};
    return 0;
}

static const struct locks_share *find_share(const struct locks_server *s, const char *tag)
{
    for (size_t i = 0; i < s->shares; i++)
        if (strcmp(s->share[i].tag, tag) == 0 && strcmp(s->share[i].mode, "cluster") == 0)
            return &s->share[i];
    return NULL;
}

/* An open file at the path inside of the share that is the guest's inode, or -errno. */
static int open_file(const struct locks_share *share, const char *path, uint64_t inode)
{
    struct open_how how = {.flags = O_PATH | O_CLOEXEC,
                           .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS};
    struct stat st;
    char self[64];
    long found = syscall(SYS_openat2, share->root, path, &how, sizeof how);
    if (found < 0) /* somebody has moved or removed it, or a folder above it */
        return errno == ENOENT || errno == ELOOP || errno == ENOTDIR ? -ESTALE : -errno;
    int rc = fstat((int)found, &st) < 0 ? -errno : 0;
    if (rc == 0 && st.st_ino != inode)
        rc = -ESTALE;
    if (rc == 0 && !S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode))
        rc = -EOPNOTSUPP; /* to open a device or a pipe may have an effect */
    /* The file that was looked at, also if the path has another one by now. */
    (void)snprintf(self, sizeof self, "/proc/self/fd/%ld", found);
    if (rc == 0) {
        const int flags = O_CLOEXEC | O_NOCTTY | O_NONBLOCK;
        bool dir = S_ISDIR(st.st_mode);
        rc = dir || share->read_only ? -1 : open(self, O_RDWR | flags);
        rc = rc < 0 ? open(self, O_RDONLY | flags) : rc;
        rc = rc < 0 && !dir && !share->read_only ? open(self, O_WRONLY | flags) : rc;
        rc = rc < 0 ? -errno : rc;
    }
    (void)close((int)found);
    return rc;
}

static struct flock range_of(const struct locks_request *r)
{
    static const short type[] = {F_UNLCK, F_RDLCK, F_WRLCK};
    return (struct flock){.l_type = type[r->mode],
                          .l_whence = SEEK_SET,
                          .l_start = (off_t)r->start,
                          .l_len = r->end == LOCKS_END ? 0 : (off_t)(r->end - r->start + 1)};
}

static uint32_t set_flock(struct locks_file *f, const struct locks_request *r,
                          struct locks_reply *reply)
{
    static const int op[] = {LOCK_UN, LOCK_SH, LOCK_EX};
    uint32_t error = flock(f->fd, op[r->mode] | LOCK_NB) == 0 ? 0 : (uint32_t)errno;
    if (error == 0)
        f->flock = r->mode;
    else if (f->flock == LOCKS_SHARED && flock(f->fd, LOCK_SH | LOCK_NB) < 0)
        f->flock = LOCKS_FREE; /* a change to exclusive gives up the shared lock first: flock(2) */
    reply->mode = f->flock;
    return error;
}

static uint32_t set_range(int fd, const struct locks_request *r)
{
    struct flock range = range_of(r);
    if (fcntl(fd, F_OFD_SETLK, &range) == 0)
        return 0;
    return errno == EACCES ? EAGAIN : (uint32_t)errno;
}

static uint32_t test_range(int fd, const struct locks_request *r, struct locks_reply *reply)
{
    struct flock range = range_of(r);
    if (fcntl(fd, F_OFD_GETLK, &range) < 0)
        return (uint32_t)errno;
    if (range.l_type == F_UNLCK || range.l_start < 0 || range.l_len < 0)
        return 0;
    reply->mode = range.l_type == F_WRLCK ? LOCKS_EXCLUSIVE : LOCKS_SHARED;
    reply->start = (uint64_t)range.l_start;
    reply->end = range.l_len == 0 ? LOCKS_END : (uint64_t)range.l_start + (uint64_t)range.l_len - 1;
    return 0;
}

static uint32_t with_file(struct locks_server *s, const struct locks_request *r,
                          struct locks_reply *reply)
{
    struct locks_file *f = &s->file[r->file];
    if (!f->open) {
        const struct locks_share *share = find_share(s, r->tag);
        int fd = share == NULL ? -ENOLCK : open_file(share, r->path, r->inode);
        if (fd < 0)
            return (uint32_t)-fd;
        *f = (struct locks_file){.open = true, .fd = fd, .inode = r->inode};
    }
    if (f->inode != r->inode)
        return ESTALE;
    if (r->op == LOCKS_TEST)
        return test_range(f->fd, r, reply);
    return r->kind == LOCKS_FLOCK ? set_flock(f, r, reply) : set_range(f->fd, r);
}

void locks_server_answer(struct locks_server *s, const struct locks_request *r,
                         struct locks_reply *reply)
{
    *reply = (struct locks_reply){.id = r->id};
    switch (r->op) {
    case LOCKS_HELLO:
        *reply = (struct locks_reply){.id = r->id,
                                      .error = r->file == LOCKS_VERSION ? 0 : EPROTONOSUPPORT,
                                      .text = s->list,
                                      .text_len = (uint32_t)strlen(s->list)};
        break;
    case LOCKS_CLOSE:
        if (s->file[r->file].open)
            (void)close(s->file[r->file].fd);
        s->file[r->file].open = false;
        break;
    default:
        reply->error = with_file(s, r, reply);
    }
}

void locks_server_free(struct locks_server *s)
{
    for (size_t i = 0; i < LOCKS_FILES; i++)
        if (s->file[i].open) {
            (void)close(s->file[i].fd);
            s->file[i].open = false;
        }
    for (size_t i = 0; i < s->shares; i++)
        (void)close(s->share[i].root);
    s->shares = 0;
    s->list[0] = '\0';
}
