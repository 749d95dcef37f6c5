/* SPDX-License-Identifier: Apache-2.0 */
/* Decision: Options of a file are read by the submitting command */
#include "environment.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "command.h"
#include "text.h"

/* Longest output: each option once, as --NAME=VALUE. */
#define OUTPUT_SIZE (VHPC_OPTION_COUNT * (VHPC_VALUE_SIZE + 64))

/* The option of this name; VHPC_OPTION_COUNT: no option has it. */
static enum vhpc_option_id find(const char *name)
{
    int id = 0;

    while (id < VHPC_OPTION_COUNT && strcmp(name, vhpc_options[id].name) != 0)
        id++;
    return (enum vhpc_option_id)id;
}

static bool read_line(char *line, struct vhpc_values *values, char *why, size_t size)
{
    char *equals = strchr(line, '=');
    enum vhpc_option_id id;

    if (strncmp(line, "--", 2) != 0 || equals == NULL)
        return false;
    *equals = '\0';
    id = find(line + 2);
    return id != VHPC_OPTION_COUNT && id != VHPC_ENVIRONMENT &&
           vhpc_values_set(values, id, line, equals + 1, why, size);
}

bool vhpc_environment_read(const char *command, const char *file, struct vhpc_values *values,
                           char *why, size_t size)
{
    static char text[OUTPUT_SIZE];
    char *const argv[] = {(char *)command, "environment", "--", (char *)file, NULL};
    enum vhpc_command_end end = vhpc_command_read(argv, text, sizeof text);
    int error = errno;
    char shown[VHPC_SHOWN_SIZE];
    char *rest = text;

    memset(values, 0, sizeof *values);
    vhpc_text_shown(file, shown, sizeof shown);
    snprintf(why, size, "couldn't read the options of %s that %s printed", shown, command);
    if (end == VHPC_COMMAND_NOT_STARTED)
        snprintf(why, size, "couldn't read %s: %s: %s", shown, command, strerror(error));
    if (end == VHPC_COMMAND_FAILED)
        snprintf(why, size, "--vhpc-environment=%s: no job was created (the reason is above)",
                 shown);
    for (char *line; end == VHPC_COMMAND_DONE && (line = strsep(&rest, "\n")) != NULL;)
        if (line[0] != '\0' && !read_line(line, values, why, size))
            return false;
    return end == VHPC_COMMAND_DONE;
}
