/* SPDX-License-Identifier: Apache-2.0 */
/* Environment files: what the plugin makes of the options that vhpc prints. */
#include <string.h>

#include "environment.h"
#include "script.h"
#include "text.h"

static char why[VHPC_WHY_SIZE];
static struct vhpc_values values;

static bool reads(const char *script, const char *file)
{
    put_script(script);
    memset(&values, 1, sizeof values);
    why[0] = '\0';
    return vhpc_environment_read(command, file, &values, why, sizeof why);
}

static void options_are_what_vhpc_prints(void **unused)
{
    (void)unused;
    assert_true(reads("[ \"$*\" = 'environment -- my file' ] && echo --vhpc-image=debian && "
                      "echo --vhpc-env=A=1,B=x=y && echo --vhpc-mem-reserve=2G",
                      "my file"));
    assert_true(values.set[VHPC_IMAGE] && values.set[VHPC_ENV] && values.set[VHPC_MEM_RESERVE]);
    assert_string_equal(values.text[VHPC_IMAGE], "debian:latest");
    assert_string_equal(values.text[VHPC_ENV], "A=1,B=x=y");
    assert_string_equal(values.text[VHPC_MEM_RESERVE], "2048");
    assert_false(values.set[VHPC_NETWORK]);
}

static void an_empty_file_has_no_options(void **unused)
{
    (void)unused;
    assert_true(reads("true", "a"));
    for (int id = 0; id < VHPC_OPTION_COUNT; id++)
        assert_false(values.set[id]);
}

static void a_command_that_fails_creates_no_job(void **unused)
{
    (void)unused;
    assert_false(reads("echo --vhpc-image=a; exit 1", "a\x1b.toml"));
    assert_string_equal(why,
                        "--vhpc-environment=a?.toml: no job was created (the reason is above)");
    assert_false(vhpc_environment_read("/nonexistent/vhpc", "a", &values, why, sizeof why));
    assert_string_equal(why, "couldn't read a: /nonexistent/vhpc: No such file or directory");
}

static void a_wrong_value_is_refused_with_its_option(void **unused)
{
    (void)unused;
    assert_false(reads("echo --vhpc-vfs=x", "a"));
    assert_non_null(strstr(why, "--vhpc-vfs=x: a whole number from 0 to 256 is expected"));
}

static void other_output_is_refused(void **unused)
{
    static const char *const scripts[] = {
        "echo hello",
        "echo --vhpc-image",
        "echo --vhpc-none=1",
        "echo --vhpc-environment=b",
        "echo vhpc-image=a",
        "printf -- '--vhpc-image=a\\0b\\n'",
        "head -c 100000 /dev/zero | tr '\\0' x",
    };

    (void)unused;
    for (size_t i = 0; i < sizeof scripts / sizeof scripts[0]; i++) {
        assert_false(reads(scripts[i], "a"));
        assert_non_null(strstr(why, "couldn't read the options of a that "));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(options_are_what_vhpc_prints),
        cmocka_unit_test(an_empty_file_has_no_options),
        cmocka_unit_test(a_command_that_fails_creates_no_job),
        cmocka_unit_test(a_wrong_value_is_refused_with_its_option),
        cmocka_unit_test(other_output_is_refused),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
