/* SPDX-License-Identifier: Apache-2.0 */
/* Decision: Users run containers in their guests without root */
#include "containers.h"

#include <errno.h>
#include <limits.h>
#include <mntent.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "accounts.h"
#include "agent.h"
#include "directory.h"
#include "file.h"

/* Above the ranges that images have for accounts of their own (100000 and up). */
enum { FIRST = 524288, RANGE = 65536 };

static bool any_within(const uint32_t *ids, size_t count, uint32_t first)
{
    for (size_t i = 0; i < count; i++)
        if (ids[i] >= first && ids[i] - first < RANGE)
            return true;
    return false;
}

int containers_put_range(const char *path, const char *user, const uint32_t *ids, size_t count)
{
    uint32_t first = FIRST;
    char *line = NULL;
    if (accounts_has(path, user))
        return 0;
    while (any_within(ids, count, first))
        first += RANGE;
    if (asprintf(&line, "%s:%u:%d", user, first, RANGE) < 0)
        return -ENOMEM;
    int rc = accounts_put(path, user, 0, line); /* no range has the length 0 */
    free(line);
    return rc;
}

static int put_ranges(const struct identity *id)
{
    uint32_t *ids = calloc(id->group_count + 2, sizeof *ids);
    if (ids == NULL)
        return -ENOMEM;
    ids[0] = id->uid;
    ids[1] = id->gid;
    for (size_t i = 0; i < id->group_count; i++)
        ids[i + 2] = id->groups[i].gid;
    int rc = containers_put_range("/etc/subuid", id->user, ids, id->group_count + 2);
    rc = rc < 0 ? rc : containers_put_range("/etc/subgid", id->user, ids, id->group_count + 2);
    free(ids);
    return rc;
}

/* The directory at which the guest's own disk is mounted; false if there is none. */
static bool disk_directory(char *path, size_t size)
{
    char device[256];
    bool found = false;
    FILE *f = system_parameter("vhpc.agent.disk=", device, sizeof device)
                  ? setmntent("/proc/self/mounts", "re")
                  : NULL;
    for (struct mntent *m; f != NULL && (m = getmntent(f)) != NULL;)
        if (strcmp(m->mnt_fsname, device) == 0)
            found = (size_t)snprintf(path, size, "%s", m->mnt_dir) < size;
    if (f != NULL)
        (void)endmntent(f);
    return found;
}

static const char storage_head[] =
    "# Written by vhpc: a home that is a shared folder cannot have files of other users.\n";

/* Whether a file is the image's, and not ours: `vhpc save` takes ours into images, too. */
static bool is_images(const char *path)
{
    char head[sizeof storage_head] = "";
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return errno != ENOENT;
    bool own = fgets(head, sizeof head, f) != NULL && strcmp(head, storage_head) == 0;
    (void)fclose(f);
    return !own;
}

/* podman and buildah read this file in place of that of their package. */
static int put_storage(const struct identity *id)
{
    static const char path[] = "/etc/containers/storage.conf";
    char disk[PATH_MAX], *text = NULL;
    if (access("/etc/containers", F_OK) < 0 || is_images(path))
        return 0;
    if (!disk_directory(disk, sizeof disk))
        (void)snprintf(disk, sizeof disk, "/var/tmp");
    if (asprintf(&text,
                 "%s[storage]\ndriver = \"overlay\"\nrunroot = \"/run/containers/storage\"\n"
                 "graphroot = \"/var/lib/containers/storage\"\n"
                 "rootless_storage_path = \"%s/containers-%u\"\n",
                 storage_head, disk, id->uid) < 0)
        return -ENOMEM;
    int rc = write_file(path, 0644, text);
    free(text);
    return rc;
}

static int put_runtime_directory(const struct identity *id)
{
    char path[64];
    (void)snprintf(path, sizeof path, "/run/user/%u", id->uid);
    return directory_make_private(path, id->uid, id->gid);
}

void containers_prepare(const struct identity *id)
{
    static const struct {
        int (*put)(const struct identity *id);
        const char *what;
    } parts[] = {
        {put_ranges, "ids for containers in /etc/subuid and /etc/subgid"},
        {put_runtime_directory, "/run/user"},
        {put_storage, "/etc/containers/storage.conf"},
    };
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        int rc = parts[i].put(id);
        if (rc < 0)
            (void)fprintf(stderr, "vhpc-agent: %s: %s\n", parts[i].what, strerror(-rc));
    }
}
