/* SPDX-License-Identifier: Apache-2.0 */
/* Decision: Locks of a guest are taken on the node */
#include "broker.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "filter.h"
#include "loop.h"
#include "readtext.h"

/* Pauses between two attempts or looks: a tenth of the time since the last change, in limits. */
enum { PAUSE_MIN_MS = 2, PAUSE_MAX_MS = 1000, RETRY_MAX_MS = 100, PART = 10, OPEN_MS = 100 };

static long long pause_after(long long idle_ms, long long most)
{
    long long pause = idle_ms / PART;
    if (pause < PAUSE_MIN_MS)
        return PAUSE_MIN_MS;
    return pause < most ? pause : most;
}

/* --- answers to the kernel -------------------------------------------------------------- */

/* Kernels of another version may have longer structures. */
union report {
    struct seccomp_notif notif;
    char room[sizeof(struct seccomp_notif) + 64];
};

union answer {
    struct seccomp_notif_resp resp;
    char room[sizeof(struct seccomp_notif_resp) + 64];
};

static void answer(const struct broker *b, uint64_t id, int error, uint32_t flags)
{
    union answer a = {.resp = {.id = id, .error = error, .flags = flags}};
    (void)ioctl(b->reports, SECCOMP_IOCTL_NOTIF_SEND, &a); /* fails if the caller has ended */
}

static void go_on(const struct broker *b, uint64_t id)
{
    answer(b, id, 0, SECCOMP_USER_NOTIF_FLAG_CONTINUE);
}

/* error: -errno, or 0 for the success of F_GETLK. */
static void finish(const struct broker *b, uint64_t id, int error)
{
    answer(b, id, error, 0);
}

static bool still_waits(const struct broker *b, uint64_t id)
{
    return ioctl(b->reports, SECCOMP_IOCTL_NOTIF_ID_VALID, &id) == 0;
}

/* --- shares ----------------------------------------------------------------------------- */

static int greet(struct broker *b)
{
    struct locks_request r = {.op = LOCKS_HELLO, .file = LOCKS_VERSION};
    struct locks_reply reply;
    char mode[16];
    b->shares = 0;
    if (node_ask(&b->files.node, &r, &reply) < 0 || reply.error != 0)
        return -EPROTO;
    for (const char *at = reply.text; at != NULL && b->shares < BROKER_SHARES;
         at = strchr(at, '\n')) {
        at += *at == '\n';
        if (text_word(&at, mode, sizeof mode) &&
            text_word(&at, b->share[b->shares].tag, sizeof b->share->tag))
            b->share[b->shares++].refuse = strcmp(mode, "refuse") == 0;
    }
    return 0;
}

static void reconnect(struct broker *b, long long now)
{
    b->open_ms = now + OPEN_MS;
    if (node_open(&b->files.node, b->path) < 0)
        return;
    files_hold_nothing(&b->files);
    if (greet(b) < 0)
        node_close(&b->files.node);
    b->changed_ms = b->look_ms = now; /* take what programs have, if they have anything */
}

static void interrupted(struct broker *b)
{
    struct signalfd_siginfo info;
    while (read(b->files.node.interrupt, &info, sizeof info) > 0)
        ;
    node_close(&b->files.node);
    reconnect(b, now_ms());
}

static void read_mounts(struct broker *b)
{
    struct pollfd p = {.fd = b->mounts_changed, .events = POLLPRI};
    if (b->mounts.count > 0 && poll(&p, 1, 0) == 0)
        return;
    struct mounts now;
    if (mounts_read(&now, "/proc/self/mountinfo") < 0)
        return;
    mounts_free(&b->mounts);
    b->mounts = now;
}

/* Place of the share with the file system among those with locks; -1: it is another one. */
static int share_of(struct broker *b, dev_t device)
{
    read_mounts(b);
    const char *tag = mounts_tag(&b->mounts, device);
    for (size_t i = 0; tag != NULL && i < b->shares; i++)
        if (strcmp(b->share[i].tag, tag) == 0)
            return (int)i;
    return -1;
}

/*
 * Drop the share's names and attributes from this guest's caches: a program of another guest may
 * have changed other files under the same lock. A change of no option lets the kernel drop what no
 * program uses; what is in use is younger than a second, or is looked up again when it is opened.
 */
static void forget_names(const struct broker *b, dev_t device)
{
    enum { PICK_CLOEXEC = 1, RECONFIGURE = 7 }; /* FSPICK_CLOEXEC, FSCONFIG_CMD_RECONFIGURE */
    for (size_t i = 0; i < b->mounts.count; i++) {
        if (b->mounts.entry[i].device != device)
            continue;
        int fs = (int)syscall(SYS_fspick, AT_FDCWD, b->mounts.entry[i].point, PICK_CLOEXEC);
        if (fs < 0)
            return;
        (void)syscall(SYS_fsconfig, fs, RECONFIGURE, NULL, NULL, 0);
        (void)close(fs);
        return;
    }
}

/* --- what is held on the node ------------------------------------------------------------ */

/* Give back what programs of the guest do not have any more. */
static void look(struct broker *b, long long now)
{
    b->unlocked = false;
    files_need_nothing(&b->files);
    int rc = files_need_locks(&b->files, "/proc/locks");
    for (size_t i = 0; i < b->grants && rc == 0; i++) {
        const struct lock_grant *g = &b->grant[i];
        struct locked_file *l = files_find(&b->files, g->device, g->inode);
        if (l == NULL || !caller_is_in(&g->call, g->ticks)) {
            b->grant[i--] = b->grant[--b->grants];
            b->changed_ms = now; /* the table was read before: look once more */
        }
        if (l != NULL)
            rc = locks_map_raise(&l->needed[g->call.kind], g->call.range);
    }
    if (rc == 0 && files_settle(&b->files, now))
        b->changed_ms = now;
    b->look_ms = now + pause_after(now - b->changed_ms, PAUSE_MAX_MS);
}

/* --- a call ----------------------------------------------------------------------------- */

/* The file of a call on a share; NULL: *error says why not. */
static struct locked_file *file_of(struct broker *b, const struct lock_call *c,
                                   const struct stat *st, size_t share, int *error)
{
    char name[64], path[PATH_MAX], in_share[PATH_MAX];
    struct mounts mounts;
    int mount;
    struct locked_file *l = files_find(&b->files, st->st_dev, st->st_ino);
    if (l != NULL)
        return l;
    /* That of the program, which may be in a container. */
    (void)snprintf(name, sizeof name, "/proc/%d/mountinfo", (int)c->tid);
    *error = caller_path(c, path, sizeof path, &mount);
    if (*error == 0)
        *error = mounts_read(&mounts, name);
    if (*error < 0)
        return NULL;
    *error = mounts_locate(&mounts, mount, path, in_share, sizeof in_share);
    mounts_free(&mounts);
    if (*error == 0)
        l = files_add(&b->files, st->st_dev, st->st_ino, b->share[share].tag, in_share);
    if (l == NULL)
        *error = -ENOLCK;
    return l;
}

static void forget_grant(struct broker *b, pid_t tid)
{
    for (size_t i = 0; i < b->grants; i++)
        if (b->grant[i].call.tid == tid)
            b->grant[i--] = b->grant[--b->grants];
}

static void look_soon(struct broker *b, long long now)
{
    b->changed_ms = now;
    if (b->look_ms > now + 1)
        b->look_ms = now + 1;
}

/* Take the lock on the node, then the call continues. 0, or -errno if there is no lock. */
static int take(struct broker *b, uint64_t id, const struct lock_call *c, const struct stat *st,
                size_t share)
{
    int error = 0;
    bool asked = false;
    if (b->unlocked)
        look(b, now_ms()); /* not to keep from others what is given up and taken in a loop */
    if (b->grants == BROKER_GRANTS)
        return -ENOLCK;
    struct locked_file *l = file_of(b, c, st, share, &error);
    if (l == NULL)
        return error;
    look_soon(b, now_ms());
    error = files_raise(&b->files, l, c->kind, c->range, &asked);
    if (error < 0)
        return error;
    if (asked) {
        caller_refresh(c);
        forget_names(b, st->st_dev);
    }
    b->grant[b->grants++] = (struct lock_grant){
        .call = *c, .device = st->st_dev, .inode = st->st_ino, .ticks = caller_ticks(c->tid)};
    go_on(b, id);
    return 0;
}

/* F_GETLK: others on the node first, then those of this guest, which its kernel knows. */
static void test(struct broker *b, uint64_t id, const struct lock_call *c, const struct stat *st,
                 size_t share)
{
    struct locks_range other = {0};
    int error = 0;
    struct locked_file *l = file_of(b, c, st, share, &error);
    if (l != NULL)
        error = files_test(&b->files, l, c->range, &other);
    look_soon(b, now_ms());
    if (error == 0 && other.mode == LOCKS_FREE)
        go_on(b, id);
    else if (error == 0 && still_waits(b, id))
        finish(b, id, caller_put_lock(c, &other));
    else
        finish(b, id, error);
}

static void wait_for(struct broker *b, uint64_t id, const struct lock_call *c)
{
    long long now = now_ms();
    if (b->waits == BROKER_WAITING) {
        finish(b, id, -ENOLCK);
        return;
    }
    b->wait[b->waits++] =
        (struct lock_wait){.id = id, .call = *c, .since_ms = now, .next_ms = now + PAUSE_MIN_MS};
}

static void handle(struct broker *b, const struct seccomp_notif *n)
{
    struct lock_call c = caller_parse(n);
    struct stat st;
    forget_grant(b, c.tid); /* its earlier call has ended */
    int share = c.op != 0 && caller_stat(&c, &st) == 0 ? share_of(b, st.st_dev) : -1;
    if (share < 0 || caller_range(&c) < 0 || !still_waits(b, n->id)) {
        go_on(b, n->id);
    } else if (c.op == LOCKS_SET && c.range.mode == LOCKS_FREE) {
        go_on(b, n->id);
        b->unlocked = true;
        look_soon(b, now_ms());
    } else if (b->share[share].refuse && c.op == LOCKS_SET) {
        finish(b, n->id, -ENOLCK);
    } else if (b->share[share].refuse || st.st_nlink == 0) {
        go_on(b, n->id); /* a file that was removed: other guests cannot open it */
    } else if (c.op == LOCKS_TEST) {
        test(b, n->id, &c, &st, (size_t)share);
    } else {
        int rc = take(b, n->id, &c, &st, (size_t)share);
        if (rc == -EAGAIN && c.wait)
            wait_for(b, n->id, &c);
        else if (rc < 0)
            finish(b, n->id, rc);
    }
}

/* --- time ------------------------------------------------------------------------------- */

/* Try again for calls that wait. */
static void retry(struct broker *b, long long now)
{
    for (size_t i = 0; i < b->waits; i++) {
        struct lock_wait *w = &b->wait[i];
        struct stat st;
        if (w->next_ms > now)
            continue;
        int rc = still_waits(b, w->id) ? caller_stat(&w->call, &st) : -EINTR;
        int share = rc == 0 ? share_of(b, st.st_dev) : -1;
        if (rc == 0)
            rc = share < 0 ? -ENOLCK : take(b, w->id, &w->call, &st, (size_t)share);
        if (rc == -EAGAIN) {
            w->next_ms = now + pause_after(now - w->since_ms, RETRY_MAX_MS);
            continue;
        }
        if (rc < 0)
            finish(b, w->id, rc); /* with -EINTR no thread reads it */
        b->wait[i--] = b->wait[--b->waits];
    }
}

/* Milliseconds until the next look or attempt; -1: there is none. */
static int timeout_of(const struct broker *b, long long now)
{
    long long next = b->files.used > 0 ? b->look_ms : -1;
    if (b->files.node.fd < 0 && (next < 0 || b->open_ms < next))
        next = b->open_ms;
    for (size_t i = 0; i < b->waits; i++)
        if (next < 0 || b->wait[i].next_ms < next)
            next = b->wait[i].next_ms;
    if (next < 0)
        return -1;
    return next > now ? (int)(next - now) : 0;
}

static int open_interrupt(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    return sigprocmask(SIG_BLOCK, &set, NULL) < 0 ? -1
                                                  : signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

int broker_run(int port, const char *path, int reports)
{
    static struct broker broker;
    struct broker *b = &broker;
    b->reports = reports;
    b->path = path;
    b->files.node.fd = port;
    int interrupt = open_interrupt();
    b->mounts_changed = open("/proc/self/mountinfo", O_RDONLY | O_CLOEXEC);
    if (b->mounts_changed < 0 || interrupt < 0 || greet(b) < 0)
        return 1;
    b->files.node.interrupt = interrupt; /* from now on there is another chance to greet */
    for (;;) {
        struct pollfd p[] = {{.fd = reports, .events = POLLIN},
                             {.fd = b->files.node.interrupt, .events = POLLIN}};
        int n = poll(p, 2, timeout_of(b, now_ms()));
        if (n < 0 && errno != EINTR)
            return 1;
        if (n > 0 && p[1].revents != 0)
            interrupted(b);
        if (n > 0 && (p[0].revents & POLLIN) != 0) {
            union report r;
            memset(&r, 0, sizeof r); /* the kernel insists */
            if (ioctl(reports, SECCOMP_IOCTL_NOTIF_RECV, &r) == 0)
                handle(b, &r.notif);
        } else if (n > 0 && p[0].revents != 0) {
            return 0; /* no process has the filter any more */
        }
        long long now = now_ms();
        if (b->files.node.fd < 0 && now >= b->open_ms)
            reconnect(b, now);
        retry(b, now);
        if (b->files.used > 0 && now >= b->look_ms)
            look(b, now);
    }
}
