/* SPDX-License-Identifier: Apache-2.0 */
/* What container engines (podman, apptainer) need to run without root in a guest. */
#ifndef VHPC_AGENT_CONTAINERS_H
#define VHPC_AGENT_CONTAINERS_H

#include <stddef.h>
#include <stdint.h>

#include "identity.h"

/*
 * Give a user a range of 65536 subordinate ids in the file at path (subuid(5)), outside of the ids
 * that he has. A range that the file has for this name stays. 0 or -errno.
 */
int containers_put_range(const char *path, const char *user, const uint32_t *ids, size_t count);

/*
 * The ranges of the user, his /run/user/UID, and a folder for images of containers that is in no
 * share: files of other ids cannot be there. Problems are on stderr: they concern containers only.
 */
void containers_prepare(const struct identity *id);

#endif
