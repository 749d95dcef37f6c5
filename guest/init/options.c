/* SPDX-License-Identifier: Apache-2.0 */
#include "options.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PREFIX "vhpc."
#define ROOTWAIT_MAX_S 600UL

static int copy_value(char *target, const char *key, const char *value, char *error,
                      size_t error_size)
{
    const size_t length = strlen(value);

    if (length == 0 || length >= OPTION_SIZE) {
        snprintf(error, error_size, "%s= has a value of %zu characters, 1 to %d are allowed", key,
                 length, OPTION_SIZE - 1);
        return -1;
    }
    memcpy(target, value, length + 1);
    return 0;
}

static int parse_seconds(unsigned *seconds, const char *key, const char *value, char *error,
                         size_t error_size)
{
    char *end = NULL;
    unsigned long number;

    errno = 0;
    number = strtoul(value, &end, 10);
    if (!isdigit((unsigned char)value[0]) || *end != '\0' || errno != 0 ||
        number > ROOTWAIT_MAX_S) {
        snprintf(error, error_size, "%s=%s is not a number of seconds up to %lu", key, value,
                 ROOTWAIT_MAX_S);
        return -1;
    }
    *seconds = (unsigned)number;
    return 0;
}

static int parse_word(struct init_options *options, char *word, char *error, size_t error_size)
{
    char *value = strchr(word, '=');

    if (value == NULL) {
        snprintf(error, error_size, "%s needs a value on the kernel command line", word);
        return -1;
    }
    *value++ = '\0';
    if (strcmp(word, "vhpc.root") == 0)
        return copy_value(options->root, word, value, error, error_size);
    if (strcmp(word, "vhpc.rootfstype") == 0)
        return copy_value(options->rootfstype, word, value, error, error_size);
    if (strcmp(word, "vhpc.disk") == 0)
        return copy_value(options->disk, word, value, error, error_size);
    /* The agent mounts it; an older vhpc-init ignores it, and the agent reports that vhpc-init is
     * too old. */
    if (strcmp(word, "vhpc.agent.disk") == 0)
        return copy_value(options->mounted_disk, word, value, error, error_size);
    if (strcmp(word, "vhpc.overlay_size") == 0)
        return copy_value(options->overlay_size, word, value, error, error_size);
    if (strcmp(word, "vhpc.rootwait") == 0)
        return parse_seconds(&options->rootwait_s, word, value, error, error_size);
    if (strcmp(word, "vhpc.verity") == 0) {
        if (verity_parse(&options->verity, value))
            return 0;
        snprintf(error, error_size, "vhpc.verity=%s is not BLOCKS:ROOTHASH", value);
        return -1;
    }
    if (strcmp(word, "vhpc.init") == 0) {
        if (strcmp(value, "agent") != 0 && value[0] != '/') {
            snprintf(error, error_size, "vhpc.init=%s is neither agent nor an absolute path",
                     value);
            return -1;
        }
        return copy_value(options->init, word, value, error, error_size);
    }
    /* The agent may have further parameters of its own; all others must be known here. */
    if (strncmp(word, "vhpc.agent.", strlen("vhpc.agent.")) == 0)
        return 0;
    snprintf(error, error_size, "%s= on the kernel command line is unknown", word);
    return -1;
}

int options_parse(struct init_options *options, const char *cmdline, char *error, size_t error_size)
{
    char *copy = strdup(cmdline);
    char *rest = copy;
    const char *blanks = " \t\n";
    int result = 0;

    *options = (struct init_options){
        .rootfstype = "erofs", .init = "agent", .overlay_size = "50%", .rootwait_s = 30};
    if (copy == NULL) {
        snprintf(error, error_size, "out of memory");
        return -1;
    }
    for (char *word; result == 0 && (word = strsep(&rest, blanks)) != NULL;) {
        if (strncmp(word, PREFIX, strlen(PREFIX)) == 0)
            result = parse_word(options, word, error, error_size);
    }
    free(copy);
    if (result == 0 && options->root[0] == '\0') {
        snprintf(error, error_size, "vhpc.root= is missing from the kernel command line");
        result = -1;
    }
    return result;
}
