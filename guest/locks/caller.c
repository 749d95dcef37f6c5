/* SPDX-License-Identifier: Apache-2.0 */
#include "caller.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/audit.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "filter.h"
#include "readtext.h"

static void proc_name(char out[64], pid_t tid, const char *rest)
{
    (void)snprintf(out, 64, "/proc/%d/%.40s", (int)tid, rest);
}

static void fd_name(char out[64], const struct lock_call *c, const char *folder)
{
    (void)snprintf(out, 64, "/proc/%d/%s/%d", (int)c->tid, folder, c->fd);
}

/* --- the call ----------------------------------------------------------------------- */

static void parse_flock(struct lock_call *c)
{
    uint64_t op = c->data.args[1] & 0xffffffff;
    c->kind = LOCKS_FLOCK;
    c->wait = (op & LOCK_NB) == 0;
    c->range = (struct locks_range){.end = LOCKS_END};
    op &= ~(uint64_t)LOCK_NB;
    if (op != LOCK_SH && op != LOCK_EX && op != LOCK_UN)
        return; /* the kernel refuses it */
    c->op = LOCKS_SET;
    c->range.mode = op == LOCK_SH ? LOCKS_SHARED : op == LOCK_EX ? LOCKS_EXCLUSIVE : LOCKS_FREE;
}

static void parse_fcntl(struct lock_call *c)
{
    c->user = c->data.args[2];
    switch (c->data.args[1] & 0xffffffff) {
    case F_GETLK:
    case F_OFD_GETLK:
    case F_GETLK_I386:
        c->op = LOCKS_TEST;
        break;
    case F_SETLKW:
    case F_OFD_SETLKW:
    case F_SETLKW_I386:
        c->wait = true;
        c->op = LOCKS_SET;
        break;
    case F_SETLK:
    case F_OFD_SETLK:
    case F_SETLK_I386:
        c->op = LOCKS_SET;
        break;
    default:
        break;
    }
    if (c->data.arch != FILTER_ARCH) {
        c->user &= 0xffffffff;
        uint64_t cmd = c->data.args[1] & 0xffffffff;
        c->layout = cmd == F_GETLK || cmd == F_SETLK || cmd == F_SETLKW ? FLOCK_I386 : FLOCK64_I386;
    }
}

struct lock_call caller_parse(const struct seccomp_notif *n)
{
    struct lock_call c = {.tid = (pid_t)n->pid,
                          .fd = (int)(n->data.args[0] & 0xffffffff),
                          .kind = LOCKS_FCNTL,
                          .data = n->data};
    if (n->data.nr == (n->data.arch == FILTER_ARCH ? SYS_flock : FILTER_FLOCK_I386))
        parse_flock(&c);
    else
        parse_fcntl(&c);
    return c;
}

int caller_stat(const struct lock_call *c, struct stat *st)
{
    char name[64];
    fd_name(name, c, "fd");
    return stat(name, st) < 0 ? -errno : 0;
}

/* --- its range ---------------------------------------------------------------------- */

struct user_lock {
    int16_t type, whence;
    int64_t start, len;
};

/* Offsets of start, length and process, and whether the numbers have 64 bits. */
static const struct {
    size_t start, len, pid, size;
    bool wide;
} layouts[] = {
    [FLOCK_NATIVE] = {offsetof(struct flock, l_start), offsetof(struct flock, l_len),
                      offsetof(struct flock, l_pid), sizeof(struct flock), true},
    [FLOCK_I386] = {4, 8, 12, 16, false},
    [FLOCK64_I386] = {4, 12, 20, 24, true},
};

static int64_t get_number(const uint8_t *p, bool wide)
{
    int64_t long_one;
    int32_t short_one;
    memcpy(&long_one, p, wide ? sizeof long_one : 0);
    memcpy(&short_one, p, sizeof short_one);
    return wide ? long_one : short_one;
}

static void put_number(uint8_t *p, int64_t value, bool wide)
{
    int32_t short_one = value > INT32_MAX ? INT32_MAX : (int32_t)value;
    if (wide)
        memcpy(p, &value, sizeof value);
    else
        memcpy(p, &short_one, sizeof short_one);
}

static int memory_of(pid_t tid, int flags)
{
    char name[64];
    proc_name(name, tid, "mem");
    int fd = open(name, flags | O_CLOEXEC);
    return fd < 0 ? -errno : fd;
}

static int read_lock(const struct lock_call *c, struct user_lock *l)
{
    uint8_t raw[sizeof(struct flock)];
    int fd = memory_of(c->tid, O_RDONLY);
    if (fd < 0)
        return fd;
    size_t size = layouts[c->layout].size;
    ssize_t n = pread(fd, raw, size, (off_t)c->user);
    (void)close(fd);
    if (n != (ssize_t)size)
        return -EFAULT;
    memcpy(&l->type, raw, sizeof l->type);
    memcpy(&l->whence, raw + sizeof l->type, sizeof l->whence);
    l->start = get_number(raw + layouts[c->layout].start, layouts[c->layout].wide);
    l->len = get_number(raw + layouts[c->layout].len, layouts[c->layout].wide);
    return 0;
}

/* The number behind a name in the fdinfo of the call's file. */
static int fdinfo(const struct lock_call *c, const char *name, int64_t *value)
{
    char path[64], text[1024];
    fd_name(path, c, "fdinfo");
    if (read_text(path, text, sizeof text) <= 0)
        return -EBADF;
    uint64_t number;
    const char *line = strstr(text, name);
    if (line == NULL)
        return -EBADF;
    line += strlen(name);
    if (!text_number(&line, 10, '\n', &number) || number > INT64_MAX)
        return -EBADF;
    *value = (int64_t)number;
    return 0;
}

/* The byte that the start of a range counts from. */
static int base_of(const struct lock_call *c, int whence, int64_t *base)
{
    char name[64];
    struct statx st;
    *base = 0;
    switch (whence) {
    case SEEK_SET:
        return 0;
    case SEEK_CUR:
        return fdinfo(c, "pos:", base);
    case SEEK_END:
        fd_name(name, c, "fd");
        if (statx(AT_FDCWD, name, AT_STATX_FORCE_SYNC, STATX_SIZE, &st) < 0)
            return -errno;
        *base = (int64_t)st.stx_size;
        return 0;
    default:
        return -EINVAL;
    }
}

int caller_range(struct lock_call *c)
{
    struct user_lock l;
    int64_t base, start, past;
    if (c->kind == LOCKS_FLOCK)
        return 0;
    if (read_lock(c, &l) < 0 || base_of(c, l.whence, &base) < 0)
        return -EINVAL;
    if (l.type != F_RDLCK && l.type != F_WRLCK && l.type != F_UNLCK)
        return -EINVAL;
    if (__builtin_add_overflow(base, l.start, &start) ||
        __builtin_add_overflow(start, l.len, &past))
        return -EINVAL;
    if (l.len < 0) { /* the bytes in front of it */
        int64_t end = start;
        start = past;
        past = end;
    }
    if (start < 0)
        return -EINVAL;
    c->range.start = (uint64_t)start;
    c->range.end = l.len == 0 ? LOCKS_END : (uint64_t)past - 1;
    c->range.mode = l.type == F_WRLCK   ? LOCKS_EXCLUSIVE
                    : l.type == F_RDLCK ? LOCKS_SHARED
                                        : LOCKS_FREE;
    return 0;
}

int caller_put_lock(const struct lock_call *c, const struct locks_range *other)
{
    uint8_t raw[sizeof(struct flock)] = {0};
    const int16_t type = other->mode == LOCKS_EXCLUSIVE ? F_WRLCK : F_RDLCK, whence = SEEK_SET;
    const int64_t len = other->end == LOCKS_END ? 0 : (int64_t)(other->end - other->start + 1);
    const int32_t pid = -1; /* as for a lock of an open file */
    size_t size = layouts[c->layout].size;
    memcpy(raw, &type, sizeof type);
    memcpy(raw + sizeof type, &whence, sizeof whence);
    put_number(raw + layouts[c->layout].start, (int64_t)other->start, layouts[c->layout].wide);
    put_number(raw + layouts[c->layout].len, len, layouts[c->layout].wide);
    memcpy(raw + layouts[c->layout].pid, &pid, sizeof pid);
    int fd = memory_of(c->tid, O_WRONLY);
    if (fd < 0)
        return fd;
    ssize_t n = pwrite(fd, raw, size, (off_t)c->user);
    (void)close(fd);
    return n == (ssize_t)size ? 0 : -EFAULT;
}

/* --- its file ----------------------------------------------------------------------- */

int caller_path(const struct lock_call *c, char *path, size_t size, int *mount)
{
    char name[64];
    int64_t id;
    fd_name(name, c, "fd");
    ssize_t n = readlink(name, path, size - 1);
    if (n < 0)
        return -errno;
    path[n] = '\0';
    if (fdinfo(c, "mnt_id:", &id) < 0)
        return -EBADF;
    *mount = (int)id;
    return 0;
}

static pid_t process_of(pid_t tid)
{
    char name[64], text[4096];
    proc_name(name, tid, "status");
    const char *line = read_text(name, text, sizeof text) > 0 ? strstr(text, "\nTgid:") : NULL;
    return line != NULL ? (pid_t)strtol(line + strlen("\nTgid:"), NULL, 10) : tid;
}

/* The same open file, here: nothing is asked of the node for it. */
static int same_file(const struct lock_call *c)
{
    int process = (int)syscall(SYS_pidfd_open, process_of(c->tid), 0);
    if (process < 0)
        return -errno;
    int fd = (int)syscall(SYS_pidfd_getfd, process, c->fd, 0);
    fd = fd < 0 ? -errno : fd;
    (void)close(process);
    return fd;
}

void caller_refresh(const struct lock_call *c)
{
    struct statx st;
    int fd = same_file(c);
    if (fd < 0)
        return;
    (void)statx(fd, "", AT_EMPTY_PATH | AT_STATX_FORCE_SYNC, STATX_BASIC_STATS, &st);
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    (void)close(fd);
}

/* --- the thread --------------------------------------------------------------------- */

uint64_t caller_ticks(pid_t tid)
{
    enum { UTIME = 11 }; /* words between the state and the user time: proc(5) */
    char name[64], rest[64], text[1024];
    (void)snprintf(rest, sizeof rest, "task/%d/stat", (int)tid);
    proc_name(name, tid, rest);
    if (read_text(name, text, sizeof text) <= 0)
        return UINT64_MAX; /* it is gone */
    const char *word = strrchr(text, ')');
    for (int i = 0; word != NULL && i <= UTIME; i++)
        word = strchr(word + 1, ' ');
    return word != NULL ? strtoull(word, NULL, 10) : UINT64_MAX;
}

bool caller_is_in(const struct lock_call *c, uint64_t ticks)
{
    enum { GRANULARITY = 2 };
    char name[64], text[256];
    uint64_t number;
    proc_name(name, c->tid, "syscall");
    if (read_text(name, text, sizeof text) <= 0)
        return false;
    if (strncmp(text, "running", 7) == 0) {
        /* Time that it has spent in its own code is time after the call. */
        uint64_t now = caller_ticks(c->tid);
        return now != UINT64_MAX && now < ticks + GRANULARITY;
    }
    const char *at = text;
    if (!text_number(&at, 10, ' ', &number))
        return false; /* -1: it does not run a system call */
    bool same = (int)number == c->data.nr;
    for (size_t i = 0; i < 3 && same; i++)
        same = text_number(&at, 16, '\0', &number) && number == c->data.args[i];
    return same;
}
