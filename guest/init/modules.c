/* SPDX-License-Identifier: Apache-2.0 */
#include "modules.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "fatal.h"

#define MODULES_DIR "/modules/"

static void load_module(const char *name, bool optional)
{
    char path[512];
    int fd;

    if (snprintf(path, sizeof path, MODULES_DIR "%s", name) >= (int)sizeof path)
        die(ENAMETOOLONG, "cannot load module %s", name);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        die(errno, "cannot open module %s", path);
    /* EEXIST: built in, or already loaded for another module. */
    if (syscall(SYS_finit_module, fd, "", 0) != 0 && errno != EEXIST && !optional)
        die(errno, "cannot load module %s (image and kernel do not match?)", name);
    close(fd);
}

void load_modules(const char *list)
{
    char line[256];
    FILE *file;

    snprintf(line, sizeof line, MODULES_DIR "%s", list);
    file = fopen(line, "re");
    if (file == NULL) {
        if (errno == ENOENT)
            return; /* a kernel with everything built in */
        die(errno, "cannot open " MODULES_DIR "%s", list);
    }
    while (fgets(line, sizeof line, file) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        /* "-": may fail, for example a driver for some processors only. */
        if (line[0] == '-')
            load_module(line + 1, true);
        else if (line[0] != '\0')
            load_module(line, false);
    }
    if (ferror(file))
        die(errno, "cannot read " MODULES_DIR "%s", list);
    fclose(file);
}
