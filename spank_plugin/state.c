/* SPDX-License-Identifier: Apache-2.0 */
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bounds.h"
#include "option_ids.h"
#include "text.h"

/* sun_path of a unix socket, with its NUL: unix(7). */
#define SOCKET_PATH_SIZE 108
#define NONCE_DIGITS 8
#define FIRST_SOCKET "/g0/run.sock"

enum key {
    VERSION,
    JOB,
    RESTART,
    GENERATION,
    STATUS,
    MESSAGE,
    IMAGE,
    BATCH,
    SOCKET,
    COMMANDS,
    COMMAND_PATH,
    GPUS,
    CPUS,
    GUESTS,
    COMPONENTS,
    WARNING,
    ATTACH,
    KEYS
};

static const char *const key_names[KEYS] = {
    [VERSION] = "version",
    [JOB] = "job",
    [RESTART] = "restart",
    [GENERATION] = "generation",
    [STATUS] = "status",
    [MESSAGE] = "message",
    [IMAGE] = "image",
    [BATCH] = "batch",
    [SOCKET] = "socket",
    [COMMANDS] = "commands",
    [GPUS] = "gpus",
    [CPUS] = "cpus",
    [GUESTS] = "guests",
    [WARNING] = "warning",
    [COMPONENTS] = "components",
    [COMMAND_PATH] = "command_path",
    [ATTACH] = "attach",
};

__attribute__((format(printf, 3, 4))) static bool refuse(char *why, size_t size, const char *format,
                                                         ...)
{
    va_list words;

    va_start(words, format);
    vsnprintf(why, size, format, words);
    va_end(words);
    return false;
}

/* Split the copy into lines and find the value of each known key. */
static bool split(char *bytes, size_t length, const char *values[KEYS], char *why, size_t size)
{
    size_t at = 0;

    while (at < length) {
        char *line = bytes + at;
        char *end = memchr(line, '\n', length - at);
        char *equals;

        if (end == NULL)
            return refuse(why, size, "its last line is incomplete");
        *end = '\0';
        at += (size_t)(end - line) + 1;
        if (end - line > VHPC_STATE_LINE_MAX)
            return refuse(why, size, "a line is longer than %d bytes", VHPC_STATE_LINE_MAX);
        if (!vhpc_text_is_plain(line, (size_t)(end - line)))
            return refuse(why, size, "it contains control characters or is not UTF-8");
        equals = strchr(line, '=');
        if (equals == NULL || equals == line)
            return refuse(why, size, "a line is not key=value");
        *equals = '\0';
        for (int key = 0; key < KEYS; key++) {
            if (strcmp(line, key_names[key]) != 0)
                continue;
            if (values[key] != NULL)
                return refuse(why, size, "%s occurs twice", line);
            values[key] = equals + 1;
        }
    }
    return true;
}

static bool read_u32(const char *text, uint32_t *number)
{
    uint64_t wide;

    if (text == NULL || !vhpc_text_number(text, strlen(text), UINT32_MAX, &wide))
        return false;
    *number = (uint32_t)wide;
    return true;
}

/* The generation must have the same job and restart as the other fields. */
static bool generation_agrees(const struct vhpc_state *state, const char *generation)
{
    char prefix[32];
    size_t length = (size_t)snprintf(prefix, sizeof prefix, "%u.%u.", state->job, state->restart);

    if (generation == NULL || strncmp(generation, prefix, length) != 0)
        return false;
    return strlen(generation + length) == NONCE_DIGITS &&
           strspn(generation + length, "0123456789abcdef") == NONCE_DIGITS;
}

static bool read_status(struct vhpc_state *state, const char *text)
{
    static const char *const names[] = {
        [VHPC_BOOTING] = "booting", [VHPC_READY] = "ready", [VHPC_FAILED] = "failed"};

    for (size_t i = 0; text != NULL && i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(text, names[i]) == 0) {
            state->status = (enum vhpc_status)i;
            return true;
        }
    }
    return false;
}

/* Sockets of further guests are beside the first one: .../g0/run.sock, .../g1/run.sock. */
static bool read_guests(struct vhpc_state *state, const char *text)
{
    size_t length = state->socket == NULL ? 0 : strlen(state->socket);
    size_t end = sizeof FIRST_SOCKET - 1;

    state->guests = 1;
    if (text == NULL)
        return true;
    if (!read_u32(text, &state->guests) || state->guests == 0 ||
        state->guests > VHPC_GUESTS_PER_NODE_MOST)
        return false;
    return state->guests == 1 || state->status != VHPC_READY ||
           (length > end && strcmp(state->socket + length - end, FIRST_SOCKET) == 0);
}

static bool interpret(struct vhpc_state *state, const char *const values[KEYS], char *why,
                      size_t size)
{
    const char *batch = values[BATCH] == NULL ? "guest" : values[BATCH];

    if (values[VERSION] == NULL || strcmp(values[VERSION], "1") != 0)
        return refuse(why, size, "its version is not 1; the vhpc packages of this node differ");
    if (!read_u32(values[JOB], &state->job) || state->job == 0)
        return refuse(why, size, "job is not a job id");
    if (!read_u32(values[RESTART], &state->restart))
        return refuse(why, size, "restart is not a number");
    if (!generation_agrees(state, values[GENERATION]))
        return refuse(why, size, "generation does not agree with job and restart");
    if (!read_status(state, values[STATUS]))
        return refuse(why, size, "status is not booting, ready or failed");
    if (values[IMAGE] == NULL || values[IMAGE][0] == '\0')
        return refuse(why, size, "image is missing");
    state->batch_on_host = strcmp(batch, "host") == 0;
    if (!state->batch_on_host && strcmp(batch, "guest") != 0)
        return refuse(why, size, "batch is neither guest nor host");
    if (state->status == VHPC_READY && (values[SOCKET] == NULL || values[SOCKET][0] != '/' ||
                                        strlen(values[SOCKET]) >= SOCKET_PATH_SIZE))
        return refuse(why, size, "socket is not an absolute path of less than %d bytes",
                      SOCKET_PATH_SIZE);
    if (values[COMMAND_PATH] != NULL && values[COMMAND_PATH][0] != '/')
        return refuse(why, size, "command_path is not an absolute path");
    state->generation = values[GENERATION];
    state->image = values[IMAGE];
    state->socket = values[SOCKET];
    state->commands = values[COMMANDS] == NULL ? "" : values[COMMANDS];
    state->command_path = values[COMMAND_PATH] == NULL ? "" : values[COMMAND_PATH];
    state->warning = values[WARNING] == NULL ? "" : values[WARNING];
    state->attach = values[ATTACH] == NULL ? "" : values[ATTACH];
    if (state->attach[0] != '\0' && strcmp(state->attach, "batch") != 0)
        return refuse(why, size, "attach is not batch");
    state->gpus = values[GPUS] == NULL ? "" : values[GPUS];
    state->cpus = values[CPUS] == NULL ? "" : values[CPUS];
    if (!read_guests(state, values[GUESTS]))
        return refuse(why, size, "guests is not a number of guests that socket allows");
    if (values[COMPONENTS] != NULL && !read_u32(values[COMPONENTS], &state->components))
        return refuse(why, size, "components is not a number");
    state->message = values[MESSAGE] == NULL || values[MESSAGE][0] == '\0'
                         ? "the guests of this job could not be started; ask the site's support"
                         : values[MESSAGE];
    return true;
}

bool vhpc_state_parse(struct vhpc_state *state, const char *bytes, size_t length, char *why,
                      size_t size)
{
    const char *values[KEYS] = {NULL};

    memset(state, 0, sizeof *state);
    if (length == 0)
        return refuse(why, size, "it is empty");
    if (length > VHPC_STATE_MAX)
        return refuse(why, size, "it is larger than %d bytes", VHPC_STATE_MAX);
    state->bytes = malloc(length + 1);
    if (state->bytes == NULL)
        return refuse(why, size, "%s", strerror(ENOMEM));
    memcpy(state->bytes, bytes, length);
    state->bytes[length] = '\0';
    if (!split(state->bytes, length, values, why, size) || !interpret(state, values, why, size)) {
        vhpc_state_free(state);
        return false;
    }
    return true;
}

uint32_t vhpc_state_guest_of(const struct vhpc_state *state, uint32_t local_id, uint32_t tasks)
{
    if (tasks == 0 || local_id >= tasks)
        return 0;
    return (uint32_t)((uint64_t)local_id * state->guests / tasks);
}

bool vhpc_state_socket(const struct vhpc_state *state, uint32_t guest, char *path, size_t size)
{
    size_t stem = strlen(state->socket);
    int length;

    if (guest == 0)
        length = snprintf(path, size, "%s", state->socket);
    else
        length = snprintf(path, size, "%.*s/g%u/run.sock", (int)(stem - sizeof FIRST_SOCKET + 1),
                          state->socket, guest);
    return length > 0 && (size_t)length < size && length < SOCKET_PATH_SIZE;
}

static bool part_of(const char *at, uint32_t guest, char *part, size_t size)
{
    size_t length;

    for (; guest > 0; guest--) {
        at += strcspn(at, ",");
        if (*at == ',')
            at++;
    }
    length = strcspn(at, ",");
    if (length >= size)
        return false;
    memcpy(part, at, length);
    part[length] = '\0';
    return true;
}

bool vhpc_state_gpus(const struct vhpc_state *state, uint32_t guest, char *gpus, size_t size)
{
    return part_of(state->gpus, guest, gpus, size);
}

bool vhpc_state_cpus(const struct vhpc_state *state, uint32_t guest, char *cpus, size_t size)
{
    return part_of(state->cpus, guest, cpus, size);
}

void vhpc_state_free(struct vhpc_state *state)
{
    free(state->bytes);
    memset(state, 0, sizeof *state);
}

static bool is_trusted(int file, uid_t owner, char *why, size_t size)
{
    struct stat about;

    if (fstat(file, &about) != 0)
        return refuse(why, size, "fstat: %s", strerror(errno));
    if (!S_ISREG(about.st_mode))
        return refuse(why, size, "it is not a regular file");
    if (about.st_uid != owner || (about.st_mode & (S_IWGRP | S_IWOTH)) != 0)
        return refuse(why, size, "users other than uid %u may write it", (unsigned)owner);
    return true;
}

/* Read to the end, at most room bytes.  Returns the number of bytes, or -1 with errno. */
static ssize_t read_all(int file, char *bytes, size_t room)
{
    size_t used = 0;

    while (used < room) {
        ssize_t got = read(file, bytes + used, room - used);

        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return -1;
        if (got == 0)
            break;
        used += (size_t)got;
    }
    return (ssize_t)used;
}

static bool load(struct vhpc_state *state, int file, uid_t owner, char *why, size_t size)
{
    char *bytes;
    ssize_t length;
    bool good;

    if (!is_trusted(file, owner, why, size))
        return false;
    bytes = malloc(VHPC_STATE_MAX + 1); /* one byte more, to detect a file that is too large */
    if (bytes == NULL)
        return refuse(why, size, "%s", strerror(ENOMEM));
    length = read_all(file, bytes, VHPC_STATE_MAX + 1);
    if (length < 0)
        good = refuse(why, size, "read: %s", strerror(errno));
    else
        good = vhpc_state_parse(state, bytes, (size_t)length, why, size);
    free(bytes);
    return good;
}

enum vhpc_state_found vhpc_state_read(struct vhpc_state *state, const char *run_dir, uint32_t job,
                                      uid_t owner, char *why, size_t size)
{
    char path[PATH_MAX];
    char reason[VHPC_WHY_SIZE];
    struct stat about;
    int length = snprintf(path, sizeof path, "%s/jobs/%u", run_dir, job);
    int file;
    bool good;

    memset(state, 0, sizeof *state);
    if (length < 0 || (size_t)length + sizeof "/state" > sizeof path) {
        refuse(why, size, "%s: the path is too long", run_dir);
        return VHPC_STATE_BAD;
    }
    /*
     * A job without guests has no directory here.  If even lstat fails (run_dir closed to users by
     * mistake), nothing is known about this job, and jobs that never asked for a guest must not
     * fail.
     */
    if (lstat(path, &about) != 0)
        return VHPC_STATE_ABSENT;
    memcpy(path + length, "/state", sizeof "/state");
    file = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (file < 0 && errno == ENOENT)
        return VHPC_STATE_ABSENT;
    if (file < 0) {
        refuse(why, size, "%s: %s", path, strerror(errno));
        return VHPC_STATE_BAD;
    }
    good = load(state, file, owner, reason, sizeof reason);
    close(file);
    if (!good) {
        refuse(why, size, "%s: %s", path, reason);
        return VHPC_STATE_BAD;
    }
    return VHPC_STATE_OK;
}
