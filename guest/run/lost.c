/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The guest of a task is gone, or its slurmstepd. The tasks of the same step in other guests may
 * wait for this one without end: an MPI program does, and Slurm ends a step by itself only when a
 * whole node fails. So the step is ended as Slurm ends it then.
 */
/* Decision: A guest that ends takes its steps with it */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "child.h"
#include "run.h"

/* A line of the node's state file; the SPANK plugin has the same limit. */
enum { STATE_LINE = 4097 };
enum { EXIT_LOST = 125 };
enum {
    /* All tasks of the guest are here at once; one of them is enough to end the step. */
    TURN_MS = 200,
    TURNS_MAX = 20,
    /* When srun hears that a task was killed, it drops all output that it has not read by then. */
    LINE_MS = 1000,
    SCANCEL_S = 15, /* longer only if slurmctld does not answer */
    TRIES_MAX = 4,
};

extern char **environ;

static bool orphaned;

static short parent_want(struct source *s)
{
    (void)s;
    return POLLIN;
}

static void parent_ready(struct source *s, short revents)
{
    struct front *f = s->owner;
    (void)revents;
    loop_remove(&f->loop, s);
    orphaned = true;
    front_give_up(f, FRONT_LOST, ENOTCONN, "slurmstepd has ended");
}

void run_watch_parent(struct front *f)
{
    static struct source parent;
    long fd = syscall(SYS_pidfd_open, getppid(), 0U); /* since Linux 5.3 */
    if (fd < 0)
        return;
    parent = (struct source){.fd = (int)fd, .want = parent_want, .ready = parent_ready, .owner = f};
    if (loop_add(&f->loop, &parent) < 0)
        (void)close((int)fd);
}

bool run_is_lost(const struct front_result *r)
{
    return r->end == FRONT_LOST || r->end == FRONT_TIMEOUT ||
           (r->end == FRONT_REFUSED && r->value == ENOTCONN);
}

/* --- the line -------------------------------------------------------------------- */

/*
 * Why the node itself has ended this job's guest: then its state file, $VHPC_RUN_STATE, has the
 * status "failed" and a message.
 */
static bool ended_by_node(char *why, size_t size)
{
    static char line[STATE_LINE];
    const char *path = getenv("VHPC_RUN_STATE");
    bool failed = false;
    FILE *file = path != NULL ? fopen(path, "re") : NULL;
    if (file == NULL)
        return false;
    why[0] = '\0';
    while (fgets(line, sizeof line, file) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        if (strcmp(line, "status=failed") == 0)
            failed = true;
        else if (strncmp(line, "message=", strlen("message=")) == 0)
            (void)snprintf(why, size, "%s", line + strlen("message="));
    }
    (void)fclose(file);
    return failed && why[0] != '\0';
}

/* Reports which guest is gone, by what a user knows: job and node. */
static void report(const struct front_result *r, const char *step)
{
    static char why[STATE_LINE];
    char host[256] = "this node";
    const char *job = getenv("SLURM_JOB_ID");
    const char *node = getenv("SLURMD_NODENAME");
    if (ended_by_node(why, sizeof why)) {
        (void)fprintf(stderr, "vhpc: %s\n", why);
        return;
    }
    (void)gethostname(host, sizeof host - 1);
    (void)fprintf(stderr, "vhpc: the guest of job %s on %s %s", job != NULL ? job : "(none)",
                  node != NULL ? node : host,
                  r->end == FRONT_TIMEOUT ? "does not answer" : "is gone");
    if (r->end != FRONT_REFUSED) /* the shim of a guest that was gone before has no reason */
        (void)fprintf(stderr, " (%s)", r->text);
    (void)fprintf(stderr, "%s%s\n", step[0] != '\0' ? "; this ends step " : "", step);
}

/* --- the step -------------------------------------------------------------------- */

static bool is_number(const char *text)
{
    return text != NULL && text[0] != '\0' && strspn(text, "0123456789") == strlen(text);
}

/* As srun reads it. */
static bool no_kill(void)
{
    const char *value = getenv("SLURM_NO_KILL");
    return value != NULL && strcasecmp(value, "off") != 0 && strcasecmp(value, "no") != 0;
}

/* The step whose other tasks must end, as JOB.STEP; empty: none. */
static void step_to_end(const struct run_options *o, char *step, size_t size)
{
    const char *job = getenv("SLURM_JOB_ID"), *id = getenv("SLURM_STEP_ID");
    const char *tasks = getenv("SLURM_STEP_NUM_TASKS");
    step[0] = '\0';
    if (o->script || !is_number(job) || !is_number(id) || !is_number(tasks) ||
        strtoul(tasks, NULL, 10) < 2 || no_kill())
        return;
    int n = snprintf(step, size, "%s.%s", job, id);
    if (n < 0 || (size_t)n >= size)
        step[0] = '\0';
}

/* Whether slurmstepd ends this task before the time is over; front_run() has blocked the signal. */
static bool ended_within(long ms)
{
    struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    return sigtimedwait(&set, NULL, &time) == SIGTERM;
}

/* SCANCEL_* in the job's environment are options of scancel, and may ask a question. */
static void drop_options(void)
{
    for (char **p = environ; *p != NULL;) {
        char name[64];
        size_t len = strcspn(*p, "=");
        if (strncmp(*p, "SCANCEL_", strlen("SCANCEL_")) != 0 || len >= sizeof name) {
            p++;
            continue;
        }
        memcpy(name, *p, len);
        name[len] = '\0';
        if (unsetenv(name) < 0)
            p++;
    }
}

_Noreturn static void run_scancel(const char *path, char *step)
{
    struct child_report unused;
    char *argv[] = {"scancel", "--quiet", step, NULL};
    sigset_t none;
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int i = 0; i <= STDERR_FILENO; i++)
        if (null < 0 || dup2(null, i) < 0)
            _exit(1);
    drop_options();
    sigemptyset(&none);
    (void)sigprocmask(SIG_SETMASK, &none, NULL);
    (void)signal(SIGALRM, SIG_DFL);
    (void)alarm(SCANCEL_S);
    (void)child_execve(argv[0], path, argv, environ, &unused);
    _exit(1);
}

static bool cancel(const char *path, char *step)
{
    int status = -1;
    pid_t pid = fork();
    if (pid == 0)
        run_scancel(path, step);
    while (pid > 0 && waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            return false;
    return status == 0;
}

/*
 * After the time that srun needs for this task's last line. It fails as well if the step has ended:
 * then slurmstepd ends this process, if there is one.
 */
static void end_step(char *step, const struct host_calls *calls)
{
    if (step[0] == '\0' || (!orphaned && ended_within(LINE_MS)))
        return;
    for (int i = 0; i < TRIES_MAX; i++)
        if (cancel(calls->path, step) || orphaned || ended_within(1000L * SCANCEL_S))
            return;
}

int run_end_lost(const struct run_options *o, const struct front_result *r,
                 const struct host_calls *calls)
{
    char step[32];
    const char *local = getenv("SLURM_LOCALID");
    unsigned long turn = is_number(local) ? strtoul(local, NULL, 10) : 0;
    if (r->end == FRONT_LOST && r->value == ECANCELED) /* it was saved, and SIGTERM came */
        return 128 + SIGTERM;
    step_to_end(o, step, sizeof step);
    if (step[0] != '\0' && turn > 0 &&
        ended_within(LINE_MS + TURN_MS * (long)(turn < TURNS_MAX ? turn : TURNS_MAX)))
        return EXIT_LOST;
    report(r, step);
    end_step(step, calls);
    return EXIT_LOST;
}

void run_end_refused(const struct run_options *o, const struct host_calls *calls)
{
    char step[32];
    step_to_end(o, step, sizeof step);
    end_step(step, calls);
}
