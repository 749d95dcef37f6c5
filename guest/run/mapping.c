/* SPDX-License-Identifier: Apache-2.0 */
#include "mapping.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct block {
    uint32_t first; /* node */
    uint32_t count; /* of nodes */
    uint32_t tasks; /* of each node */
};

/* A text that is being read. */
struct reader {
    const char *at;
    const char *end;
};

static bool take(struct reader *r, const char *word)
{
    size_t len = strlen(word);
    if ((size_t)(r->end - r->at) < len || memcmp(r->at, word, len) != 0)
        return false;
    r->at += len;
    return true;
}

static bool take_number(struct reader *r, uint32_t *value)
{
    const char *begin = r->at;
    *value = 0;
    while (r->at < r->end && *r->at >= '0' && *r->at <= '9' && *value <= MAPPING_TASKS_MAX)
        *value = *value * 10 + (uint32_t)(*r->at++ - '0');
    return r->at > begin && *value <= MAPPING_TASKS_MAX;
}

/* 1: a block; 0: the mapping is over; -1: this is not a mapping of so many tasks. */
static int take_block(struct reader *r, uint32_t tasks, struct block *b)
{
    if (take(r, ")"))
        return 0;
    if (!take(r, ",(") || !take_number(r, &b->first) || !take(r, ",") ||
        !take_number(r, &b->count) || !take(r, ",") || !take_number(r, &b->tasks) || !take(r, ")"))
        return -1;
    /* A node of a step has a task, so nodes have smaller numbers than there are tasks. */
    if (b->count == 0 || b->tasks == 0 || b->first >= tasks || b->count > tasks - b->first ||
        b->tasks > tasks / b->count)
        return -1;
    return 1;
}

static struct reader open_text(const char *text, size_t len)
{
    struct reader r = {.at = text, .end = text + len};
    if (!take(&r, "(vector"))
        r.end = r.at;
    return r;
}

/* Count the tasks of each node; false if this is not a mapping of so many tasks. */
static bool count_tasks(const char *text, size_t len, uint32_t tasks, uint32_t *on_node)
{
    struct reader r = open_text(text, len);
    struct block b;
    uint32_t total = 0;
    int more;
    while ((more = take_block(&r, tasks, &b)) > 0) {
        if (b.count * b.tasks > tasks - total)
            return false;
        total += b.count * b.tasks;
        for (uint32_t i = 0; i < b.count; i++)
            on_node[b.first + i] += b.tasks;
    }
    return more == 0 && total == tasks && r.at == r.end;
}

/* A mapping that is being written. */
struct writer {
    char *out;
    size_t len;
    bool full;
    struct block open; /* not written yet; count 0: none */
    uint32_t node;     /* of the last task */
    uint32_t tasks;    /* how many came for it one after another; 0: none */
};

static void append(struct writer *w, const char *text)
{
    size_t len = strlen(text);
    /* One byte is kept for the last parenthesis. */
    if (w->full || len >= MAPPING_TEXT_MAX - w->len) {
        w->full = true;
        return;
    }
    memcpy(w->out + w->len, text, len);
    w->len += len;
}

static void write_block(struct writer *w)
{
    char text[48];
    if (w->open.count == 0)
        return;
    (void)snprintf(text, sizeof text, ",(%u,%u,%u)", w->open.first, w->open.count, w->open.tasks);
    append(w, text);
}

/* All tasks of this run have come: it extends the open block, or begins another one. */
static void end_run(struct writer *w)
{
    if (w->tasks == 0)
        return;
    if (w->open.count > 0 && w->open.tasks == w->tasks &&
        w->node == w->open.first + w->open.count) {
        w->open.count++;
    } else {
        write_block(w);
        w->open = (struct block){.first = w->node, .count = 1, .tasks = w->tasks};
    }
    w->tasks = 0;
}

static void put_task(struct writer *w, uint32_t node)
{
    if (w->tasks > 0 && w->node != node)
        end_run(w);
    w->node = node;
    w->tasks++;
}

/* Number the guests that have tasks: base[n] is the first one of node n. */
static void number_guests(const uint32_t *on_node, uint32_t *base, uint32_t nodes, uint32_t guests)
{
    uint32_t next = 0;
    for (uint32_t n = 0; n < nodes; n++) {
        base[n] = next;
        next += on_node[n] < guests ? on_node[n] : guests;
    }
}

static void write_guests(struct writer *w, struct reader r, uint32_t tasks, uint32_t guests,
                         const uint32_t *on_node, const uint32_t *base, uint32_t *done)
{
    struct block b;
    while (!w->full && take_block(&r, tasks, &b) > 0)
        for (uint32_t i = 0; i < b.count; i++)
            for (uint32_t k = 0; k < b.tasks; k++) {
                uint32_t node = b.first + i, local = done[node]++;
                /* With fewer tasks than guests, each one has a guest of its own. */
                if (on_node[node] >= guests)
                    local = (uint32_t)((uint64_t)local * guests / on_node[node]);
                put_task(w, base[node] + local);
            }
    end_run(w);
    write_block(w);
}

int mapping_divide(const char *text, size_t len, uint32_t tasks, uint32_t guests,
                   char out[MAPPING_TEXT_MAX + 1])
{
    struct writer w = {.out = out};
    uint32_t *on_node = calloc(tasks, 3 * sizeof *on_node);
    if (on_node == NULL)
        return -ENOMEM;
    uint32_t *base = on_node + tasks, *done = base + tasks;
    bool known = count_tasks(text, len, tasks, on_node);
    if (known) {
        number_guests(on_node, base, tasks, guests);
        append(&w, "(vector");
        write_guests(&w, open_text(text, len), tasks, guests, on_node, base, done);
    }
    if (!known || w.full)
        (void)snprintf(out, MAPPING_TEXT_MAX + 1, "(vector,(0,%u,1))", tasks);
    else
        (void)snprintf(out + w.len, 2, ")");
    free(on_node);
    return 0;
}
