/* SPDX-License-Identifier: Apache-2.0 */
#include "rootfiles.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <unistd.h>

#define VIEW "/run/vhpc"

enum { CANNOT_RUN = 126 };

int rootfiles_main(char **argv)
{
    /* the view is in a mount namespace of this process only, which ends with the command */
    if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
        mount("/", VIEW, NULL, MS_BIND, NULL) < 0 || chdir(VIEW) < 0)
        (void)fprintf(stderr, "vhpc-agent: cannot open the guest's root: %s\n", strerror(errno));
    else if (execvp(argv[0], argv) < 0)
        (void)fprintf(stderr, "vhpc-agent: %s: %s\n", argv[0], strerror(errno));
    return CANNOT_RUN;
}
