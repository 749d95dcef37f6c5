/* SPDX-License-Identifier: Apache-2.0 */
#include "topology.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "file.h"

#define VARIABLE "NCCL_TOPO_FILE"

int topology_set(struct agent *a, const char *xml, char *text, size_t size)
{
    size_t length = strlen(xml);
    int rc = length == 0 || length > TOPOLOGY_MAX ? -EINVAL : 0;
    if (rc < 0) {
        (void)snprintf(text, size,
                       "a topology file of %zu bytes is not accepted: it must have 1 to %d", length,
                       TOPOLOGY_MAX);
        return rc;
    }
    rc = write_file(a->topology_file, 0644, xml);
    if (rc < 0)
        (void)snprintf(text, size, "%s: %s", a->topology_file, strerror(-rc));
    a->has_topology = rc == 0;
    return rc;
}

int topology_environment(const struct agent *a, struct execspec *spec)
{
    char entry[sizeof VARIABLE + PATH_MAX];
    const char *now = execspec_getenv(spec, VARIABLE);
    if (a->topology_file == NULL)
        return 0;
    if (now != NULL && strcmp(now, a->topology_file) == 0 && !a->has_topology)
        execspec_drop_env(spec, VARIABLE "=");
    if (now != NULL || !a->has_topology)
        return 0;
    (void)snprintf(entry, sizeof entry, VARIABLE "=%s", a->topology_file);
    return execspec_add_env(spec, entry);
}
