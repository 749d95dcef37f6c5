/* SPDX-License-Identifier: Apache-2.0 */
#include "log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "chan.h"

/* A token bucket; full at the start. */
static struct {
    bool begun;
    long long since;
    int lines;
    unsigned long left_out;
} rate;

static bool may_write(void)
{
    long long now = now_ms();

    if (!rate.begun) {
        rate.begun = true;
        rate.since = now;
        rate.lines = LOG_BURST;
    }
    long long earned = (now - rate.since) / LOG_INTERVAL_MS;
    if (earned > 0) {
        rate.since += earned * LOG_INTERVAL_MS;
        rate.lines = earned > LOG_BURST - rate.lines ? LOG_BURST : rate.lines + (int)earned;
    }
    if (rate.lines == 0) {
        rate.left_out++;
        return false;
    }
    rate.lines--;
    return true;
}

void log_line(const char *format, ...)
{
    char line[LOG_LINE_MAX];
    va_list arguments;

    if (!may_write())
        return;
    if (rate.left_out > 0)
        (void)fprintf(stderr, "vhpc-shim: %lu lines were suppressed\n", rate.left_out);
    rate.left_out = 0;
    va_start(arguments, format);
    (void)vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    for (char *c = line; *c != '\0';
         c++) /* a name from a guest or a user may contain control sequences for a terminal */
        if ((unsigned char)*c < ' ' || *c == 0x7f)
            *c = '?';
    (void)fprintf(stderr, "vhpc-shim: %s\n", line);
}

void log_pipe_feed(struct log_pipe *p, const char *bytes, size_t length)
{
    for (size_t i = 0; i < length; i++) {
        if (bytes[i] == '\n') {
            if (p->used > 0)
                log_line("%s: %.*s", p->tag, (int)p->used, p->line);
            p->used = 0;
            p->skip = false;
        } else if (p->used == sizeof p->line) {
            p->skip = true;
        } else if (!p->skip) {
            p->line[p->used++] = bytes[i];
        }
    }
}

static void pipe_ready(struct source *source, short revents)
{
    struct log_pipe *p = source->owner;
    char bytes[4096];

    (void)revents;
    ssize_t got = read(source->fd, bytes, sizeof bytes);
    if (got > 0) {
        log_pipe_feed(p, bytes, (size_t)got);
    } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
        log_pipe_feed(p, "\n", 1);
        loop_remove(p->loop, source);
        (void)close(source->fd);
    }
}

static short want_input(struct source *source)
{
    (void)source;
    return POLLIN;
}

int log_pipe_open(struct log_pipe *p, struct loop *loop, const char *spec)
{
    const char *colon = strrchr(spec, ':');
    char *rest = NULL;

    if (colon == NULL || colon == spec || (size_t)(colon - spec) >= sizeof p->tag ||
        colon[1] < '0' || colon[1] > '9')
        return -EINVAL;
    errno = 0;
    unsigned long fd = strtoul(colon + 1, &rest, 10);
    if (errno != 0 || *rest != '\0' || fd > 1 << 20)
        return -EINVAL;
    *p = (struct log_pipe){.loop = loop};
    memcpy(p->tag, spec, (size_t)(colon - spec));
    p->source = (struct source){.fd = (int)fd, .want = want_input, .ready = pipe_ready, .owner = p};
    int rc = fd_prepare((int)fd);
    return rc == 0 ? loop_add(loop, &p->source) : rc;
}
