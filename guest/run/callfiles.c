/* SPDX-License-Identifier: Apache-2.0 */
#include "callfiles.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "file.h"

extern char **environ;

static const char template[] = "/tmp/vhpc-XXXXXX";

/* The file has the user's rights, and a folder that is closed to others. */
static int write_script(const struct call_files *files, const struct execspec *spec)
{
    int rc, folder = open(files->folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (folder < 0)
        return -errno;
    int fd =
        openat(folder, files->name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    rc = fd < 0 ? -errno : write_all(fd, spec->script, spec->script_len);
    if (fd >= 0 && close(fd) < 0 && rc == 0)
        rc = -errno;
    (void)close(folder);
    return rc;
}

static int replace_operand(struct execspec *spec, const char *text)
{
    char *copy = strdup(text);
    if (copy == NULL)
        return -ENOMEM;
    free(spec->argv[spec->operand]);
    spec->argv[spec->operand] = copy;
    return 0;
}

static int place_script(struct call_files *files, struct execspec *spec)
{
    char path[sizeof template + NAME_MAX + 1];
    const char *slash = strrchr(spec->script_path, '/');
    files->name = slash != NULL ? slash + 1 : spec->script_path;
    size_t len = strlen(files->name);
    if (len == 0 || len > NAME_MAX || strcmp(files->name, ".") == 0 ||
        strcmp(files->name, "..") == 0)
        return -EINVAL;
    (void)snprintf(files->folder, sizeof files->folder, "%s", template);
    if (mkdtemp(files->folder) == NULL) {
        int rc = -errno;
        files->folder[0] = '\0';
        return rc;
    }
    int rc = write_script(files, spec);
    if (rc < 0)
        return rc;
    (void)snprintf(path, sizeof path, "%s/%s", files->folder, files->name);
    return replace_operand(spec, path);
}

/* The relay that salloc starts gets our own settings, and no others: the guest's were removed. */
static int place_relay(struct execspec *spec, const char *socket)
{
    static const char *const own[] = {"VHPC_RUN_ARGV0=", "VHPC_RUN_SCRIPT=", "VHPC_RUN_SOCKET=",
                                      "VHPC_RUN_COPIED=", "VHPC_RUN_ATTACH="};
    char text[PATH_MAX + sizeof "VHPC_RUN_SOCKET="];
    ssize_t n = readlink("/proc/self/exe", text, PATH_MAX - 1);
    if (n < 0)
        return -errno;
    text[n] = '\0';
    int rc = replace_operand(spec, text);
    for (char **e = environ; *e != NULL && rc == 0; e++) {
        bool passed = strncmp(*e, "VHPC_RUN_", 9) == 0;
        for (size_t i = 0; i < sizeof own / sizeof own[0]; i++)
            passed = passed && strncmp(*e, own[i], strlen(own[i])) != 0;
        if (passed)
            rc = execspec_add_env(spec, *e);
    }
    if (rc < 0)
        return rc;
    n = snprintf(text, sizeof text, "VHPC_RUN_SOCKET=%s", socket);
    return n > 0 && (size_t)n < sizeof text ? execspec_add_env(spec, text) : -ENAMETOOLONG;
}

int call_files_prepare(struct call_files *files, struct execspec *spec, const char *socket,
                       char *why, size_t size)
{
    const char *slash = strrchr(spec->argv[0], '/');
    const char *name = slash != NULL ? slash + 1 : spec->argv[0];
    int rc = 0;
    if (strcmp(name, "sacctmgr") == 0)
        rc = execspec_insert_arg(spec, 1, "--readonly");
    else if (strcmp(name, "sbatch") == 0 && spec->operand > 0 && spec->script != NULL)
        rc = place_script(files, spec);
    else if (strcmp(name, "salloc") == 0 && spec->operand > 0 && spec->script == NULL)
        rc = place_relay(spec, socket);
    else if (spec->operand > 0 || spec->script != NULL)
        rc = -EPROTO;
    if (rc < 0)
        (void)snprintf(why, size, "the host cannot prepare this command: %s", strerror(-rc));
    return rc;
}

void call_files_drop(struct call_files *files)
{
    char path[sizeof template + NAME_MAX + 1];
    if (files->folder[0] == '\0')
        return;
    (void)snprintf(path, sizeof path, "%s/%s", files->folder, files->name);
    (void)unlink(path);
    (void)rmdir(files->folder);
    files->folder[0] = '\0';
}
