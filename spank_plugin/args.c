/* SPDX-License-Identifier: Apache-2.0 */
#include "args.h"

#include <stdio.h>
#include <string.h>

const struct vhpc_arg vhpc_arg_table[VHPC_ARG_COUNT] = {
    {
        .name = "run_dir",
        .initial = "/run/vhpc",
        .detail = "Directory of sockets and state files of running jobs on a node.",
        .offset = offsetof(struct vhpc_args, run_dir),
    },
    {
        .name = "libexec",
        .initial = "/usr/libexec/vhpc",
        .detail = "Directory of vhpc-run on a node.",
        .offset = offsetof(struct vhpc_args, libexec),
    },
    {
        .name = "command",
        .initial = VHPC_COMMAND,
        .detail = "The command vhpc, which imports the source of an image when a job is created, "
                  "and says how far guests are while srun and salloc wait for them.",
        .offset = offsetof(struct vhpc_args, command),
    },
};

static bool is_path(const char *text)
{
    size_t length = strlen(text);

    return length > 1 && length < VHPC_DIR_SIZE && text[0] == '/' &&
           vhpc_text_is_plain(text, length) && strstr(text, "/../") == NULL;
}

static const struct vhpc_arg *find(const char *word, size_t length)
{
    for (size_t i = 0; i < VHPC_ARG_COUNT; i++)
        if (strlen(vhpc_arg_table[i].name) == length &&
            strncmp(vhpc_arg_table[i].name, word, length) == 0)
            return &vhpc_arg_table[i];
    return NULL;
}

bool vhpc_args_read(struct vhpc_args *args, int count, char *const *words)
{
    char shown[VHPC_SHOWN_SIZE];
    char first[VHPC_WHY_SIZE] = "";

    memset(args, 0, sizeof *args);
    for (size_t i = 0; i < VHPC_ARG_COUNT; i++)
        snprintf((char *)args + vhpc_arg_table[i].offset, VHPC_DIR_SIZE, "%s",
                 vhpc_arg_table[i].initial);
    for (int i = 0; i < count; i++) {
        const char *equals = strchr(words[i], '=');
        const struct vhpc_arg *arg =
            equals == NULL ? NULL : find(words[i], (size_t)(equals - words[i]));

        if (arg != NULL && is_path(equals + 1)) {
            snprintf((char *)args + arg->offset, VHPC_DIR_SIZE, "%s", equals + 1);
            continue;
        }
        if (first[0] != '\0')
            continue;
        vhpc_text_shown(words[i], shown, sizeof shown);
        if (arg == NULL)
            snprintf(first, sizeof first,
                     "plugstack.conf: unknown argument '%s' of vhpc.so; see vhpc-spank(8)", shown);
        else
            snprintf(first, sizeof first,
                     "plugstack.conf: '%s': an absolute path of less than %d bytes is expected",
                     shown, VHPC_DIR_SIZE);
    }
    memcpy(args->wrong, first, sizeof args->wrong);
    return first[0] == '\0';
}
