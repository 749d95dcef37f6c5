/* SPDX-License-Identifier: Apache-2.0 */
#include "task.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hello.h"
#include "tlv.h"

enum {
    DRAIN_IDLE_MS = 2000,     /* after the end, a pipe without data for this long is closed */
    PIPE_BYTES = VHPC_WINDOW, /* for a program's output: fewer turns with larger pieces */
    ABORT_KILL_MS = 5000,     /* from the abort signal to SIGKILL */
};

static void send_exit(struct task *t)
{
    struct buf b = {0};
    if (WIFSIGNALED(t->status)) {
        (void)tlv_put_u32(&b, TAG_EXIT_SIGNAL, (uint32_t)WTERMSIG(t->status));
        (void)tlv_put_u32(&b, TAG_CORE, WCOREDUMP(t->status) ? 1 : 0);
    } else {
        (void)tlv_put_u32(&b, TAG_EXIT_CODE, (uint32_t)WEXITSTATUS(t->status));
    }
    if (t->ops->exit_fields != NULL)
        t->ops->exit_fields(t, &b);
    (void)exchange_send_tlv(&t->exchange, VHPC_EXIT, &b);
}

static void send_error(struct task *t, uint32_t kind, int number, const char *text)
{
    struct frame f = {.type = VHPC_ERROR};
    if (flow_check(&t->exchange.flow, FLOW_EXECUTOR, &f) == FLOW_PASS)
        (void)error_send(t->exchange.chan, t->exchange.session, t->exchange.call, kind, number,
                         text);
}

/* Advance the task's end as far as the events so far allow. */
static void finish_if_done(struct task *t)
{
    if (t->finished || !t->reported || !t->reaped || (t->detached && !t->aborted))
        return;
    if (!t->failed && !t->aborted) {
        if (!exchange_inlets_done(&t->exchange))
            return;
        if (t->refusal != NULL)
            send_error(t, VHPC_ERR_REFUSED, t->refusal_number, t->refusal);
        else
            send_exit(t);
    }
    exchange_close(&t->exchange);
    t->finished = true;
}

static void streams_changed(struct exchange *x)
{
    finish_if_done(x->owner);
}

static void close_report(struct task *t)
{
    if (t->report.fd < 0)
        return;
    loop_remove(t->exchange.loop, &t->report);
    (void)close(t->report.fd);
    t->report.fd = -1;
    t->reported = true;
}

static void fail(struct task *t, uint32_t kind, int number, const char *text)
{
    t->failed = true;
    send_error(t, kind, number, text);
    exchange_close(&t->exchange);
}

static void send_started(struct task *t)
{
    struct buf b = {0};
    (void)tlv_put_u32(&b, TAG_PID, (uint32_t)t->pid);
    if (t->ops->signal_group != NULL)
        (void)tlv_put_u32(&b, TAG_SIGNAL_GROUP, 1);
    if (t->ops->started_fields != NULL)
        t->ops->started_fields(t, &b);
    (void)exchange_send_tlv(&t->exchange, VHPC_STARTED, &b);
    t->exchange.live = true;
}

static short report_want(struct source *s)
{
    (void)s;
    return POLLIN;
}

static void report_ready(struct source *s, short revents)
{
    struct task *t = s->owner;
    struct child_report report = {0};
    (void)revents;
    ssize_t n = read(s->fd, &report, sizeof report);
    if (n < 0 && (errno == EINTR || errno == EAGAIN))
        return;
    close_report(t);
    if (n == (ssize_t)sizeof report) {
        report.text[sizeof report.text - 1] = '\0';
        fail(t, VHPC_ERR_EXEC, report.number, report.text);
    } else {
        send_started(t);
    }
    finish_if_done(t);
}

/* --- local ends of the relayed fds ------------------------------------------ */

/* Opens both ends of a pty with the modes of the terminal on the other side; 0 or -errno. */
static int make_pty(const struct execspec *spec, int *master, int *slave)
{
    *master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (*master < 0 || unlockpt(*master) < 0)
        return -errno;
    /* From the master and not by name: the pts file system here may be another one. */
    *slave = ioctl(*master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (*slave < 0)
        return -errno;
    if (geteuid() == 0)
        (void)!fchown(*slave, spec->uid, (gid_t)-1);
    if (spec->has_termios)
        (void)tcsetattr(*slave, TCSANOW, &spec->termios);
    (void)ioctl(*master, TIOCSWINSZ, &spec->winsize);
    return fd_prepare(*master);
}

static int open_pty(struct task *t, const struct execspec *spec, int child[VHPC_FDS_MAX])
{
    int rc = make_pty(spec, &t->master, &child[0]);
    if (rc < 0)
        return rc;
    int input = fcntl(t->master, F_DUPFD_CLOEXEC, 0);
    if (input < 0 || (child[1] = fcntl(child[0], F_DUPFD_CLOEXEC, 0)) < 0)
        return -errno;
    if (spec->fd_dir[2] == 0 && (child[2] = fcntl(child[0], F_DUPFD_CLOEXEC, 0)) < 0)
        return -errno;
    rc = exchange_write_to(&t->exchange, 0, input, LOCALFD_OWN);
    if (rc < 0) {
        (void)close(input);
        return rc;
    }
    t->exchange.outlet[0].tty = true;
    return exchange_read_from(&t->exchange, 1, t->master, LOCALFD_OWN);
}

/* A pty that is only written to, so that the program does not buffer its output. */
static int open_tty_out(struct task *t, const struct execspec *spec, int *child)
{
    int rc = make_pty(spec, &t->master, child);
    return rc < 0 ? rc : exchange_read_from(&t->exchange, STDOUT_FILENO, t->master, LOCALFD_OWN);
}

static int open_pair(struct task *t, const struct execspec *spec, uint8_t number, int *child)
{
    uint8_t dir = spec->fd_dir[number];
    int ends[2], rc;
    if (dir == VHPC_FD_BOTH)
        rc = socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends);
    else
        rc = pipe2(ends, O_CLOEXEC);
    if (rc < 0)
        return -errno;
    int ours = dir == VHPC_FD_IN ? ends[1] : ends[0];
    *child = dir == VHPC_FD_IN ? ends[0] : ends[1];
    /* If the program opens the pipe again, as /dev/stdin and the like, the owner counts. */
    if (dir != VHPC_FD_BOTH && geteuid() == 0)
        (void)!fchown(ours, spec->uid, (gid_t)-1);
    if (dir == VHPC_FD_OUT)
        (void)fcntl(ours, F_SETPIPE_SZ, PIPE_BYTES);
    rc = fd_prepare(ours);
    if (rc == 0 && dir == VHPC_FD_BOTH)
        return exchange_connect(&t->exchange, number, ours);
    if (rc == 0)
        rc = dir == VHPC_FD_OUT ? exchange_read_from(&t->exchange, number, ours, LOCALFD_OWN)
                                : exchange_write_to(&t->exchange, number, ours, LOCALFD_OWN);
    if (rc < 0)
        (void)close(ours);
    return rc;
}

/* One pipe for both, so that the order of the output is kept; the lane of fd 2 ends at once. */
static int join_stderr(int child[VHPC_FDS_MAX])
{
    int copy = fcntl(child[STDOUT_FILENO], F_DUPFD_CLOEXEC, 0);
    if (copy < 0)
        return -errno;
    (void)close(child[STDERR_FILENO]);
    child[STDERR_FILENO] = copy;
    return 0;
}

static int open_fds(struct task *t, const struct execspec *spec, int child[VHPC_FDS_MAX])
{
    int rc = spec->tty ? open_pty(t, spec, child) : 0;
    for (uint8_t i = 0; i < VHPC_FDS_MAX && rc == 0; i++) {
        if (spec->fd_dir[i] == 0 || (spec->tty && i <= STDOUT_FILENO))
            continue;
        if (spec->tty_out && i == STDOUT_FILENO && spec->fd_dir[i] == VHPC_FD_OUT)
            rc = open_tty_out(t, spec, &child[i]);
        else
            rc = open_pair(t, spec, i, &child[i]);
    }
    return rc == 0 && spec->joined && spec->fd_dir[2] == VHPC_FD_OUT ? join_stderr(child) : rc;
}

/* --- life --------------------------------------------------------------------- */

static int spawn(struct task *t, const struct execspec *spec, const int child[VHPC_FDS_MAX])
{
    int report[2];
    if (pipe2(report, O_CLOEXEC) < 0)
        return -errno;
    t->report =
        (struct source){.fd = report[0], .want = report_want, .ready = report_ready, .owner = t};
    int rc = fd_prepare(report[0]);
    if (rc == 0)
        rc = loop_add(t->exchange.loop, &t->report);
    if (rc == 0) {
        int cgroup = t->ops->open_cgroup != NULL ? t->ops->open_cgroup(t) : -1;
        t->pid = child_fork(cgroup, &t->in_cgroup);
        if (t->pid == 0)
            child_run(spec, child, report[1], &t->ops->child, t->arg);
        rc = t->pid < 0 ? -errno : 0;
        if (cgroup >= 0)
            (void)close(cgroup);
    }
    (void)close(report[1]);
    if (rc < 0)
        close_report(t);
    return rc;
}

int task_start(struct task *t, const struct task_ops *ops, void *arg, struct loop *loop,
               struct chan *chan, uint32_t session, uint32_t call, const struct flow *flow,
               const struct execspec *spec)
{
    int child[VHPC_FDS_MAX];
    *t = (struct task){.ops = ops, .arg = arg, .pid = -1, .master = -1, .report.fd = -1};
    exchange_init(&t->exchange, FLOW_EXECUTOR, loop, chan, session, call);
    t->exchange.flow = *flow;
    t->exchange.owner = t;
    for (int i = 0; i < VHPC_FDS_MAX; i++)
        child[i] = -1;
    int rc = spec->tty && (spec->fd_dir[0] != VHPC_FD_IN || spec->fd_dir[1] != VHPC_FD_OUT)
                 ? -EPROTO
                 : open_fds(t, spec, child);
    if (rc == 0)
        rc = spawn(t, spec, child);
    for (int i = 0; i < VHPC_FDS_MAX; i++)
        if (child[i] >= 0)
            (void)close(child[i]);
    t->exchange.changed = streams_changed;
    if (rc < 0) {
        t->pid = -1;
        t->reported = t->reaped = true;
        fail(t, VHPC_ERR_INTERNAL, rc, strerror(-rc));
        finish_if_done(t);
    }
    return t->exchange.chan->closed ? -ENOTCONN : 0;
}

int task_frame(struct task *t, const struct frame *f)
{
    int rc = exchange_receive(&t->exchange, f);
    if (rc <= 0)
        return rc;
    if (f->type == VHPC_SIGNAL) {
        int number = (int)get_le32(f->payload);
        if (t->pid <= 0 || t->reaped)
            return 0;
        if (f->fd == VHPC_TO_GROUP) {
            if (t->ops->signal_group != NULL)
                t->ops->signal_group(t, number);
        } else if (t->ops->signal != NULL)
            t->ops->signal(t, number);
        else
            (void)kill(t->pid, number);
    } else if (f->type == VHPC_WINSIZE) {
        struct winsize size;
        winsize_unpack(f->payload, &size);
        if (t->master >= 0 && t->exchange.inlet[1].open)
            (void)ioctl(t->master, TIOCSWINSZ, &size);
    } else if (f->type == VHPC_CLOSE) {
        task_abort(t);
    }
    return 0;
}

void task_reaped(struct task *t, int status)
{
    t->reaped = true;
    t->status = status;
    t->ops->kill_rest(t);
    finish_if_done(t);
}

void task_refuse(struct task *t, int number, const char *text)
{
    if (t->finished || t->aborted || t->reaped || t->refusal != NULL)
        return;
    t->refusal = text;
    t->refusal_number = number;
    (void)kill(t->pid, SIGKILL);
    t->ops->kill_rest(t);
}

int task_attach(struct task *t, uint32_t session, const struct flow *flow)
{
    t->exchange.session = session;
    t->exchange.flow = *flow;
    t->detached = false;
    send_started(t);
    exchange_repeat_ends(&t->exchange);
    finish_if_done(t);
    return t->exchange.chan->closed ? -ENOTCONN : 0;
}

void task_abort(struct task *t)
{
    if (t->finished || t->aborted)
        return;
    t->aborted = true;
    t->aborted_at = now_ms();
    if (t->pid > 0 && !t->reaped) {
        (void)kill(t->pid, t->ops->abort_signal);
        (void)kill(t->pid, SIGCONT);
    }
    close_report(t);
    exchange_close(&t->exchange);
    if (t->ops->abort_signal == SIGKILL)
        t->ops->kill_rest(t);
    finish_if_done(t);
}

void task_tick(struct task *t, long long now)
{
    if (t->finished)
        return;
    if (t->aborted && !t->reaped && now - t->aborted_at > ABORT_KILL_MS)
        (void)kill(t->pid, SIGKILL);
    if (!t->reaped || !t->reported || !exchange_inlets_idle(&t->exchange)) {
        t->idle_since = 0;
        return;
    }
    /* A process out of our reach keeps the pipe open and writes nothing: do not wait for it. */
    if (t->idle_since == 0)
        t->idle_since = now;
    else if (now - t->idle_since > DRAIN_IDLE_MS)
        exchange_end_inlets(&t->exchange);
}
