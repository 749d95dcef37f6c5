/* SPDX-License-Identifier: Apache-2.0 */
/* A script in place of the command vhpc, in a folder of its own. */
#ifndef SCRIPT_H
#define SCRIPT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static char folder[] = "/tmp/vhpc-script-XXXXXX"; /* mkdtemp makes a name of its own */
static char command[64];

static inline int make_folder(void **unused)
{
    (void)unused;
    assert_non_null(mkdtemp(folder));
    snprintf(command, sizeof command, "%s/vhpc", folder);
    return 0;
}

static inline int remove_folder(void **unused)
{
    (void)unused;
    (void)unlink(command);
    return rmdir(folder);
}

/* From now on vhpc is this script. */
static inline void put_script(const char *script)
{
    FILE *file = fopen(command, "w");

    assert_non_null(file);
    fprintf(file, "#!/bin/sh\n%s\n", script);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(chmod(command, 0755), 0);
}

#endif
