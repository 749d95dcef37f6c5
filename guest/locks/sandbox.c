/* SPDX-License-Identifier: Apache-2.0 */
#include "sandbox.h"

#include <errno.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The first version of linux/landlock.h, which headers of older systems do not have. */
enum {
    CREATE_RULESET = 444,
    ADD_RULE = 445,
    RESTRICT_SELF = 446,
    PATH_BENEATH = 1,
    WRITE_FILE = 1 << 1,
    READ_FILE = 1 << 2,
    READ_DIR = 1 << 3,
    ALL = (1 << 13) - 1,
};

struct beneath {
    uint64_t allowed;
    int32_t parent;
} __attribute__((packed));

int sandbox_enter(const struct locks_server *s)
{
    const uint64_t handled = ALL;
    int rules = (int)syscall(CREATE_RULESET, &handled, sizeof handled, 0);
    if (rules < 0)
        return -errno;
    int rc = 0;
    for (size_t i = 0; i < s->shares && rc == 0; i++) {
        struct beneath one = {.allowed = READ_FILE | READ_DIR, .parent = s->share[i].root};
        if (!s->share[i].read_only)
            one.allowed |= WRITE_FILE;
        rc = syscall(ADD_RULE, rules, PATH_BENEATH, &one, 0) < 0 ? -errno : 0;
    }
    if (rc == 0 &&
        (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || syscall(RESTRICT_SELF, rules, 0) < 0))
        rc = -errno;
    (void)close(rules);
    return rc;
}
