/* SPDX-License-Identifier: Apache-2.0 */
/* install_unit: what the image's own init finds in /run. */
#include <fcntl.h>
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "unit.h"

static char root[] = "/tmp/vhpc-unit-XXXXXX";

static void read_file(const char *path, char *text, size_t size)
{
    char full[PATH_MAX];
    int fd;
    ssize_t n;

    assert_true(snprintf(full, sizeof full, "%s%s", root, path) < (int)sizeof full);
    fd = open(full, O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    n = read(fd, text, size - 1);
    assert_true(n > 0);
    text[n] = '\0';
    close(fd);
}

static int prepare(void **state)
{
    char run[PATH_MAX];

    (void)state;
    assert_non_null(mkdtemp(root));
    assert_true(snprintf(run, sizeof run, "%s/run", root) < (int)sizeof run);
    return mkdir(run, 0755);
}

static int clean(void **state)
{
    static const char *const paths[] = {
        "/run/systemd/system/multi-user.target.wants/vhpc-agent.service",
        "/run/systemd/system/multi-user.target.wants",
        "/run/systemd/system/vhpc-agent.service",
        "/run/systemd/system/tmp.mount",
        "/run/systemd/system",
        "/run/systemd/network/00-vhpc.network",
        "/run/systemd/network",
        "/run/systemd",
        "/run/NetworkManager/conf.d/vhpc.conf",
        "/run/NetworkManager/conf.d",
        "/run/NetworkManager",
        "/run",
        "",
    };
    char full[PATH_MAX];

    (void)state;
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        assert_true(snprintf(full, sizeof full, "%s%s", root, paths[i]) < (int)sizeof full);
        assert_int_equal(remove(full), 0); /* fails where anything else was written */
    }
    return 0;
}

static void assert_link(const char *path, const char *expected)
{
    char target[PATH_MAX], full[PATH_MAX];
    ssize_t n;

    assert_true(snprintf(full, sizeof full, "%s%s", root, path) < (int)sizeof full);
    n = readlink(full, target, sizeof target - 1);
    assert_true(n > 0);
    target[n] = '\0';
    assert_string_equal(target, expected);
}

static void the_init_finds_a_unit_that_it_starts(void **state)
{
    char text[2048];

    (void)state;
    install_unit(root);
    read_file("/run/systemd/system/vhpc-agent.service", text, sizeof text);
    assert_non_null(strstr(text, "\nExecStart=/run/vhpc/vhpc-agent\n"));
    assert_non_null(strstr(text, "\nDelegate=yes\n"));
    assert_non_null(strstr(text, "\nFailureAction=poweroff-force\n"));
    assert_link("/run/systemd/system/multi-user.target.wants/vhpc-agent.service",
                "/run/systemd/system/vhpc-agent.service");
    assert_link("/run/systemd/system/tmp.mount", "/dev/null"); /* /tmp is on the root */
    read_file("/run/systemd/network/00-vhpc.network", text, sizeof text);
    assert_non_null(strstr(text, "Unmanaged=yes"));
    read_file("/run/NetworkManager/conf.d/vhpc.conf", text, sizeof text);
    assert_non_null(strstr(text, "unmanaged-devices=*"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_init_finds_a_unit_that_it_starts, prepare, clean),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
