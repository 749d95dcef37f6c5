/* SPDX-License-Identifier: Apache-2.0 */
#include "usage.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "readtext.h"

void usage_set(struct usage *u, enum usage_figure figure, uint64_t value)
{
    u->has |= 1u << figure;
    u->value[figure] = value;
}

/* --- files of a cgroup ------------------------------------------------------------ */

static bool read_file(const char *folder, const char *name, char *out, size_t size)
{
    char path[4200];
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    return read_text(path, out, size) >= 0;
}

/* The value of "KEY VALUE" lines. */
static void take(struct usage *u, enum usage_figure figure, const char *text, const char *key)
{
    size_t len = strlen(key);
    uint64_t value;
    for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, key, len) == 0 && line[len] == ' ' &&
            text_is_number(line + len + 1, 10, UINT64_MAX, &value))
            usage_set(u, figure, value);
    }
}

/* "MAJOR:MINOR rbytes=N wbytes=N ..." of each device that was used. */
static uint64_t sum_of(const char *text, const char *key)
{
    uint64_t sum = 0, value;
    for (const char *at = text; (at = strstr(at, key)) != NULL;) {
        at += strlen(key);
        if (text_number(&at, 10, '\0', &value))
            sum += value;
    }
    return sum;
}

void usage_read(const char *folder, struct usage *u)
{
    static char text[65536]; /* io.stat has a line for each device */
    uint64_t peak;
    *u = (struct usage){0};
    if (read_file(folder, "cpu.stat", text, sizeof text)) {
        take(u, USAGE_CPU, text, "usage_usec");
        take(u, USAGE_USER, text, "user_usec");
        take(u, USAGE_SYSTEM, text, "system_usec");
    }
    if (read_file(folder, "memory.peak", text, sizeof text) &&
        text_is_number(text, 10, UINT64_MAX, &peak))
        usage_set(u, USAGE_PEAK, peak);
    if (read_file(folder, "memory.events", text, sizeof text))
        take(u, USAGE_OOM, text, "oom_kill");
    if (read_file(folder, "io.stat", text, sizeof text)) {
        usage_set(u, USAGE_READ, sum_of(text, " rbytes="));
        usage_set(u, USAGE_WRITTEN, sum_of(text, " wbytes="));
    }
}

/* --- steps ------------------------------------------------------------------------ */

/* Names are numbers and Slurm's words. */
static bool is_name(const char *name)
{
    size_t len = name != NULL ? strlen(name) : 0;
    return len > 0 && len < USAGE_NAME_MAX &&
           strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789+") == len;
}

struct step_usage *usage_step(struct usage_table *t, const char *name)
{
    const char *wanted = is_name(name) ? name : USAGE_OTHER;
    for (size_t i = 0; i < t->count; i++)
        if (strcmp(t->step[i].name, wanted) == 0)
            return &t->step[i];
    if (t->count == USAGE_STEPS_MAX)
        return &t->step[USAGE_STEPS_MAX - 1];
    if (t->count == USAGE_STEPS_MAX - 1) {
        /* The last place is for all others. */
        wanted = USAGE_OTHER;
        for (size_t i = 0; i < t->count; i++)
            if (strcmp(t->step[i].name, wanted) == 0)
                return &t->step[i];
    }
    struct step_usage *step = &t->step[t->count++];
    *step = (struct step_usage){0};
    (void)snprintf(step->name, sizeof step->name, "%s", wanted);
    return step;
}

static uint64_t sum(uint64_t a, uint64_t b)
{
    return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

void usage_add(struct step_usage *step, const struct usage *one)
{
    struct usage *all = &step->usage;
    all->has = step->tasks == 0 ? one->has : all->has & one->has;
    for (size_t i = 0; i < USAGE_FIGURES; i++) {
        uint64_t value = one->has & 1u << i ? one->value[i] : 0;
        if (i != USAGE_RSS)
            all->value[i] = sum(all->value[i], value);
        else if (value > all->value[i])
            all->value[i] = value;
    }
    step->tasks++;
}
