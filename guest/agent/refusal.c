/* SPDX-License-Identifier: Apache-2.0 */
/* The end of a program that has used PMI although it is refused. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "agent.h"

/* The tasks of a step have the same line. It is printed once in each guest. */
void pmi_refuse(struct session *s, int number, const char *text)
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
    pmi_refuse(s, EPERM, s->spec.pmi_refusal);
}
