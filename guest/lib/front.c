/* SPDX-License-Identifier: Apache-2.0 */
#include "front.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "hello.h"
#include "tlv.h"
#include "tty.h"

enum { TICK_MS = 200, PINGS_PENDING_MAX = 8, OWN_SIGNAL_MS = 500 };

static const int relayed[] = {SIGHUP,  SIGINT,  SIGQUIT, SIGABRT, SIGUSR1,  SIGUSR2, SIGALRM,
                              SIGTERM, SIGCONT, SIGTSTP, SIGTTIN, SIGURG,   SIGXCPU, SIGVTALRM,
                              SIGPROF, SIGIO,   SIGPWR,  SIGSYS,  SIGSTKFLT};

static void end(struct front *f, enum front_end how, int value, const char *text)
{
    if (f->state == FRONT_FLUSHING || f->state == FRONT_DONE)
        return;
    f->result.end = how;
    f->result.value = value;
    (void)snprintf(f->result.text, sizeof f->result.text, "%s", text);
    f->state = FRONT_FLUSHING;
}

void front_give_up(struct front *f, enum front_end how, int number, const char *why)
{
    end(f, how, number, why);
}

/* --- frames ------------------------------------------------------------------ */

static int ask(struct front *f)
{
    struct buf message = {0};
    int rc = execspec_encode(f->spec, &message);
    if (rc == 0)
        rc = exchange_send_exec(&f->exchange, &message);
    buf_free(&message);
    if (rc == -EMSGSIZE)
        end(f, FRONT_EXEC_FAILED, E2BIG, "execve(): Argument list too long");
    else if (rc < 0)
        return rc;
    else
        f->state = FRONT_ASKED;
    return 0;
}

static int on_hello(struct front *f, const struct frame *frame)
{
    struct hello peer;
    if (f->state != FRONT_GREETING || hello_parse(frame, &peer) < 0)
        return chan_broken(&f->chan, "a malformed or unexpected HELLO");
    if (hello_version(&peer) == 0)
        return chan_broken(&f->chan, "no protocol version in common");
    f->share.offered = peer.shares == 1;
    /* While the guest boots, the shim sends STATE 0, and a second HELLO when the agent is up. */
    return peer.state == VHPC_STATE_UP ? ask(f) : 0;
}

static int on_error(struct front *f, const struct frame *frame)
{
    struct error_info e;
    if (error_parse(frame, &e) < 0)
        return chan_broken(&f->chan, "a malformed ERROR");
    enum front_end how = FRONT_INTERNAL;
    if (e.kind == VHPC_ERR_EXEC)
        how = FRONT_EXEC_FAILED;
    else if (e.kind == VHPC_ERR_REFUSED)
        how = FRONT_REFUSED;
    else if (e.kind == VHPC_ERR_GONE)
        how = FRONT_LOST;
    end(f, how, (int)(e.number & 0xff), e.text);
    return 0;
}

static int on_exit_frame(struct front *f, const struct frame *frame)
{
    struct tlv_reader r = {frame->payload, frame->length};
    struct tlv t;
    uint32_t value = 0;
    bool known = false, by_signal = false;
    while (tlv_next(&r, &t) > 0) {
        if (t.tag == TAG_OOM_KILLS || t.tag == TAG_MEMORY_KIB)
            (void)tlv_u64(&t, t.tag == TAG_OOM_KILLS ? &f->result.oom_kills : &f->result.had_kib);
        if ((t.tag != TAG_EXIT_CODE && t.tag != TAG_EXIT_SIGNAL) || tlv_u32(&t, &value) < 0)
            continue;
        known = true;
        by_signal = t.tag == TAG_EXIT_SIGNAL;
    }
    if (!known || value > 255 || (by_signal && (value < 1 || value > 64)))
        return chan_broken(&f->chan, "a malformed EXIT");
    end(f, by_signal ? FRONT_SIGNALED : FRONT_EXITED, (int)value, "");
    return 0;
}

/* An agent names the features that it supports in STARTED. */
static bool names(const struct frame *frame, uint16_t tag)
{
    struct tlv t;
    return tlv_find(frame->payload, frame->length, tag, &t);
}

static int on_started(struct front *f, const struct frame *frame)
{
    if (f->spec->pmi_refusal != NULL && !names(frame, TAG_PMI_REFUSAL)) {
        end(f, FRONT_REFUSED, ENOSYS,
            "the agent of the image is too old to detect that a program uses PMI; rebuild the "
            "image, or see VHPC_PMI in vhpc-spank(8)");
        return 0;
    }
    f->signals_group = names(frame, TAG_SIGNAL_GROUP);
    f->state = FRONT_RUNNING;
    f->exchange.live = true;
    if (f->started != NULL)
        f->started(f, frame);
    if (f->spec->tty)
        (void)tty_raw(STDIN_FILENO);
    return 0;
}

static int on_frame(struct chan *c, const struct frame *frame)
{
    struct front *f = c->owner;
    if (frame->session != 0)
        return chan_broken(c, "a session number from a client");
    if (frame->type == VHPC_HELLO)
        return on_hello(f, frame);
    if (frame->type == VHPC_PONG && f->pings_pending > 0) {
        f->pings_pending--;
        return 0;
    }
    if (frame->call != 0 && f->call_frame != NULL)
        return f->call_frame(f, frame);
    if (frame->call != 0)
        return chan_broken(c, "an unexpected host call");
    /* The shim may end the command at any time, also before we have sent anything. */
    if (frame->type == VHPC_ERROR && f->exchange.flow.phase < FLOW_ASKED)
        return on_error(f, frame);
    struct frame said = *frame;
    int rc = front_share_frame(&f->share, &f->exchange, &said);
    if (rc > 0)
        rc = exchange_receive(&f->exchange, &said);
    if (rc == -EPROTO)
        return chan_broken(c, f->exchange.flow.why);
    if (rc <= 0)
        return rc;
    switch (frame->type) {
    case VHPC_STARTED:
        return on_started(f, frame);
    case VHPC_EXIT:
        return on_exit_frame(f, frame);
    default:
        return on_error(f, frame);
    }
}

static void on_close(struct chan *c, int error)
{
    char text[256];
    (void)snprintf(text, sizeof text, "%s", "channel closed");
    if (error == -EPROTO)
        (void)snprintf(text, sizeof text, "protocol violation: %s",
                       c->why != NULL ? c->why : "malformed message");
    else if (error < 0 && error != -EPIPE && error != -ECONNRESET)
        (void)snprintf(text, sizeof text, "channel closed: %s", strerror(-error));
    end(c->owner, FRONT_LOST, 0, text);
}

/* --- signals ----------------------------------------------------------------- */

static void pass_on(struct front *f, int number)
{
    uint8_t raw[4];
    f->own_signal_at[number] = now_ms();
    if (f->state == FRONT_GREETING) {
        /* Nothing runs yet: end as any program would. */
        if (number != SIGCONT && number != SIGURG && number != SIGTSTP && number != SIGTTIN)
            end(f, FRONT_SIGNALED, number, "");
        return;
    }
    put_le32(raw, (uint32_t)number);
    (void)exchange_send(&f->exchange, VHPC_SIGNAL, 0, 0, raw, sizeof raw);
    if (number == SIGTSTP && f->watched)
        f->watched_until = now_ms() + VHPC_WATCH_MS;
    else if (number == SIGCONT)
        f->watched_until = 0;
}

/* Slurm stops a job's processes soon after SIGTSTP. Then we are silent, and the shim detects it. */
static bool show_life(struct front *f, long long now)
{
    struct frame ping = {.type = VHPC_PING};
    bool last = now >= f->watched_until;
    if (f->watched_until == 0 || f->state == FRONT_FLUSHING)
        return false;
    /* A last PING in any case: if we were slow, the program may be stopped now. */
    if (last || (now >= f->ping_at && f->pings_pending < PINGS_PENDING_MAX)) {
        f->ping_at = now + TICK_MS;
        f->pings_pending++;
        (void)chan_send(&f->chan, &ping);
    }
    if (last)
        f->watched_until = 0;
    return !last;
}

static void window_changed(struct front *f)
{
    struct winsize size;
    uint8_t raw[8];
    if (!f->spec->tty || ioctl(STDIN_FILENO, TIOCGWINSZ, &size) < 0 || f->state == FRONT_GREETING)
        return;
    winsize_pack(raw, &size);
    (void)exchange_send(&f->exchange, VHPC_WINSIZE, 0, 0, raw, sizeof raw);
}

static short signals_want(struct source *s)
{
    (void)s;
    return POLLIN;
}

static void signals_ready(struct source *s, short revents)
{
    struct front *f = s->owner;
    struct signalfd_siginfo info;
    (void)revents;
    while (read(s->fd, &info, sizeof info) == (ssize_t)sizeof info) {
        if (info.ssi_signo == SIGCHLD && f->child_exited != NULL)
            f->child_exited(f);
        else if (info.ssi_signo == SIGWINCH)
            window_changed(f);
        else if (info.ssi_signo != SIGCHLD)
            pass_on(f, (int)info.ssi_signo);
    }
}

/*
 * A signal to the group is also one to us, and the main process must get it first: a shell whose
 * command ends before the shell has its signal continues with the next command. But Slurm may
 * signal one process after the other, children first (proctrack/linuxproc).
 */
static void await_own_signal(struct front *f, int number)
{
    struct pollfd own = {.fd = f->signals.fd, .events = POLLIN};
    long long begin = now_ms(), until = begin + OWN_SIGNAL_MS;
    signals_ready(&f->signals, POLLIN);
    for (long long now; (now = now_ms()) < until;) {
        if (f->own_signal_at[number] > begin - OWN_SIGNAL_MS)
            return;
        if (poll(&own, 1, (int)(until - now)) > 0)
            signals_ready(&f->signals, POLLIN);
    }
}

/* We cannot tell a signal to us from one to our group, so another process of the group tells us. */
static void group_ready(struct source *s, short revents)
{
    struct front *f = s->owner;
    uint8_t number[64], raw[4];
    (void)revents;
    ssize_t n = read(s->fd, number, sizeof number);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0)
        loop_remove(&f->loop, s);
    for (ssize_t i = 0; i < n && f->signals_group; i++) {
        if (number[i] < NSIG)
            await_own_signal(f, number[i]);
        put_le32(raw, number[i]);
        (void)exchange_send(&f->exchange, VHPC_SIGNAL, VHPC_TO_GROUP, 0, raw, sizeof raw);
    }
}

static int open_signals(struct front *f)
{
    sigset_t set, blocked;
    sigemptyset(&set);
    for (size_t i = 0; i < sizeof relayed / sizeof relayed[0]; i++)
        sigaddset(&set, relayed[i]);
    sigaddset(&set, SIGCHLD);
    sigaddset(&set, SIGWINCH);
    blocked = set;
    /* Restoring a terminal from the background must not stop us. */
    sigaddset(&blocked, SIGTTOU);
    (void)signal(SIGPIPE, SIG_IGN);
    (void)signal(SIGXFSZ, SIG_IGN);
    if (sigprocmask(SIG_BLOCK, &blocked, NULL) < 0)
        return -errno;
    f->signals = (struct source){.want = signals_want, .ready = signals_ready, .owner = f};
    f->signals.fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (f->signals.fd < 0)
        return -errno;
    if (f->group_fd >= 0) {
        f->group = (struct source){.want = signals_want, .ready = group_ready, .owner = f};
        f->group.fd = f->group_fd;
        int rc = loop_add(&f->loop, &f->group);
        if (rc < 0)
            return rc;
    }
    return loop_add(&f->loop, &f->signals);
}

/* --- the whole --------------------------------------------------------------- */

static int open_channel(struct front *f, const char *path)
{
    struct hello me;
    int fd = fd_connect(path);
    if (fd < 0)
        return fd;
    int rc = fd_prepare(fd);
    if (rc == 0)
        rc = chan_open(&f->chan, &f->loop, fd);
    if (rc < 0) {
        (void)close(fd);
        return rc;
    }
    f->chan.on_frame = on_frame;
    f->chan.on_close = on_close;
    f->chan.owner = f;
    hello_init(&me);
    return hello_send(&f->chan, &me);
}

static int open_streams(struct front *f)
{
    int rc = 0;
    exchange_init(&f->exchange, FLOW_INITIATOR, &f->loop, &f->chan, 0, 0);
    f->exchange.no_room = f->no_room;
    for (uint8_t i = 0; i <= STDERR_FILENO && rc == 0; i++) {
        if (f->spec->fd_dir[i] & VHPC_FD_IN)
            rc = exchange_read_from(&f->exchange, i, i, LOCALFD_SHARED);
        else if (f->spec->fd_dir[i] & VHPC_FD_OUT)
            rc = exchange_write_to(&f->exchange, i, i, LOCALFD_SHARED);
    }
    for (uint8_t i = STDERR_FILENO + 1; i < VHPC_FDS_MAX && rc == 0; i++) {
        if (f->spec->fd_dir[i] & VHPC_FD_IN)
            rc = exchange_read_from(&f->exchange, i, f->relayed[i].from, LOCALFD_OWN);
        if (rc == 0 && (f->spec->fd_dir[i] & VHPC_FD_OUT))
            rc = exchange_write_to(&f->exchange, i, f->relayed[i].to, LOCALFD_OWN);
    }
    return rc;
}

static void serve(struct front *f)
{
    while (f->state != FRONT_DONE) {
        bool bounded = f->state == FRONT_GREETING || f->ticking || show_life(f, now_ms());
        int rc = loop_once(&f->loop, bounded ? TICK_MS : -1);
        if (rc < 0)
            end(f, FRONT_INTERNAL, -rc, "poll failed");
        if (f->tick != NULL)
            f->tick(f, now_ms());
        if (f->state == FRONT_GREETING && now_ms() > f->deadline)
            end(f, FRONT_TIMEOUT, ETIMEDOUT, "the guest does not answer");
        /* In any case, first write the output that the program has produced. */
        if (f->state == FRONT_FLUSHING && !f->waits && exchange_outlets_done(&f->exchange))
            f->state = FRONT_DONE;
    }
}

struct front_result front_run(struct front *f, const char *socket_path)
{
    f->state = FRONT_GREETING;
    f->deadline = now_ms() + f->timeout_ms;
    int rc = open_signals(f);
    if (rc < 0) {
        end(f, FRONT_INTERNAL, -rc, strerror(-rc));
    } else if ((rc = open_channel(f, socket_path)) < 0) {
        char text[300];
        (void)snprintf(text, sizeof text, "cannot connect to %.200s: %s", socket_path,
                       strerror(-rc));
        end(f, FRONT_LOST, -rc, text);
    } else if ((rc = open_streams(f)) < 0) {
        end(f, FRONT_INTERNAL, -rc, strerror(-rc));
    } else {
        serve(f);
    }
    tty_restore();
    return f->result;
}

void front_forget(struct front *f)
{
    /* The streams stay open: nothing was relayed yet, and the next try needs them. */
    chan_release(&f->chan);
    loop_remove(&f->loop, &f->signals);
    if (f->signals.fd >= 0)
        (void)close(f->signals.fd);
    loop_free(&f->loop);
}
