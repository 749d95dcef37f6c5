/* SPDX-License-Identifier: Apache-2.0 */
/* The end of a program that has used PMI although it is refused. */
#include <stdlib.h>
#include <string.h>

#include "agent.h"

/* The tasks of a step have the same line. It is printed once in each guest. */
void pmi_used(struct session *s)
{
    struct agent *a = s->agent;
    bool said = a->pmi_said != NULL && strcmp(a->pmi_said, s->spec.pmi_refusal) == 0;
    if (!s->started || s->task.finished || s->task.refusal != NULL)
        return;
    task_refuse(&s->task, said ? "" : s->spec.pmi_refusal);
    if (said || s->task.refusal == NULL)
        return;
    free(a->pmi_said);
    a->pmi_said = strdup(s->spec.pmi_refusal);
}
