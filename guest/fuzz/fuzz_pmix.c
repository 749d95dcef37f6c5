/* SPDX-License-Identifier: Apache-2.0 */
/* promise: checkpoint.pmi, attack.channel */
/*
 * Arbitrary bytes of a program and of its PMIx server. The server gets the bytes of the program;
 * then the program leaves the server and gets another one, which says the same.
 * And a name that was changed in a message can be changed back. The first bytes choose the size of
 * pieces, and how much the program says.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "pmixrelay.h"
#include "rig.h"

enum { TURNS = 4 };

static const char old[] = "slurm.pmix.1009.2", new[] = "slurm.pmix.1009.10";

struct rig {
    struct loop loop;
    struct pmixrelay relay;
    bool parked;
    int program, server;
};

static bool is_parked(const struct pmixrelay *r)
{
    return ((const struct rig *)r->owner)->parked;
}

static void ignore(struct pmixrelay *r)
{
    (void)r;
}

/* Send a piece and read what comes at the other end, at most `room` bytes. */
static size_t pass(struct rig *r, int from, int to, const uint8_t *data, size_t size, uint8_t *got,
                   size_t room)
{
    size_t have = 0;
    if (size > 0)
        (void)!send(from, data, size, MSG_NOSIGNAL);
    for (int i = 0; i < TURNS; i++)
        (void)loop_once(&r->loop, 0);
    for (ssize_t n; have < room && (n = recv(to, got + have, room - have, 0)) > 0;)
        have += (size_t)n;
    return have;
}

static void say(struct rig *r, int from, int to, const uint8_t *data, size_t size, size_t piece)
{
    static uint8_t got[1 << 16];
    for (size_t at = 0; at < size; at += piece)
        (void)pass(r, from, to, data + at, size - at < piece ? size - at : piece, got, sizeof got);
}

/* The complete messages of the program reach its first server unchanged. */
static void ask(struct rig *r, const uint8_t *data, size_t size, size_t piece)
{
    static uint8_t got[1 << 16];
    size_t have = 0;
    for (size_t at = 0; at < size; at += piece)
        have += pass(r, r->program, r->server, data + at, size - at < piece ? size - at : piece,
                     got + have, sizeof got - have);
    if (have > size || memcmp(got, data, have) != 0 || r->relay.record.kept.len > PMIXRECORD_MAX)
        abort();
}

static void relay(const uint8_t *data, size_t size, size_t said, size_t piece)
{
    static struct rig r;
    int ends[2];
    memset(&r, 0, sizeof r);
    r.relay = (struct pmixrelay){
        .owner = &r, .loop = &r.loop, .is_quiet = is_parked, .changed = ignore, .failed = ignore};
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) < 0)
        abort();
    r.program = ends[1];
    r.server = pmixrelay_start(&r.relay, ends[0], old, old);
    ask(&r, data, said, piece);
    say(&r, r.server, r.program, data + said, size - said, piece);
    r.parked = true;
    (void)pmixrelay_leave(&r.relay);
    say(&r, r.server, r.program, data + said, size - said, piece);
    r.parked = false;
    if (r.relay.phase == PMIXRELAY_LEFT) {
        (void)close(r.server);
        r.server = pmixrelay_renew(&r.relay, new);
        say(&r, r.server, r.program, data + said, size - said, piece);
        say(&r, r.program, r.server, data, said, piece);
    }
    pmixrelay_close(&r.relay);
    loop_free(&r.loop);
    (void)close(r.program);
    (void)close(r.server);
}

static void rename_and_back(const uint8_t *data, size_t size, enum pmix_place place)
{
    struct buf renamed = {0}, back = {0};
    bool greeting = place == PMIX_IN_GREETING;
    long len = pmix_first(data, size, greeting);
    if (len <= 0 || memmem(data, (size_t)len, new, sizeof new) != NULL)
        return;
    if (pmix_rename(data, (size_t)len, place, old, new, &renamed) < 0 ||
        pmix_rename(buf_head(&renamed), renamed.len, place, new, old, &back) < 0 ||
        pmix_first(buf_head(&renamed), renamed.len, greeting) != (long)renamed.len)
        abort();
    /* The length of an object may have been written in a longer way. */
    if (back.len > (size_t)len ||
        (back.len == (size_t)len && memcmp(buf_head(&back), data, back.len) != 0))
        abort();
    buf_free(&renamed);
    buf_free(&back);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2 || size > 32768)
        return 0;
    size_t piece = 1u + data[0], said = (size_t)4 * data[1];
    data += 2;
    size -= 2;
    said = said < size ? said : size;
    relay(data, size, said, piece);
    rename_and_back(data, size, PMIX_IN_GREETING);
    rename_and_back(data, size, PMIX_IN_CONTENT);
    rename_and_back(data, size, PMIX_IN_OBJECTS);
    return 0;
}
