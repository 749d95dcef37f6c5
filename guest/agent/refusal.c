/* SPDX-License-Identifier: Apache-2.0 */
/* The end of a program that has used PMI although it is refused. */
/* Decision: PMI is refused when it is used */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent.h"

/* The tasks of a step have the same line. It is printed once in each guest. */
static void end(struct session *s, int number, const char *text)
{
    struct agent *a = s->agent;
    bool said = a->pmi_said != NULL && strcmp(a->pmi_said, text) == 0;
    if (!s->started || s->task.finished || s->task.refusal != NULL)
        return;
    task_refuse(&s->task, number, said ? "" : text);
    if (said || s->task.refusal == NULL)
        return;
    free(a->pmi_said);
    a->pmi_said = strdup(text);
}

void pmi_used(struct session *s)
{
    end(s, EPERM, s->spec.pmi_refusal);
}

/* Slurm would close the connection, or leave the program waiting, without a word. */
void pmi_refuse(struct session *s, int number, const char *why)
{
    const char *job = execspec_getenv(&s->spec, "SLURM_JOB_ID");
    const char *step = execspec_getenv(&s->spec, "SLURM_STEP_ID");
    if (s->pmi.failure != NULL)
        return;
    if (asprintf(&s->pmi.failure, "step %s.%s %s", job != NULL ? job : "?",
                 step != NULL ? step : "?", why) < 0) {
        s->pmi.failure = NULL;
        return;
    }
    end(s, number, s->pmi.failure);
}

void pmi_not_offered(struct session *s, const char *what)
{
    const char *type = execspec_getenv(&s->spec, "SLURM_MPI_TYPE");
    char why[256];
    (void)snprintf(why, sizeof why,
                   "%s, which is not possible with srun --mpi=%s: start the program with mpirun",
                   what, type != NULL ? type : "...");
    pmi_refuse(s, ECANCELED, why);
}
