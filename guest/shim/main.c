/* SPDX-License-Identifier: Apache-2.0 */
/* vhpc-shim: one per guest, unprivileged; both sockets are inherited. */
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "shim.h"
#include "version.h"

enum {
    TICK_MS = 100,
    GRACE_MS = 2000, /* how long clients may take to read that the guest is gone */
    /*
     * A guest that ends takes the daemons of its folders with it, and its channel closes soon
     * after.
     */
    DAEMON_ENDED_MS = 1000,
};

static const char usage[] =
    "usage: vhpc-shim --agent-fd N --listen-fd N --uid UID [--watch-fd N]...\n"
    "                 [--log-fd TAG:N]... [--console-fd N [--console-keep KIB]]\n"
    "\n"
    "Multiplexes the channel of one guest among its clients, and limits the size of the file\n"
    "with its console output.\n"
    "\n"
    "  --agent-fd N   connected socket of the guest's virtio-serial port\n"
    "  --listen-fd N  listening unix socket for vhpc-run and control clients\n"
    "  --root-fd N    listening unix socket that only root can connect to: connections of the\n"
    "                 user cannot fill its queue\n"
    "  --uid UID      the job's user; only this user and root may connect\n"
    "  --console-fd N file that QEMU appends the guest's console to, open for reading and writing\n"
    "  --console-keep KIB  how much of its beginning and of its end is kept (default 1024)\n"
    "  --watch-fd N   pidfd of a process that the guest cannot work without\n"
    "  --log-fd TAG:N pipe with the messages of such a process; they are written to stderr\n"
    "  --help, --version\n"
    "\n"
    "SIGUSR1: the guest is held; if its side closes, clients wait in silence until SIGTERM, or\n"
    "until SIGUSR2, which ends the hold.\n"
    "\n"
    "Exit status: 0 when the guest closes its side, on SIGTERM, or when a watched\n"
    "process has ended; 3 when the guest violates the protocol; 2 on bad usage. With\n"
    "--console-fd, a shim that has closed the channel itself waits for SIGTERM.\n";

static short want_input(struct source *s)
{
    (void)s;
    return POLLIN;
}

/* Connections that are refused with a reason, and those of root, beyond the limit of the user's. */
enum { RESERVED = 64 };

/* Beyond the limit clients are refused with a reason; far beyond it they wait in the queue. */
static short want_clients(struct source *s)
{
    const struct shim *shim = s->owner;
    return shim->client_count < shim->clients_max + RESERVED ? POLLIN : 0;
}

static void listener_ready(struct source *source, short revents)
{
    (void)revents;
    shim_accept(source->owner, source->fd);
}

static void signals_ready(struct source *source, short revents)
{
    struct signalfd_siginfo info;
    (void)revents;
    if (read(source->fd, &info, sizeof info) != (ssize_t)sizeof info)
        return;
    struct shim *s = source->owner;
    if (info.ssi_signo != SIGTERM) {
        shim_hold(s, info.ssi_signo == SIGUSR1);
        return;
    }
    s->terminated = true;
    shim_end(s, SHIM_AGENT_CLOSED, "the guest is being shut down");
}

/*
 * A guest waits without limit for the daemon of a shared folder that has ended, and so would its
 * job.
 */
static void watched_ready(struct source *source, short revents)
{
    struct shim *s = source->owner;
    (void)revents;
    loop_remove(&s->loop, source);
    if (s->daemon_ended_ms == 0 && !s->ended)
        s->daemon_ended_ms = now_ms();
}

static int watch(struct shim *s, int fd)
{
    if (s->watched_count == SHIM_WATCHED_MAX)
        return -E2BIG;
    struct source *source = &s->watched[s->watched_count++];
    *source = (struct source){.fd = fd, .want = want_input, .ready = watched_ready, .owner = s};
    return loop_add(&s->loop, source);
}

static int read_log(struct shim *s, const char *spec)
{
    if (s->log_count == SHIM_WATCHED_MAX)
        return -E2BIG;
    return log_pipe_open(&s->logs[s->log_count++], &s->loop, spec);
}

static int parse_number(const char *text, unsigned long max, unsigned long *out)
{
    char *rest;
    errno = 0;
    *out = strtoul(text, &rest, 10);
    return errno == 0 && rest != text && *rest == '\0' && text[0] != '-' && *out <= max ? 0 : -1;
}

static int open_listener(struct shim *s, struct source *source, int fd,
                         short (*want)(struct source *))
{
    *source = (struct source){.fd = fd, .want = want, .ready = listener_ready, .owner = s};
    int rc = fd_prepare(fd);
    return rc == 0 ? loop_add(&s->loop, source) : rc;
}

static int open_sources(struct shim *s, int agent_fd, int listen_fd, int root_fd)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGUSR1);
    sigaddset(&set, SIGUSR2);
    (void)signal(SIGPIPE, SIG_IGN);
    (void)signal(SIGXFSZ, SIG_IGN); /* a full log must not end the shim */
    if (sigprocmask(SIG_BLOCK, &set, NULL) < 0)
        return -errno;
    s->signals = (struct source){.want = want_input, .ready = signals_ready, .owner = s};
    s->signals.fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (s->signals.fd < 0)
        return -errno;
    int rc = loop_add(&s->loop, &s->signals);
    if (rc == 0)
        rc = open_listener(s, &s->listener, listen_fd, want_clients);
    if (rc == 0 && root_fd >= 0)
        rc = open_listener(s, &s->root_listener, root_fd, want_input);
    return rc == 0 ? shim_agent_open(s, agent_fd) : rc;
}

/* A guest may run without console limits; the failure is logged in the shim's log. */
static void watch_console(struct shim *s, int fd, unsigned long keep_kib)
{
    int rc = console_open(&s->console, &s->loop, fd, (off_t)keep_kib << 10);
    if (rc < 0)
        log_line("the console cannot be watched and may grow without limit: %s", strerror(-rc));
}

/*
 * A guest whose channel we have closed ourselves runs until its job's Epilog and may write to its
 * console: stay and limit the console's size. New clients get the reason.
 *
 * A guest that has ended writes nothing, and the Epilog waits for all processes of its uid, also
 * for this one: so do not stay if the daemons of its folders have ended with it.
 */
static bool must_stay(const struct shim *s)
{
    return s->runs_on && s->console.keep > 0 && !s->terminated;
}

static int sooner(int a, int b)
{
    return a < 0 || (b >= 0 && b < a) ? b : a;
}

/*
 * How long to wait for the next event, at most timeout ms (-1: without limit). Ends a guest that
 * has lost a daemon and has not ended by itself.
 */
static int poll_timeout(struct shim *s, bool watching, int timeout)
{
    if (watching)
        timeout = sooner(timeout, TICK_MS);
    if (s->daemon_ended_ms != 0 && !s->ended && !s->held) {
        long long left = s->daemon_ended_ms + DAEMON_ENDED_MS - now_ms();
        if (left > 0)
            return sooner(timeout, (int)left);
        s->runs_on = true;
        shim_end(s, SHIM_AGENT_CLOSED, "the daemon of a shared folder has ended");
    }
    return s->ended && !must_stay(s) ? TICK_MS : timeout;
}

static int serve(struct shim *s)
{
    long long until = 0;
    bool watching = false;
    int timeout = -1;
    while (!s->ended || s->clients != NULL || must_stay(s)) {
        if (s->ended && until == 0)
            until = now_ms() + GRACE_MS;
        if (s->ended && now_ms() >= until && !must_stay(s))
            break;
        int rc = loop_once(&s->loop, poll_timeout(s, watching, timeout));
        if (rc < 0) {
            log_line("poll failed: %s", strerror(-rc));
            return 1;
        }
        /* First handle what has arrived meanwhile: the delay may be ours. */
        watching = shim_check_silent(s, now_ms());
        timeout = shim_check_stopped(s, now_ms());
        shim_limit_memory(s);
        shim_sweep(s);
    }
    return s->status;
}

struct settings {
    int agent_fd; /* -1 = not given; also for the next three */
    int listen_fd;
    int root_fd;
    int console_fd;
    unsigned long keep_kib;
    bool have_uid;
};

static bool read_fd(const char *text, int *fd)
{
    unsigned long number = 0;
    if (parse_number(text, 1 << 20, &number) < 0)
        return false;
    *fd = (int)number;
    return true;
}

/* False when the value of an option is wrong. */
static bool read_option(struct shim *s, struct settings *to, int option, const char *value)
{
    unsigned long uid = 0;
    int fd = -1;
    switch (option) {
    case 'a':
        return read_fd(value, &to->agent_fd);
    case 'l':
        return read_fd(value, &to->listen_fd);
    case 'r':
        return read_fd(value, &to->root_fd);
    case 'u':
        to->have_uid = parse_number(value, UINT32_MAX - 1, &uid) == 0;
        s->uid = (uid_t)uid;
        return to->have_uid;
    case 'c':
        return read_fd(value, &to->console_fd);
    case 'k':
        return parse_number(value, 1 << 20, &to->keep_kib) == 0 && to->keep_kib > 0;
    case 'w':
        return read_fd(value, &fd) && watch(s, fd) == 0;
    case 'L':
        return read_log(s, value) == 0;
    default:
        return false;
    }
}

/* Returns -1 if the shim must run, else the exit status. */
static int read_options(int argc, char **argv, struct shim *s, struct settings *to)
{
    static const struct option options[] = {
        {"agent-fd", required_argument, NULL, 'a'},
        {"listen-fd", required_argument, NULL, 'l'},
        {"root-fd", required_argument, NULL, 'r'},
        {"uid", required_argument, NULL, 'u'},
        {"console-fd", required_argument, NULL, 'c'},
        {"console-keep", required_argument, NULL, 'k'},
        {"watch-fd", required_argument, NULL, 'w'},
        {"log-fd", required_argument, NULL, 'L'},
        {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'V'},
        {NULL, 0, NULL, 0},
    };
    bool good = true;
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) >= 0;) {
        if (o == 'h')
            return fputs(usage, stdout) < 0;
        if (o == 'V')
            return puts("vhpc-shim " VHPC_VERSION) < 0;
        good = read_option(s, to, o, optarg) && good;
    }
    if (good && optind == argc && to->agent_fd >= 0 && to->listen_fd >= 0 && to->have_uid)
        return -1;
    (void)fputs(usage, stderr);
    return 2;
}

/* A descriptor for each client, and some for all else: logs, helpers, memory of clients. */
static void set_clients_max(struct shim *s)
{
    enum { OTHERS = RESERVED + 4 * SHIM_WATCHED_MAX };
    struct rlimit files;
    s->clients_max = VHPC_CLIENTS_MAX;
    if (getrlimit(RLIMIT_NOFILE, &files) < 0)
        return;
    files.rlim_cur = files.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_max < VHPC_CLIENTS_MAX + OTHERS)
        s->clients_max = files.rlim_max > 2UL * OTHERS ? files.rlim_max - OTHERS : OTHERS;
}

int main(int argc, char **argv)
{
    static struct shim shim = {.next_session = 1};
    struct settings given = {
        .agent_fd = -1, .listen_fd = -1, .root_fd = -1, .console_fd = -1, .keep_kib = 1024};
    int status = read_options(argc, argv, &shim, &given);
    if (status >= 0)
        return status;
    /* No core files with a user's data in them, and no privileges from a setuid binary. */
    (void)prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    (void)prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    set_clients_max(&shim);
    int rc = open_sources(&shim, given.agent_fd, given.listen_fd, given.root_fd);
    if (rc < 0) {
        (void)fprintf(stderr, "vhpc-shim: cannot start: %s\n", strerror(-rc));
        return 1;
    }
    if (given.console_fd >= 0)
        watch_console(&shim, given.console_fd, given.keep_kib);
    return serve(&shim);
}
