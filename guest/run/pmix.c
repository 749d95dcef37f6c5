/* SPDX-License-Identifier: Apache-2.0 */
#include "pmix.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static bool parse_port(const char *text, in_port_t *port)
{
    size_t digits = strspn(text, "0123456789");
    unsigned long value = digits > 0 && digits < 6 ? strtoul(text, NULL, 10) : 0;
    *port = htons((uint16_t)value);
    return text[digits] == '\0' && value > 0 && value <= UINT16_MAX;
}

/* "tcp4://127.0.0.1:PORT" or "tcp6://[::1]:PORT" */
static bool parse_address(const char *text, struct link_server *server)
{
    static const char v4[] = "tcp4://", v6[] = "tcp6://[::1]:";
    char host[INET_ADDRSTRLEN];
    *server = (struct link_server){.name = "the PMIx server of the step"};
    if (strncmp(text, v6, sizeof v6 - 1) == 0) {
        server->at.in6.sin6_family = AF_INET6;
        server->at.in6.sin6_addr = in6addr_loopback;
        server->len = sizeof server->at.in6;
        return parse_port(text + sizeof v6 - 1, &server->at.in6.sin6_port);
    }
    if (strncmp(text, v4, sizeof v4 - 1) != 0)
        return false;
    text += sizeof v4 - 1;
    size_t len = strcspn(text, ":");
    if (text[len] != ':' || len >= sizeof host)
        return false;
    memcpy(host, text, len);
    host[len] = '\0';
    server->at.in.sin_family = AF_INET;
    server->len = sizeof server->at.in;
    return inet_pton(AF_INET, host, &server->at.in.sin_addr) == 1 &&
           ntohl(server->at.in.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET &&
           parse_port(text + len + 1, &server->at.in.sin_port);
}

/* Both are of the loopback interface. */
static bool same(const struct link_server *a, const struct link_server *b)
{
    if (a->at.any.sa_family != b->at.any.sa_family)
        return false;
    if (a->at.any.sa_family == AF_INET6)
        return a->at.in6.sin6_port == b->at.in6.sin6_port;
    return a->at.in.sin_port == b->at.in.sin_port &&
           a->at.in.sin_addr.s_addr == b->at.in.sin_addr.s_addr;
}

bool pmix_find(const struct execspec *spec, struct link_server *server)
{
    static const char name[] = "PMIX_SERVER_URI";
    struct link_server found;
    *server = (struct link_server){.name = "the PMIx server of the step"};
    for (size_t i = 0; i < spec->envc; i++) {
        const char *value = strchr(spec->envp[i], '='), *address;
        if (value == NULL || strncmp(spec->envp[i], name, sizeof name - 1) != 0)
            continue;
        address = strchr(value, ';');
        if (address == NULL || !parse_address(address + 1, &found))
            return false;
        if (server->len != 0 && !same(&found, server))
            return false;
        *server = found;
    }
    return server->len != 0;
}
