/* SPDX-License-Identifier: Apache-2.0 */
/* The end of the channel, for whatever reason. */
#include <errno.h>
#include <stdio.h>

#include "shim.h"

void shim_end(struct shim *s, int status, const char *text)
{
    char line[256];
    if (s->ended)
        return;
    s->ended = true;
    s->status = status;
    if (status == SHIM_AGENT_BROKEN) {
        s->runs_on = true;
        (void)snprintf(line, sizeof line, "the guest violated the channel's protocol: %s", text);
        log_line("%s", line);
    } else {
        (void)snprintf(line, sizeof line, "%s", text != NULL ? text : "channel closed");
    }
    for (struct client *c = s->clients; c != NULL; c = c->next) {
        if (c->chan.closed)
            continue;
        (void)error_send(&c->chan, 0, 0, VHPC_ERR_GONE, ENOTCONN, line);
        chan_finish(&c->chan);
    }
    chan_close(&s->agent);
}

void shim_lose(struct shim *s)
{
    if (!s->held) {
        shim_end(s, SHIM_AGENT_CLOSED, NULL);
        return;
    }
    s->lost = true;
    chan_close(&s->agent);
    for (struct client *c = s->clients; c != NULL; c = c->next)
        if (c->must_end)
            shim_client_ends(c);
}

void shim_client_ends(struct client *c)
{
    c->must_end = true;
    if (!c->shim->lost || c->chan.closed)
        return;
    (void)error_send(&c->chan, 0, 0, VHPC_ERR_GONE, ECANCELED, "the guest was saved");
    chan_finish(&c->chan);
}

void shim_hold(struct shim *s, bool held)
{
    s->held = held;
    for (struct client *c = s->clients; c != NULL; c = c->next)
        c->must_end = false;
    if (!held && s->lost)
        shim_end(s, SHIM_AGENT_CLOSED, NULL);
}
