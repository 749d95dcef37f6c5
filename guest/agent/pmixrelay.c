/* SPDX-License-Identifier: Apache-2.0 */
/* Decision: A program's PMIx server is told again what the last one was */
#include "pmixrelay.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "localfd.h"

enum { PART = 64 << 10, QUEUE_MAX = 256 << 10 };

/* Of our own request; a program counts its tags up from PMIX_TAG_ANSWERED. */
static const uint32_t leaving_tag = UINT32_MAX - 1;

static void close_end(struct pmixrelay *r, struct source *s)
{
    if (s->fd < 0)
        return;
    loop_remove(r->loop, s);
    (void)close(s->fd);
    s->fd = -1;
}

void pmixrelay_close(struct pmixrelay *r)
{
    r->phase = PMIXRELAY_OVER;
    close_end(r, &r->program);
    close_end(r, &r->server);
    buf_free(&r->from_program);
    buf_free(&r->to_server);
    buf_free(&r->from_server);
    buf_free(&r->to_program);
    pmixrecord_free(&r->record);
}

static void fail(struct pmixrelay *r)
{
    pmixrelay_close(r);
    r->failed(r);
}

static void leave(struct pmixrelay *r)
{
    close_end(r, &r->server);
    buf_free(&r->from_server);
    buf_free(&r->to_server);
    r->server_ended = false;
    r->phase = PMIXRELAY_LEFT;
    r->changed(r);
}

static bool is_renamed(const struct pmixrelay *r)
{
    return strcmp(r->own, r->other) != 0;
}

/* --- to the server ------------------------------------------------------------------------- */

static int to_server(struct pmixrelay *r, const uint8_t *message, size_t len, bool greeting)
{
    /* Values are for other programs, and pass unchanged. */
    if (!is_renamed(r) || (!greeting && pmix_command(message, len) == PMIX_COMMIT))
        return buf_append(&r->to_server, message, len);
    return pmix_rename(message, len, greeting ? PMIX_IN_GREETING : PMIX_IN_CONTENT, r->own,
                       r->other, &r->to_server);
}

/* This is not PMIx, as far as it is known here. */
static int pass_raw(struct pmixrelay *r)
{
    if (is_renamed(r))
        return -EPROTO;
    r->raw = true;
    if (r->record.lost == NULL)
        pmixrecord_lose(&r->record, "uses PMIx in a way that a checkpoint does not know");
    return 0;
}

static int move(struct buf *from, struct buf *to)
{
    int rc = buf_append(to, buf_head(from), from->len);
    if (rc == 0)
        buf_consume(from, from->len);
    return rc;
}

/* One message of the program; 0: none is complete; or -errno. */
static long take_request(struct pmixrelay *r)
{
    const uint8_t *data = buf_head(&r->from_program);
    size_t have = r->from_program.len;
    long len = pmix_first(data, have, !r->begun);
    if (len < 0 || (!r->begun && !pmix_is_greeting(data, have)))
        return pass_raw(r);
    if (len == 0)
        return 0;
    if (r->begun)
        pmixrecord_request(&r->record, data, (size_t)len);
    else
        pmixrecord_greeting(&r->record, data, (size_t)len);
    if (!r->begun && r->record.lost != NULL)
        return pass_raw(r);
    int rc = to_server(r, data, (size_t)len, !r->begun);
    r->begun = true;
    if (rc == 0)
        buf_consume(&r->from_program, (size_t)len);
    return rc < 0 ? rc : len;
}

static int take_requests(struct pmixrelay *r)
{
    long len = 1;
    while (len > 0 && !r->raw && r->from_program.len > 0)
        len = take_request(r);
    if (len < 0)
        return (int)len;
    bool rest = r->raw || (r->program_ended && r->phase == PMIXRELAY_PASSING);
    return rest ? move(&r->from_program, &r->to_server) : 0;
}

/* --- a new server ---------------------------------------------------------------------------- */

/* The next message of the record that is not told yet, or NULL. */
static const uint8_t *next_told(const struct pmixrelay *r, size_t *len)
{
    const struct buf *kept = &r->record.kept;
    if (r->told == kept->len)
        return NULL;
    const uint8_t *message = buf_head(kept) + r->told;
    *len = (size_t)pmix_first(message, kept->len - r->told, r->told == 0);
    return message;
}

/* Tell it the next message, up to one that it answers. */
static int tell(struct pmixrelay *r)
{
    const uint8_t *message;
    size_t len;
    int rc = 0;
    while (rc == 0 && (message = next_told(r, &len)) != NULL) {
        bool greeting = r->told == 0;
        rc = to_server(r, message, len, greeting);
        if (greeting || pmix_command(message, len) != PMIX_DEREGISTER_EVENTS)
            return rc;
        r->told += len;
    }
    r->phase = PMIXRELAY_PASSING;
    r->changed(r);
    return rc;
}

/* -EPROTO: the server refuses. */
static int told(struct pmixrelay *r, bool good)
{
    size_t len;
    if (next_told(r, &len) == NULL || !good)
        return -EPROTO;
    r->told += len;
    return tell(r);
}

/* --- from the server ------------------------------------------------------------------------- */

/* The answer to the greeting. Bytes that were taken, or -errno. */
static long take_greeted(struct pmixrelay *r)
{
    const uint8_t *data = buf_head(&r->from_server);
    size_t part = PMIX_GREETED - r->greeted;
    bool good = true;
    part = part < r->from_server.len ? part : r->from_server.len;
    for (size_t i = 0; i < part; i++)
        good = good && (r->greeted + i >= sizeof(uint32_t) || data[i] == 0);
    int rc = r->phase == PMIXRELAY_TELLING ? 0 : buf_append(&r->to_program, data, part);
    r->greeted += part;
    buf_consume(&r->from_server, part);
    if (rc == 0 && r->phase == PMIXRELAY_TELLING && (!good || r->greeted == PMIX_GREETED))
        rc = told(r, good);
    return rc < 0 ? rc : (long)part;
}

static int to_program(struct pmixrelay *r, const uint8_t *message, size_t len)
{
    enum pmix_command command = pmixrecord_answer(&r->record, message);
    if (!is_renamed(r))
        return buf_append(&r->to_program, message, len);
    return pmix_rename(message, len, command == PMIX_GET ? PMIX_IN_OBJECTS : PMIX_IN_CONTENT,
                       r->other, r->own, &r->to_program);
}

/* An answer to us, and not to the program. 1: it is not; 0 or -errno. */
static int take_own(struct pmixrelay *r, const uint8_t *message, size_t len)
{
    size_t asked_len;
    const uint8_t *asked = r->phase == PMIXRELAY_TELLING ? next_told(r, &asked_len) : NULL;
    if (asked == NULL || pmix_tag(asked) != pmix_tag(message))
        return 1;
    return told(r, pmix_is_good(message, len) || pmix_command(asked, asked_len) != PMIX_COMMIT);
}

/* One message of the server; 0: none is complete; or -errno. */
static long take_answer(struct pmixrelay *r)
{
    if (r->greeted < PMIX_GREETED)
        return take_greeted(r);
    const uint8_t *data = buf_head(&r->from_server);
    long len = pmix_first(data, r->from_server.len, false);
    if (len < 0)
        return pass_raw(r);
    if (len == 0)
        return 0;
    if (r->phase == PMIXRELAY_LEAVING && pmix_tag(data) == leaving_tag) {
        leave(r);
        return 0;
    }
    int rc = take_own(r, data, (size_t)len);
    if (rc == 1)
        rc = to_program(r, data, (size_t)len);
    if (rc == 0)
        buf_consume(&r->from_server, (size_t)len);
    return rc < 0 ? rc : len;
}

static int take_answers(struct pmixrelay *r)
{
    long len = 1;
    while (len > 0 && !r->raw && r->from_server.len > 0)
        len = take_answer(r);
    if (len < 0)
        return (int)len;
    bool rest = r->raw || (r->server_ended && r->phase == PMIXRELAY_PASSING);
    return rest ? move(&r->from_server, &r->to_program) : 0;
}

/* --- the two ends ---------------------------------------------------------------------------- */

/* Pass on ends, when what came before them was written. */
static void settle(struct pmixrelay *r)
{
    bool to_program_done = r->server_ended && r->to_program.len == 0;
    bool to_server_done = r->program_ended && r->to_server.len == 0;
    if (r->phase == PMIXRELAY_OVER)
        return;
    if ((to_server_done && (to_program_done || localfd_hung_up(r->program.fd))) ||
        (to_program_done && localfd_hung_up(r->server.fd))) {
        pmixrelay_close(r);
        return;
    }
    if (to_server_done && r->server.fd >= 0)
        (void)shutdown(r->server.fd, SHUT_WR);
    if (to_program_done)
        (void)shutdown(r->program.fd, SHUT_WR);
}

/* Read a part from one end and take what is whole; true: the end has come. */
static bool read_end(struct pmixrelay *r, struct source *s, struct buf *into)
{
    static uint8_t part[PART];
    ssize_t n = read(s->fd, part, sizeof part);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    if (n > 0 && buf_append(into, part, (size_t)n) < 0)
        fail(r);
    return n <= 0;
}

static void write_end(struct source *s, struct buf *from)
{
    ssize_t n = from->len > 0 ? send(s->fd, buf_head(from), from->len, MSG_NOSIGNAL) : 0;
    if (n > 0)
        buf_consume(from, (size_t)n);
    else if (n < 0 && errno != EAGAIN && errno != EINTR)
        buf_free(from); /* the end is noticed by reading */
}

static short program_want(struct source *s)
{
    const struct pmixrelay *r = s->owner;
    bool reads = r->phase == PMIXRELAY_PASSING && !r->is_quiet(r) && !r->program_ended &&
                 r->to_server.len < QUEUE_MAX;
    return (short)((reads ? POLLIN : 0) | (r->to_program.len > 0 ? POLLOUT : 0));
}

static void program_ready(struct source *s, short revents)
{
    struct pmixrelay *r = s->owner;
    if (revents & POLLOUT)
        write_end(s, &r->to_program);
    if ((program_want(s) & POLLIN) && (revents & (POLLIN | POLLHUP | POLLERR))) {
        r->program_ended = read_end(r, s, &r->from_program);
        int rc = r->phase == PMIXRELAY_OVER ? 0 : take_requests(r);
        if (rc < 0)
            fail(r);
    }
    settle(r);
}

static short server_want(struct source *s)
{
    const struct pmixrelay *r = s->owner;
    bool reads = !r->server_ended && r->to_program.len < QUEUE_MAX;
    return (short)((reads ? POLLIN : 0) | (r->to_server.len > 0 ? POLLOUT : 0));
}

static void server_ready(struct source *s, short revents)
{
    struct pmixrelay *r = s->owner;
    if (revents & POLLOUT)
        write_end(s, &r->to_server);
    if ((server_want(s) & POLLIN) && (revents & (POLLIN | POLLHUP | POLLERR))) {
        r->server_ended = read_end(r, s, &r->from_server);
        int rc = r->phase == PMIXRELAY_OVER ? 0 : take_answers(r);
        if (rc < 0 || (r->server_ended && r->phase == PMIXRELAY_TELLING))
            fail(r);
        else if (r->server_ended && r->phase == PMIXRELAY_LEAVING)
            leave(r);
    }
    settle(r);
}

static void set_name(char name[PMIX_NAMESPACE_MAX + 1], const char *text)
{
    (void)snprintf(name, PMIX_NAMESPACE_MAX + 1, "%s", text != NULL ? text : "");
}

/* Returns the other end of a new connection to a server, or -errno. */
static int connect_server(struct pmixrelay *r)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) < 0)
        return -errno;
    r->server =
        (struct source){.fd = ends[0], .want = server_want, .ready = server_ready, .owner = r};
    int rc = loop_add(r->loop, &r->server);
    if (rc == 0)
        return ends[1];
    (void)close(ends[0]);
    (void)close(ends[1]);
    r->server.fd = -1;
    return rc;
}

int pmixrelay_start(struct pmixrelay *r, int fd, const char *own, const char *other)
{
    set_name(r->own, own);
    set_name(r->other, own != NULL && other != NULL ? other : own);
    r->server.fd = -1;
    r->program =
        (struct source){.fd = fd, .want = program_want, .ready = program_ready, .owner = r};
    int rc = loop_add(r->loop, &r->program);
    if (rc < 0) {
        (void)close(fd);
        r->program.fd = -1;
        return rc;
    }
    rc = connect_server(r);
    if (rc < 0)
        pmixrelay_close(r);
    return rc;
}

const char *pmixrelay_obstacle(const struct pmixrelay *r)
{
    if (r->phase == PMIXRELAY_OVER || r->phase == PMIXRELAY_LEFT)
        return NULL;
    if (r->phase == PMIXRELAY_TELLING)
        return "is not known to its new PMIx server yet";
    const char *why = pmixrecord_obstacle(&r->record);
    size_t queued = r->from_program.len + r->from_server.len + r->to_server.len + r->to_program.len;
    bool moves = r->greeted < PMIX_GREETED || queued > 0 || r->program_ended || r->server_ended;
    return why == NULL && moves ? "exchanges data with its PMIx server" : why;
}

bool pmixrelay_leave(struct pmixrelay *r)
{
    if (r->phase == PMIXRELAY_PASSING && pmixrelay_obstacle(r) == NULL &&
        pmix_put(&r->to_server, leaving_tag, PMIX_FINALIZE) == 0)
        r->phase = PMIXRELAY_LEAVING;
    return r->phase == PMIXRELAY_LEFT || r->phase == PMIXRELAY_OVER;
}

int pmixrelay_renew(struct pmixrelay *r, const char *other)
{
    set_name(r->other, r->own[0] != '\0' && other != NULL ? other : r->own);
    r->greeted = r->told = 0;
    r->server_ended = false;
    int fd = connect_server(r);
    if (fd < 0)
        return fd;
    r->phase = PMIXRELAY_TELLING;
    int rc = tell(r);
    if (rc < 0) {
        (void)close(fd);
        return rc;
    }
    return fd;
}
