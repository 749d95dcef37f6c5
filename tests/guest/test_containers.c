/* SPDX-License-Identifier: Apache-2.0 */
/* Subordinate ids of the job's user, for containers. */
#include <stdlib.h>
#include <unistd.h>

#include "check.h"
#include "containers.h"
#include "textfile.h"

static char file[] = "/tmp/vhpc-subuid-XXXXXX"; /* mkstemp makes a name of its own */

static int make(void **state)
{
    (void)state;
    int fd = mkstemp(file);
    return fd < 0 ? -1 : close(fd);
}

static int drop(void **state)
{
    (void)state;
    return unlink(file);
}

static void a_user_gets_a_range_outside_of_the_own_ids(void **state)
{
    static const uint32_t ids[] = {589824, 2001, 524288 + 65535};
    (void)state;
    put_text(file, "ubuntu:100000:65536\nalice2:165536:65536");
    assert_int_equal(containers_put_range(file, "alice", ids, 1), 0);
    expect_text(file, "ubuntu:100000:65536\nalice2:165536:65536\nalice:524288:65536\n");
    put_text(file, "");
    assert_int_equal(containers_put_range(file, "alice", ids, 3), 0);
    expect_text(file, "alice:655360:65536\n");
}

static void a_range_of_the_image_stays(void **state)
{
    static const uint32_t id = 2001;
    (void)state;
    put_text(file, "alice:100000:65536\n");
    assert_int_equal(containers_put_range(file, "alice", &id, 1), 0);
    expect_text(file, "alice:100000:65536\n");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_user_gets_a_range_outside_of_the_own_ids),
        cmocka_unit_test(a_range_of_the_image_stays),
    };
    return cmocka_run_group_tests(tests, make, drop);
}
