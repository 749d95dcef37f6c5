/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vhpc-agent: the guest's end of the channel.
 *
 * Each client of the host has a session. A session runs one program in a cgroup of its own, or
 * carries root's control operations. The agent is one process that runs as guest root, with one
 * poll loop that never blocks elsewhere.
 */
#ifndef VHPC_AGENT_H
#define VHPC_AGENT_H

#include <netinet/in.h>

#include "chan.h"
#include "gpus.h"
#include "hello.h"
#include "mark.h"
#include "pmirecord.h"
#include "pmiwatch.h"
#include "task.h"
#include "usage.h"

struct agent;

/* pmi.c, pmix.c: PMI of a session's program. */
struct session_pmi {
    struct source source;   /* our end of PMI_FD, if it is not relayed; fd -1: none */
    int child;              /* the program's end, until the program has started; -1: none */
    struct source listener; /* for PMIx; fd -1: none */
    char *failure;          /* why its program was ended */
    bool judged;            /* STARTED says that a use of PMI is detected */
    bool directory;         /* it uses the directory of its step */
    uint8_t number;         /* PMI_FD, if it is relayed; 0: it is not */
    struct pmiwatch watch;  /* what the program asks there */
    struct pmirecord record;
    bool fenced; /* step_mark.fences is set */
};

/* hold.c: the state of a hold. */
enum hold_phase {
    HOLD_NONE,
    HOLD_WAITING,  /* for what is in the way */
    HOLD_PREPARED, /* nothing begins; programs run */
    HOLD_STEPS,    /* until the steps have ended on the host */
    HOLD_FREEZING, /* until all processes are stopped */
    HOLD_DRAINING, /* until the host has written the output */
    HOLD_HELD,
};

struct hold {
    enum hold_phase phase;
    uint64_t serial;           /* of the last hold that this guest was prepared for */
    uint64_t next_serial;      /* of the one that it is being prepared for: it is higher */
    uint32_t session, request; /* that wait for the answer */
    bool left;                 /* their client is gone: a hold that is not complete ends */
    long long until, next;     /* ms: its end, and the next attempt */
    char why[256];             /* what is in the way, one clause */
};

struct session {
    struct session *next;
    struct agent *agent;
    uint32_t id;            /* on the channel, whose next connection numbers from 1 again */
    uint32_t number;        /* of this agent, never twice: names its cgroup */
    struct message exec;    /* EXEC being received */
    struct message request; /* REQUEST being received */
    struct flow flow;       /* of the command, until the task takes it over */
    struct execspec spec;
    struct execspec now;   /* EXEC of the client that has taken the program over last, or empty */
    struct step_mark mark; /* of a task that a checkpoint can detach */
    struct task task;
    bool started;        /* task is in use */
    bool closed;         /* the host has sent CLOSE, or is disconnected */
    bool script_written; /* to be removed at the end */
    bool cgroup_made;
    bool starts_there; /* in the agent's start_dir */
    bool frozen;       /* by a SIGTSTP, until SIGCONT */
    bool halted;       /* by a SIGSTOP, until any other frame of the client */
    bool parked;       /* by a hold, until its end or until it is attached */
    bool telling;      /* ... until its new PMIx server knows it */
    bool held;         /* the cgroup is frozen */
    bool waiting;      /* its EXEC is complete, and starts at the end of a hold */
    bool counted;      /* what it used is in the agent's table */
    uint64_t max_rss;  /* bytes, of its largest process that has ended; 0 = none has */
    uint32_t last_call;
    uint32_t links; /* link.h: connections that are relayed */
    struct session_pmi pmi;
    struct x11_server *x11; /* NULL = none */
    int x11_error;          /* errno: why the display that the EXEC names is not served */
};

struct link;            /* link.h */
struct pmix_connection; /* pmix.c */
struct x11_server;      /* x11.c */
struct fabric;          /* fabric.h */
struct ib_want;
struct reach;   /* reach.h */
struct cluster; /* cluster.h */
struct caller;  /* hostcall.c: a command client in this guest */

struct agent {
    struct loop loop;
    struct chan host;
    bool host_open;
    bool system; /* may change the machine: mounts, accounts, power-off (not in tests) */
    bool is_init;
    bool stopping;
    bool powering_off; /* ... after the reply was sent */
    struct hello hello;
    struct session *sessions;
    uint32_t last_session; /* number */
    uint64_t id;           /* random, not 0 */
    struct hold hold;
    struct step_tasks tasks;
    struct source signals;
    struct source listener; /* call socket */
    const char *call_socket;
    struct caller *callers;
    const char *sysfs;          /* where sysfs is mounted */
    struct fabric *fabric;      /* the job's InfiniBand ports; NULL = none */
    const char *topology_file;  /* for NCCL */
    bool has_topology;          /* it was written */
    char *interface;            /* of the job's network; NULL = the job has none */
    char *nodelist;             /* names of the job's guests; NULL = the job has no network */
    char *host_names;           /* the same with spaces, of any length; NULL = no host files */
    struct cluster *cluster;    /* that this guest is in; NULL = none */
    const char *cluster_folder; /* for the lists of its guests; NULL = they are not written */
    struct in_addr job_ipv4;    /* of this guest on the network of the job */
    struct in6_addr job_ipv6;
    bool keepalive;              /* connections on this network have it: keepalive.h */
    struct ssh *ssh;             /* sshd's connections; NULL = none */
    struct image_env *image_env; /* imageenv.h, with the user's variables */
    bool has_user_env;           /* they are in it */
    char *start_dir;             /* of programs that enter the guest; NULL = that of the EXEC */
    struct reach *reach;         /* a reach request that is waiting; NULL = none */
    struct link *links;
    struct pmix_connection *pmix;
    struct x11_server *displays;
    char *pmi_said; /* the last refusal that was sent: tasks of a step have the same */
    char *cgroup;   /* parent directory of the sessions' cgroups; NULL = no cgroup v2 */
    struct usage_table usage;
    uint64_t memory_mib; /* memory.h: that programs can use; 0 = no program has started */
    struct gpus gpus;
    pid_t locks; /* process of locks.h; 0 = none */
};

/* Whether nothing new may begin: no program, and no command or connection on the host. */
static inline bool hold_is_quiet(const struct agent *a)
{
    return a->hold.phase >= HOLD_PREPARED;
}

/* host.c */
int host_open(struct agent *a, int fd, bool port);

/* emulation.c: CPUID names QEMU's emulation (TCG); else a real CPU runs this guest. */
bool is_emulated(void);

/*
 * session_list.c: a session that is not closed, by its id on the channel or by its number, or NULL;
 * a new session, or NULL
 */
struct session *session_find(const struct agent *a, uint32_t id);
struct session *session_numbered(const struct agent *a, uint32_t number);
struct session *session_add(struct agent *a, uint32_t id);

/* session.c: life of a session */
int session_exec(struct session *s, const struct frame *f);
/* Start the program of an EXEC that is complete; 0 or -errno. */
int session_begin(struct session *s);
/*
 * attach.c: the session's EXEC takes over the detached program that it names, or its client gets an
 * error. 0 or -errno.
 */
int session_attach(struct session *s);
/*
 * attach.c: before a task with a mark starts. 1: its srun was issued again: the task was taken
 * over, or had ended, or cannot be taken over, and the host knows; 0: it must start; or -errno.
 */
int session_take_task(struct session *s);
void session_close(struct session *s);
void sessions_reap(struct agent *a);
/*
 * Handles deadlines and frees finished sessions, between two turns of the loop. True while it has
 * to be called again soon.
 */
bool sessions_tick(struct agent *a, long long now);

/* cgroup.c */
void cgroup_init(struct agent *a);
int cgroup_make(const struct agent *a, uint32_t session, uid_t uid, gid_t gid);
/* Its directory, or -1. */
int cgroup_open(const struct agent *a, uint32_t session);
/* In the child: enter the session's cgroup. */
int cgroup_enter(const struct agent *a, uint32_t session);
/* Stop or continue all processes of the session; 0 or -errno. */
int cgroup_freeze(const struct agent *a, uint32_t session, bool frozen);
/* The same for programs that ssh starts, now and later. */
int cgroup_freeze_login(const struct agent *a, bool frozen);
/* Whether all processes of the session, or of ssh (0), are stopped. */
bool cgroup_is_frozen(const struct agent *a, uint32_t session);
/* Signal the processes of a process group in the session, but not its leader. */
void cgroup_signal(const struct agent *a, uint32_t session, pid_t leader, int number);
/* Kill every process of the session, with or without cgroups. */
void cgroup_kill(const struct agent *a, uint32_t session, pid_t leader);
/* The directory of a session's cgroup. */
void cgroup_path(const struct agent *a, uint32_t session, char *out, size_t size);
/* In the child: enter the cgroup of programs that ssh starts, which belong to no session. */
void cgroup_enter_login(const struct agent *a);
void cgroup_login_path(const struct agent *a, char *out, size_t size);
/* Remove the cgroups of this agent. */
void cgroup_end(struct agent *a);
/* 0 if the cgroup is removed, -EBUSY while it is not empty. */
int cgroup_remove(const struct agent *a, uint32_t session);
/* The session that a process of this guest belongs to; 0 = none. */
uint32_t cgroup_session_of(const struct agent *a, pid_t pid);

/* privilege.c: operations of a session's child */
extern const struct task_ops session_ops;

/*
 * signal.c: delivers a signal of the host; then, handles a frame that shows that vhpc-run is not
 * stopped.
 */
void session_signal(struct task *t, int number);
void session_signal_group(struct task *t, int number);
void session_heard(struct session *s);
/* Stop or continue its processes, after a change of what stops them; false if that fails. */
bool session_freeze(struct session *s);
/*
 * For a hold: stop its processes, and what they write from now on stays in their pipes; or let
 * both continue. False: they cannot be stopped.
 */
bool session_park(struct session *s, bool parked);

/*
 * pmi.c: end the program with spec.pmi_refusal if it uses PMI; the line is dropped if it does not
 * apply to this guest. 0, or -errno if the use of PMI cannot be detected. pmi_place() is called in
 * the child, pmi_started() after the fork.
 */
int pmi_guard(struct session *s);
int pmi_place(const struct session *s);
void pmi_started(struct session *s);
/* Watch what the program asks of a PMI_FD that is relayed; to be called after task_start(). */
void pmi_watch(struct session *s);
void pmi_unguard(struct session *s);
/* refusal.c: the program has used PMI that is refused: end it. */
void pmi_used(struct session *s);
/*
 * End the program with a line "step JOB.STEP ..." that says what it has done. The number is EPERM,
 * or ECANCELED if the other tasks of the step may wait for this one.
 */
void pmi_refuse(struct session *s, int number, const char *why);
/* The same for something that no server of Slurm offers, such as "calls MPI_Comm_spawn". */
void pmi_not_offered(struct session *s, const char *what);

/* script.c: a batch script, at the path that it has on the host */
int script_write(const struct execspec *spec, bool *written);
void script_remove(const struct execspec *spec);

/* control.c: REQUEST */
int control_request(struct session *s, const struct buf *message);

/*
 * fabric.c: start to wait for the job's ports (0: the reply follows; or -errno with one line in
 * text), continue between two turns of the loop, and stop when the client has disconnected.
 */
int fabric_ask(struct session *s, uint32_t request, const struct ib_want *want, uint32_t wait_ms,
               char *text, size_t size);
int fabric_tick(struct agent *a, long long now, bool *work);
void fabric_forget(struct agent *a, const struct session *s);

/* identity.c, mount.c, disk.c, bind.c, environment.c: 0, or -errno with one line in text */
struct identity;
int identity_apply(const struct agent *a, const struct identity *id, char *text, size_t size);
int mount_share(const struct agent *a, const char *tag, const char *path, bool read_only,
                char *text, size_t size);
/* Mount the guest's disk at a directory, for this user. */
int mount_disk(const struct agent *a, const char *path, uint32_t uid, uint32_t gid, char *text,
               size_t size);

/*
 * Add the user's variables to those of the image, and set the directory in which programs start
 * (NULL: none); a second time it does nothing.
 */
int environment_set(struct agent *a, const struct buf *list, const char *start_dir, char *text,
                    size_t size);
/* Have a program that enters the guest start in that directory; 0 or -ENOMEM. */
int environment_start(struct session *s);
/* Mount a folder of a share at a second directory, if this user can open it. */
int bind_folder(const struct agent *a, const struct identity *user, const char *source,
                const char *path, bool read_only, char *text, size_t size);

/* hostcall.c: command clients of this guest */
int callers_listen(struct agent *a);
int caller_frame(struct session *s, const struct frame *f);
void callers_close(struct agent *a, const struct session *s);
void callers_sweep(struct agent *a);
/* Host calls of the session, including its links. */
uint32_t calls_alive(const struct session *s);

/* system.c, port.c */
/* Make "/" writable if the image's init has made it read-only. */
void system_open_root(void);
void system_mount_all(void);
/*
 * The absolute path that a word of the kernel command line gives, such as "vhpc.agent.disk=". False
 * if there is no such word, or the path does not fit.
 */
bool system_parameter(const char *word, char *path, size_t size);
/* Have the kernel kill a program that uses up the memory soon; for a guest's own agent. */
void system_prevent_thrashing(void);
/* Let programs have as many open files and processes as on a node. */
void system_raise_numbers(void);
_Noreturn void system_poweroff(void);
/*
 * Open the agent's virtio-serial port; waits for the port and for the host. -EINTR when the agent
 * has to stop.
 */
int port_open(struct agent *a, const char *path);
/* Path of the virtio-serial port with this name; false: there is none. */
bool port_find(const char *name, char *path, size_t size);

/*
 * sbcast.c: the arguments of the srun that does what this sbcast asks for, with standard input set
 * up; NULL if the host's own sbcast has to do it. Exits if neither is possible.
 */
char **sbcast_as_srun(int argc, char **argv);

/* command.c: this binary under another name */
_Noreturn void command_main(int argc, char **argv, const char *name);

#endif
