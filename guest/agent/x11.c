/* SPDX-License-Identifier: Apache-2.0 */
#include "x11.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "file.h"
#include "link.h"
#include "stepdir.h"
#include "tcptable.h"
#include "xauth.h"

#define VARIABLE "XAUTHORITY"

struct x11_server {
    struct x11_server *next;
    struct agent *agent;
    struct source listener;
    struct x11_display display;
    uint32_t uid;
    char base[PATH_MAX / 2]; /* directory of the agent, for example /run/vhpc */
    char folder[32];         /* in it, of the user */
};

static const struct link_kind kind = {.call = (char[]){VHPC_CALL_X11}};

/* --- connections ---------------------------------------------------------------- */

static bool is_running(const struct session *s)
{
    return s->started && !s->closed && s->task.exchange.flow.phase == FLOW_RUNNING;
}

/* Connections wait while a program starts: it may be the one that connects. */
static short want(struct source *source)
{
    const struct x11_server *x = source->owner;
    bool running = false;
    if (hold_is_quiet(x->agent))
        return 0;
    for (const struct session *s = x->agent->sessions; s != NULL; s = s->next) {
        if (s->x11 != x || s->closed)
            continue;
        if (!s->started || s->task.exchange.flow.phase < FLOW_RUNNING)
            return 0;
        running = running || is_running(s);
    }
    return running ? POLLIN : 0;
}

struct ends {
    uint16_t from, to;
};

static bool is_other_end(const struct tcp_row *row, const void *arg)
{
    const struct ends *ends = arg;
    return row->family == AF_INET && !row->listens && row->local_port == ends->from &&
           row->remote_port == ends->to;
}

static bool holds(const char *pid, const char *socket)
{
    char path[64], target[64];
    bool found = false;
    (void)snprintf(path, sizeof path, "/proc/%.20s/fd", pid);
    DIR *dir = opendir(path);
    if (dir == NULL)
        return false;
    for (struct dirent *e; !found && (e = readdir(dir)) != NULL;) {
        ssize_t n = readlinkat(dirfd(dir), e->d_name, target, sizeof target - 1);
        target[n > 0 ? n : 0] = '\0';
        found = strcmp(target, socket) == 0;
    }
    (void)closedir(dir);
    return found;
}

/* The session of a process that has this socket, of those with the display; NULL: none has. */
static struct session *holder(const struct x11_server *x, const char *socket)
{
    struct session *found = NULL;
    DIR *proc = opendir("/proc");
    if (proc == NULL)
        return NULL;
    for (struct dirent *e; found == NULL && (e = readdir(proc)) != NULL;) {
        if (!isdigit((unsigned char)e->d_name[0]))
            continue;
        uint32_t id = cgroup_session_of(x->agent, (pid_t)strtol(e->d_name, NULL, 10));
        struct session *s = id != 0 ? session_numbered(x->agent, id) : NULL;
        if (s != NULL && s->x11 == x && is_running(s) && holds(e->d_name, socket))
            found = s;
    }
    (void)closedir(proc);
    return found;
}

/*
 * The session that a connection belongs to, because it ends with that. If several sessions have the
 * display, processes are searched for the other end; otherwise the oldest session gets it.
 */
static struct session *session_of(const struct x11_server *x, int fd)
{
    struct session *oldest = NULL, *found = NULL;
    struct sockaddr_in peer = {0};
    socklen_t len = sizeof peer;
    size_t count = 0;
    struct tcp_row row;
    char socket[64];
    for (struct session *s = x->agent->sessions; s != NULL; s = s->next)
        if (s->x11 == x && is_running(s)) {
            oldest = s; /* newer ones are in front */
            count++;
        }
    if (count < 2 || getpeername(fd, (struct sockaddr *)&peer, &len) < 0)
        return oldest;
    struct ends ends = {ntohs(peer.sin_port), (uint16_t)(VHPC_X11_PORT + x->display.number)};
    if (tcptable_find(is_other_end, &ends, &row)) {
        (void)snprintf(socket, sizeof socket, "socket:[%" PRIu64 "]", row.inode);
        found = holder(x, socket);
    }
    return found != NULL ? found : oldest;
}

static void ready(struct source *source, short revents)
{
    const struct x11_server *x = source->owner;
    (void)revents;
    int fd = accept4(source->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0)
        return;
    struct session *s = session_of(x, fd);
    if (s != NULL && calls_alive(s) < VHPC_CALLS_MAX && s->last_call < UINT32_MAX)
        link_open(s, fd, &kind);
    else
        (void)close(fd);
}

/* --- a display ------------------------------------------------------------------ */

static int open_listener(struct x11_server *x)
{
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)(VHPC_X11_PORT + x->display.number)),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int rc = 0, on = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    /* Connections of the last program may still be in TIME_WAIT. */
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&at, sizeof at) < 0 || listen(fd, SOMAXCONN) < 0)
        rc = -errno;
    x->listener = (struct source){.fd = fd, .want = want, .ready = ready, .owner = x};
    if (rc == 0)
        rc = loop_add(&x->agent->loop, &x->listener);
    if (rc < 0)
        (void)close(fd);
    return rc;
}

static int write_cookie(const struct x11_server *x, uint32_t gid)
{
    uint8_t entry[XAUTH_ENTRY_MAX];
    char folder[PATH_MAX];
    int rc = stepdir_make(x->base, x->folder, x->uid, gid);
    if (rc < 0)
        return rc;
    (void)snprintf(folder, sizeof folder, "%s/%s", x->base, x->folder);
    int dir = open(folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    int fd = dir < 0 ? -1
                     : openat(dir, VHPC_X11_FILE,
                              O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0 || fchmod(fd, 0600) < 0 || (geteuid() == 0 && fchown(fd, x->uid, (gid_t)gid) < 0))
        rc = -errno;
    if (rc == 0)
        rc = write_all(fd, entry, xauth_entry(&x->display, entry));
    if (fd >= 0)
        (void)close(fd);
    if (dir >= 0)
        (void)close(dir);
    return rc;
}

static void end_server(struct x11_server *x)
{
    struct agent *a = x->agent;
    struct x11_server **p = &a->displays;
    while (*p != NULL && *p != x)
        p = &(*p)->next;
    if (*p != NULL)
        *p = x->next;
    loop_remove(&a->loop, &x->listener);
    (void)close(x->listener.fd);
    stepdir_remove(x->base, x->folder, x->uid);
    free(x);
}

/* Serve a new display. 0 or -errno. */
static int begin_server(struct session *s, struct x11_server **out)
{
    struct agent *a = s->agent;
    const char *slash = a->call_socket != NULL ? strrchr(a->call_socket, '/') : NULL;
    struct x11_server *x = slash != NULL ? calloc(1, sizeof *x) : NULL;
    if (x == NULL)
        return slash != NULL ? -ENOMEM : -ENOENT;
    x->agent = a;
    x->display = s->spec.x11;
    x->uid = s->spec.uid;
    (void)snprintf(x->base, sizeof x->base, "%.*s", (int)(slash - a->call_socket), a->call_socket);
    (void)snprintf(x->folder, sizeof x->folder, VHPC_X11_FOLDER, (unsigned)x->display.number);
    int rc = open_listener(x);
    if (rc < 0) {
        free(x);
        return rc;
    }
    rc = write_cookie(x, s->spec.gid);
    if (rc < 0) {
        end_server(x);
        return rc;
    }
    x->next = a->displays;
    a->displays = x;
    *out = x;
    return 0;
}

static bool same(const struct x11_server *x, const struct execspec *spec)
{
    return x->uid == spec->uid &&
           memcmp(x->display.cookie, spec->x11.cookie, sizeof spec->x11.cookie) == 0;
}

int x11_listen(struct session *s)
{
    struct execspec *spec = &s->spec;
    struct x11_server *x = s->agent->displays;
    char entry[PATH_MAX + 64];
    int rc = 0;
    if (!spec->x11.wanted)
        return 0;
    while (x != NULL && x->display.number != spec->x11.number)
        x = x->next;
    if (x == NULL)
        rc = begin_server(s, &x);
    else if (!same(x, spec))
        rc = -EADDRINUSE;
    if (rc == -ENOMEM)
        return rc;
    s->x11_error = -rc;
    if (rc < 0)
        return 0;
    s->x11 = x;
    execspec_drop_env(spec, VARIABLE "=");
    (void)snprintf(entry, sizeof entry, VARIABLE "=%s/%s/" VHPC_X11_FILE, x->base, x->folder);
    return execspec_add_env(spec, entry);
}

bool x11_is_used(const struct session *s)
{
    return links_count(s, &kind) > 0;
}

void x11_close(struct session *s)
{
    struct x11_server *x = s->x11;
    if (x == NULL)
        return;
    s->x11 = NULL;
    for (const struct session *other = s->agent->sessions; other != NULL; other = other->next)
        if (other->x11 == x)
            return;
    end_server(x);
}
