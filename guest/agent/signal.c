/* SPDX-License-Identifier: Apache-2.0 */
/* Signals to a session: most go to its main process, those that stop go to all its processes. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent.h"

/*
 * Whether the signal would end or stop the process, because it is not caught and not ignored. A
 * blocked signal counts as well: libc blocks all signals while it forks, as shells do often.
 */
static bool has_default_action(pid_t pid, int number)
{
    static const char *const fields[] = {"SigIgn:", "SigCgt:"};
    char path[64], line[256];
    unsigned long long taken = 0;
    (void)snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return false;
    while (fgets(line, sizeof line, f) != NULL)
        for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++)
            if (strncmp(line, fields[i], strlen(fields[i])) == 0)
                taken |= strtoull(line + strlen(fields[i]), NULL, 16);
    (void)fclose(f);
    return (taken >> (number - 1) & 1) == 0;
}

bool session_freeze(struct session *s)
{
    bool want = s->frozen || s->halted || s->parked || s->telling;
    if (want == s->held)
        return true;
    if (!s->cgroup_made || cgroup_freeze(s->agent, s->number, want) < 0)
        return false;
    s->held = want;
    return true;
}

bool session_park(struct session *s, bool parked)
{
    struct exchange *x = &s->task.exchange;
    s->parked = parked;
    x->live = !parked && !s->task.detached && x->flow.phase == FLOW_RUNNING;
    return session_freeze(s);
}

void session_heard(struct session *s)
{
    if (!s->halted)
        return;
    bool by_cgroup = s->held;
    s->halted = false;
    if (!by_cgroup || !session_freeze(s))
        (void)kill(s->task.pid, SIGCONT);
}

/*
 * Slurm suspends a job by SIGTSTP to each of its processes. In the guest, the kernel would not even
 * stop the main process: its process group is orphaned, because no shell could continue it.
 * Therefore the agent stops and continues the whole session.  SIGSTOP comes from the shim and means
 * that vhpc-run was stopped, even if the program catches SIGTSTP.
 */
void session_signal(struct task *t, int number)
{
    struct session *s = t->arg;
    if (number == SIGSTOP) {
        s->halted = true;
        if (session_freeze(s))
            return;
    } else if (number == SIGCONT) {
        s->frozen = s->halted = false;
        (void)session_freeze(s);
    } else {
        session_heard(s);
    }
    if (number == SIGTSTP && has_default_action(t->pid, number)) {
        s->frozen = true;
        if (session_freeze(s))
            return;
        s->frozen = false;
    }
    (void)kill(t->pid, number);
}

/*
 * A background command of a script gets the signals of the script's process group on the host:
 * scancel --full.
 */
void session_signal_group(struct task *t, int number)
{
    const struct session *s = t->arg;
    cgroup_signal(s->agent, s->number, t->pid, number);
}
