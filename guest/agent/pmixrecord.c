/* SPDX-License-Identifier: Apache-2.0 */
/* Decision: A program's PMIx server is told again what the last one was */
#include "pmixrecord.h"

#include <stdlib.h>
#include <string.h>

void pmixrecord_lose(struct pmixrecord *r, const char *why)
{
    buf_free(&r->kept);
    r->lost = why;
}

static void keep(struct pmixrecord *r, const uint8_t *message, size_t len)
{
    if (r->kept.len + len > PMIXRECORD_MAX)
        pmixrecord_lose(r, "has told its PMIx server more than a checkpoint keeps");
    else if (buf_append(&r->kept, message, len) < 0)
        pmixrecord_lose(r, "has told its PMIx server more than the guest's memory holds");
}

static void keep_commit(struct pmixrecord *r, const uint8_t *message, size_t len)
{
    struct buf *b = &r->kept;
    uint8_t *last = b->data + b->head + r->commit;
    memmove(last, last + r->commit_len, b->len - r->commit - r->commit_len);
    b->len -= r->commit_len;
    r->commit = b->len;
    r->commit_len = len;
    keep(r, message, len);
}

void pmixrecord_greeting(struct pmixrecord *r, const uint8_t *message, size_t len)
{
    if (pmix_knows(message, len))
        keep(r, message, len);
    else
        pmixrecord_lose(r, "has a version of PMIx that a checkpoint does not know");
}

/* Slurm's server refuses most of these; of some, other programs would notice the end of a step. */
static bool is_with_others(enum pmix_command command)
{
    return (command >= PMIX_PUBLISH && command <= PMIX_DISCONNECT) || command == PMIX_MONITOR ||
           (command >= PMIX_PULL_OUTPUT && command <= PMIX_LEAVE_GROUP);
}

/* Also if nothing is kept any more: an answer is read as the command says. */
static void wait_for(struct pmixrecord *r, uint32_t tag, enum pmix_command command)
{
    if (r->open_count == r->open_room) {
        size_t room = r->open_room == 0 ? 16 : 2 * r->open_room;
        struct pmixrecord_open *open =
            room <= PMIXRECORD_OPEN_MAX ? realloc(r->open, room * sizeof *open) : NULL;
        if (open == NULL) {
            pmixrecord_lose(r, "has more open requests to its PMIx server than a checkpoint knows");
            return;
        }
        r->open = open;
        r->open_room = room;
    }
    r->open[r->open_count++] = (struct pmixrecord_open){tag, command};
}

static void take(struct pmixrecord *r, enum pmix_command command, const uint8_t *message,
                 size_t len)
{
    bool told = command == PMIX_REGISTER_EVENTS || command == PMIX_DEREGISTER_EVENTS ||
                command == PMIX_FINALIZE;
    if (command == PMIX_NO_COMMAND)
        pmixrecord_lose(r, "uses PMIx in a way that a checkpoint does not know");
    else if (is_with_others(command))
        pmixrecord_lose(r, "has used PMIx to find or to follow other programs");
    else if (command == PMIX_COMMIT && len > PMIX_HEADER + PMIX_COMMAND) /* there is a value */
        keep_commit(r, message, len);
    else if (told)
        keep(r, message, len);
}

void pmixrecord_request(struct pmixrecord *r, const uint8_t *message, size_t len)
{
    enum pmix_command command = pmix_command(message, len);
    uint32_t tag = pmix_tag(message);
    if (tag < PMIX_TAG_ANSWERED)
        return;
    if (r->lost == NULL)
        take(r, command, message, len);
    if (command != PMIX_DEREGISTER_EVENTS)
        wait_for(r, tag, command);
}

enum pmix_command pmixrecord_answer(struct pmixrecord *r, const uint8_t *message)
{
    uint32_t tag = pmix_tag(message);
    for (size_t i = 0; i < r->open_count; i++)
        if (r->open[i].tag == tag) {
            enum pmix_command command = r->open[i].command;
            r->open[i] = r->open[--r->open_count];
            return command;
        }
    return PMIX_NO_COMMAND;
}

const char *pmixrecord_obstacle(const struct pmixrecord *r)
{
    if (r->lost != NULL)
        return r->lost;
    return r->open_count > 0 ? "waits for an answer of its PMIx server" : NULL;
}

void pmixrecord_free(struct pmixrecord *r)
{
    buf_free(&r->kept);
    free(r->open);
    *r = (struct pmixrecord){0};
}
