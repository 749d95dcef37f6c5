/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The initiator's end of a command: our stdio, signals and exit status represent those of a program
 * that runs elsewhere. vhpc-run uses it (the program runs in the guest), and so does the command
 * client in the guest (the program runs on the host).
 */
#ifndef VHPC_FRONT_H
#define VHPC_FRONT_H

#include <signal.h>

#include "exchange.h"
#include "execspec.h"
#include "front_share.h"

enum front_end {
    FRONT_EXITED,      /* value = exit code */
    FRONT_SIGNALED,    /* value = signal */
    FRONT_EXEC_FAILED, /* value = errno, text */
    FRONT_REFUSED,     /* value = errno, text */
    FRONT_INTERNAL,    /* value = errno, text */
    FRONT_LOST,        /* text: the connection ended before the program did */
    FRONT_TIMEOUT,     /* no HELLO before the deadline */
};

struct front_result {
    enum front_end end;
    int value;
    char text[1024];
    uint64_t oom_kills; /* processes of the program that were killed for memory, if that is new */
    uint64_t had_kib;   /* of memory, that programs had there; 0 = not known */
};

struct front {
    /* Set by the caller before front_run(): */
    const struct execspec *spec;
    int timeout_ms; /* longest wait for HELLO, and for STARTED after EXEC was sent */
    /* Frames of host calls (call > 0); NULL: none are expected. 0 or -errno. */
    int (*call_frame)(struct front *, const struct frame *);
    /* Called with STARTED; may be NULL. */
    void (*started)(struct front *, const struct frame *);
    void (*child_exited)(struct front *);        /* SIGCHLD; NULL: there are no children */
    void (*tick)(struct front *, long long now); /* after each turn of the loop; may be NULL */
    /*
     * A descriptor with the numbers of signals that our process group has received, one byte each;
     * -1: none.
     */
    int group_fd;
    /*
     * Descriptors of this process for those of the program above 2 that spec->fd_dir has; each is a
     * direction of a non-blocking socket.
     */
    struct {
        int from; /* what is read here, the program reads */
        int to;
    } relayed[VHPC_FDS_MAX];
    bool ticking; /* tick() has deadlines: turn at least every 200 ms */
    bool watched; /* the other side stops the program if no PINGs show that we run */
    /* Of exchange.h; NULL: a program whose output has no room gets SIGPIPE. */
    bool (*no_room)(struct exchange *, size_t len, int error);
    void *owner;

    /* Internal: */
    struct loop loop;
    struct chan chan;
    struct exchange exchange;
    struct front_share share;
    struct source signals;
    struct source group;
    long long own_signal_at[NSIG]; /* when this process itself got the signal of this number */
    bool signals_group;            /* the other side can signal a process group */
    struct front_result result;
    long long deadline;
    long long watched_until; /* send PINGs until this time */
    long long ping_at;
    uint32_t pings_pending;
    bool waits;
    enum { FRONT_GREETING, FRONT_ASKED, FRONT_RUNNING, FRONT_FLUSHING, FRONT_DONE } state;
};

/*
 * Connect to the unix socket and represent the program until it has ended and its output is
 * written. The signals that are passed on stay blocked in this process afterwards.
 */
struct front_result front_run(struct front *f, const char *socket_path);

/* Let front_run() return this; to be called from a source of its loop. */
void front_give_up(struct front *f, enum front_end how, int number, const char *why);

/* After a program that was refused: free what front_run() has opened, so that it can be called
 * again. */
void front_forget(struct front *f);

/*
 * After STARTED: no data flows and the command does not end, until it is called with false; or
 * front_give_up() ends the command.
 */
static inline void front_wait(struct front *f, bool waits)
{
    f->waits = waits;
    f->exchange.live = !waits;
}

/*
 * Fill in what the program takes over from this process: working directory, umask, limits,
 * environment, the terminal if stdin and stdout are one, and which of fds 0-2 are relayed. 0 or
 * -ENOMEM.
 */
int front_describe_self(struct execspec *spec);

/* End this process as the program ended; `who` is the prefix of a message. */
_Noreturn void front_exit_as(const struct front_result *r, const char *who);

#endif
