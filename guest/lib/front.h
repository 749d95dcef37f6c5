/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The initiator's end of a command: our stdio, our signals, our exit status
 * stand for those of a program somewhere else. vhpc-run is one (the program is
 * in the guest), the command client in the guest is the other (the program is
 * on the host).
 */
#ifndef VHPC_FRONT_H
#define VHPC_FRONT_H

#include "exchange.h"
#include "execspec.h"

enum front_end {
    FRONT_EXITED,      /* value = exit code */
    FRONT_SIGNALED,    /* value = signal */
    FRONT_EXEC_FAILED, /* value = errno, text */
    FRONT_REFUSED,     /* value = errno, text */
    FRONT_INTERNAL,    /* value = errno, text */
    FRONT_LOST,        /* text: the connection ended before the program did */
    FRONT_TIMEOUT,     /* nobody said HELLO in time */
};

struct front_result {
    enum front_end end;
    int value;
    char text[1024];
};

struct front {
    /* Set by the caller before front_run(): */
    const struct execspec *spec;
    int timeout_ms; /* longest wait for the other side's HELLO and for STARTED's EXEC to be taken */
    /* Frames of host calls (call > 0); NULL = there are none. 0 or -errno. */
    int (*call_frame)(struct front *, const struct frame *);
    void (*child_exited)(struct front *);        /* SIGCHLD; NULL = there are no children */
    void (*tick)(struct front *, long long now); /* after every turn of the loop; NULL = none */
    /* A descriptor with numbers of signals that came to our process group, a byte each; -1 = none.
     */
    int group_fd;
    bool ticking; /* tick() has deadlines to watch: turn at least every 200 ms */
    bool watched; /* when we are stopped the other side stops the program: show that we are not */
    void *owner;

    /* Its own: */
    struct loop loop;
    struct chan chan;
    struct exchange exchange;
    struct source signals;
    struct source group;
    bool signals_group; /* the other side can signal a process group */
    struct front_result result;
    long long deadline;
    long long watched_until; /* PINGs are sent until then */
    long long ping_at;
    uint32_t pings_pending;
    enum { FRONT_GREETING, FRONT_ASKED, FRONT_RUNNING, FRONT_FLUSHING, FRONT_DONE } state;
};

/*
 * Connect to the unix socket and stand for the program until it has ended and
 * its output was written. The signals that are passed on stay blocked in this
 * process afterwards.
 */
struct front_result front_run(struct front *f, const char *socket_path);

/*
 * Fill in what this process has and the program shall have too: working
 * directory, umask, limits, environment, terminal when stdin and stdout are one, and
 * which of fds 0-2 are relayed. 0 or -ENOMEM.
 */
int front_describe_self(struct execspec *spec);

/* End this process as the program ended; `who` begins what is printed. */
_Noreturn void front_exit_as(const struct front_result *r, const char *who);

#endif
