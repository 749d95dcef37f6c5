/* SPDX-License-Identifier: Apache-2.0 */
/* Sources in place of an image's name: what is one, and what the plugin makes of vhpc's answers. */
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "image.h"
#include "options.h"
#include "script.h"
#include "source.h"
#include "text.h"

#define DIGEST "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

static char image[VHPC_VALUE_SIZE];
static char why[VHPC_WHY_SIZE];

static bool resolves(const char *script, const char *source)
{
    put_script(script);
    why[0] = image[0] = '\0';
    return vhpc_source_resolve(command, source, image, why, sizeof why);
}

static void a_source_has_a_kind_and_a_path(void **unused)
{
    static const char *const sources[] = {
        "docker://debian:13",
        ("docker://r.example:5000/a/b@" DIGEST),
        "oci:/a/b:c",
        "oci-archive:./tools.tar",
        "qcow2:./a.qcow2",
        "raw:/a.raw",
        "vmdk:/a",
        "docker-archive:/a.tar:x/y:1",
        "tar:/a.tar.gz",
        "dir:../root",
    };
    static const char *const names[] = {
        "",        "debian-minimal", "oci:latest",    "oci",   "docker:27",   "docker://",
        "tar:1",   "a:/b",           "own/docker:27", "dir:x", "dockers://x", ":/x",
        "oci-:/x", "docker:/x",
    };

    (void)unused;
    for (size_t i = 0; i < sizeof sources / sizeof sources[0]; i++)
        assert_true(vhpc_is_source(sources[i]));
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        assert_false(vhpc_is_source(names[i]));
}

static void a_source_is_an_option_value_as_it_is(void **unused)
{
    static struct vhpc_values values;

    (void)unused;
    assert_true(vhpc_values_set(&values, VHPC_IMAGE, "x", "docker://Debian:13", why, sizeof why));
    assert_string_equal(values.text[VHPC_IMAGE], "docker://Debian:13");
    assert_false(vhpc_values_set(&values, VHPC_IMAGE, "x", "docker://a\nb", why, sizeof why));
}

static void the_image_is_what_vhpc_prints(void **unused)
{
    (void)unused;
    assert_true(resolves("[ \"$*\" = 'image resolve -- docker://a b' ] && echo own/a@" DIGEST,
                         "docker://a b"));
    assert_string_equal(image, "own/a:latest@" DIGEST);
    /* the command does not read what is for the script of sbatch */
    assert_true(resolves("[ -z \"$(cat)\" ] && echo own/a", "docker://a"));
}

static void a_command_that_fails_creates_no_job(void **unused)
{
    (void)unused;
    assert_false(resolves("echo own/a; exit 1", "docker://\x1b[1mx"));
    assert_string_equal(why, "there is no image of docker://?[1mx, so no job was created (the "
                             "reason is above)");
    assert_false(resolves("echo own/a; kill -9 $$", "docker://a"));
    assert_string_equal(image, "");
    assert_false(vhpc_source_resolve("/nonexistent/vhpc", "docker://a", image, why, sizeof why));
    assert_string_equal(
        why, "couldn't make an image of docker://a: /nonexistent/vhpc: No such file or directory");
}

static void the_list_is_what_vhpc_prints(void **unused)
{
    char text[64];
    int ends[2];
    pid_t pid;

    (void)unused;
    (void)resolves("[ \"$*\" = 'image names' ] && echo a:latest; exit 3", "docker://a");
    assert_int_equal(pipe(ends), 0);
    pid = fork();
    if (pid == 0) {
        (void)dup2(ends[1], STDOUT_FILENO);
        vhpc_source_list(command, why, sizeof why);
        _exit(99);
    }
    (void)close(ends[1]);
    assert_int_equal(read(ends[0], text, sizeof text), 9);
    assert_memory_equal(text, "a:latest\n", 9);
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(WEXITSTATUS(status), 3);
    (void)close(ends[0]);
    vhpc_source_list("/nonexistent/vhpc", why, sizeof why);
    assert_string_equal(why,
                        "couldn't list the images: /nonexistent/vhpc: No such file or directory");
}

static void an_image_named_list_has_a_tag(void **unused)
{
    static struct vhpc_values values;

    (void)unused;
    assert_true(vhpc_values_set(&values, VHPC_IMAGE, "x", "list", why, sizeof why));
    assert_string_equal(values.text[VHPC_IMAGE], "list");
    assert_true(vhpc_values_set(&values, VHPC_IMAGE, "x", "list:latest", why, sizeof why));
    assert_string_equal(values.text[VHPC_IMAGE], "list:latest");
}

static void an_answer_that_is_no_name_creates_no_job(void **unused)
{
    static const char *const scripts[] = {
        "true",
        "echo",
        "echo docker://b",
        "echo a b",
        "echo list",
        "printf 'own/a\\0b'",
        "head -c 1024 /dev/zero | tr '\\0' a",
    };

    (void)unused;
    for (size_t i = 0; i < sizeof scripts / sizeof scripts[0]; i++) {
        assert_false(resolves(scripts[i], "docker://a"));
        assert_non_null(strstr(why, "couldn't read the name of the image of docker://a that /tmp"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_source_has_a_kind_and_a_path),
        cmocka_unit_test(a_source_is_an_option_value_as_it_is),
        cmocka_unit_test(the_image_is_what_vhpc_prints),
        cmocka_unit_test(the_list_is_what_vhpc_prints),
        cmocka_unit_test(an_image_named_list_has_a_tag),
        cmocka_unit_test(a_command_that_fails_creates_no_job),
        cmocka_unit_test(an_answer_that_is_no_name_creates_no_job),
    };

    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
