/* SPDX-License-Identifier: Apache-2.0 */
/* Locales that an image has, as folders and in an archive that localedef wrote, and that it
 * lacks. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "locales.h"

static char top[64];

static int make_folder(void **state)
{
    (void)state;
    strcpy(top, "/tmp/localeXXXXXX");
    return mkdtemp(top) == NULL;
}

static int remove_folder(void **state)
{
    int status;
    (void)state;
    pid_t child = fork();
    if (child == 0)
        _exit(execlp("rm", "rm", "-r", top, NULL));
    return waitpid(child, &status, 0) == child ? status : -1;
}

static void add_locale(const char *name)
{
    char path[128];
    (void)snprintf(path, sizeof path, "%s/%s", top, name);
    assert_int_equal(mkdir(path, 0755), 0);
}

static const char *replaced(const char *variable, const char *value)
{
    static char found[256];
    char entry[256];
    struct execspec spec = {0};
    (void)snprintf(entry, sizeof entry, "%s=%s", variable, value);
    assert_int_equal(execspec_add_env(&spec, entry), 0);
    assert_int_equal(locales_replace_missing(&spec, top), 0);
    assert_int_equal(spec.envc, 1);
    (void)snprintf(found, sizeof found, "%s", execspec_getenv(&spec, variable));
    execspec_free(&spec);
    return found;
}

/* promise: env.locale */
static void locales_in_folders_are_kept(void **state)
{
    (void)state;
    add_locale("C.utf8");
    add_locale("en_US.utf8");
    add_locale("de_DE.iso885915@euro");
    assert_string_equal(replaced("LANG", "en_US.UTF-8"), "en_US.UTF-8");
    assert_string_equal(replaced("LANG", "en_US.utf8"), "en_US.utf8");
    assert_string_equal(replaced("LC_ALL", "de_DE.ISO-8859-15@euro"), "de_DE.ISO-8859-15@euro");
    assert_string_equal(replaced("LC_TIME", "C"), "C");
    assert_string_equal(replaced("LC_TIME", "POSIX"), "POSIX");
    assert_string_equal(replaced("LC_TIME", "/own/locale"), "/own/locale");
    assert_string_equal(replaced("LANG", ""), "");
    assert_string_equal(replaced("LANG", "C.UTF-8"), "C.UTF-8");
    assert_string_equal(replaced("LANGUAGE", "de_DE:fr_FR"), "de_DE:fr_FR");
}

/* promise: env.locale */
static void missing_locales_become_c_utf8(void **state)
{
    char long_name[300];
    (void)state;
    memset(long_name, 'x', sizeof long_name - 1);
    long_name[150] = '.';
    long_name[200] = '\0';
    /* CentOS 7 has no C.UTF-8 */
    assert_string_equal(replaced("LANG", "de_DE.UTF-8"), "C");
    assert_string_equal(replaced("LANG", "C.UTF-8"), "C");
    add_locale("C.utf8");
    assert_string_equal(replaced("LANG", "de_DE.UTF-8"), "C.UTF-8");
    assert_string_equal(replaced("LC_ALL", "de_DE"), "C.UTF-8");
    assert_string_equal(replaced("LC_IDENTIFICATION", "C.8859"), "C.UTF-8");
    assert_string_equal(replaced("LC_CTYPE", "."), "C.UTF-8");
    assert_string_equal(replaced("LC_CTYPE", long_name), "C.UTF-8");
}

/* promise: env.locale */
static void other_places_of_locales_are_the_users(void **state)
{
    static const char *const places[] = {"LOCPATH=/x", "LOCALE_ARCHIVE=/x"};
    (void)state;
    for (size_t i = 0; i < 2; i++) {
        struct execspec spec = {0};
        assert_int_equal(execspec_add_env(&spec, "LANG=de_DE.UTF-8"), 0);
        assert_int_equal(execspec_add_env(&spec, places[i]), 0);
        assert_int_equal(locales_replace_missing(&spec, top), 0);
        assert_string_equal(execspec_getenv(&spec, "LANG"), "de_DE.UTF-8");
        execspec_free(&spec);
    }
    assert_int_equal(rmdir(top), 0); /* as of musl */
    assert_string_equal(replaced("LANG", "de_DE.UTF-8"), "de_DE.UTF-8");
    assert_int_equal(mkdir(top, 0755), 0);
}

static void write_archive(const void *data, size_t len)
{
    char path[128];
    (void)snprintf(path, sizeof path, "%s/locale-archive", top);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    assert_int_equal(write(fd, data, len), (ssize_t)len);
    assert_int_equal(close(fd), 0);
}

/* struct locarhead in glibc's locale/locarchive.h: magic and names are what is read. */
static void names_of_an_archive_are_read_within_bounds(void **state)
{
    static const char names[] = "C.utf8\0fr_FR.utf8\0fr_FR";
    struct {
        uint32_t head[14];
        char names[sizeof names];
    } archive = {.head = {0xde020109U, 1, 56, 3, 9, 56, sizeof names}};
    (void)state;
    memcpy(archive.names, names, sizeof names);
    write_archive(&archive, sizeof archive);
    assert_string_equal(replaced("LANG", "fr_FR.UTF-8"), "fr_FR.UTF-8");
    assert_string_equal(replaced("LANG", "fr_FR"), "fr_FR");
    assert_string_equal(replaced("LANG", "R.UTF-8"), "C.UTF-8");
    assert_string_equal(replaced("LANG", "fr"), "C.UTF-8");
    archive.head[6] = UINT32_MAX;
    write_archive(&archive, sizeof archive);
    assert_string_equal(replaced("LANG", "fr_FR"), "C");
    archive.head[6] = 1 << 20; /* beyond the end of the file */
    archive.names[sizeof names - 1] = 'x';
    write_archive(&archive, sizeof archive);
    assert_string_equal(replaced("LANG", "fr_FR.UTF-8"), "fr_FR.UTF-8");
    assert_string_equal(replaced("LANG", "fr_FR"), "C.UTF-8");
    archive.head[5] = UINT32_MAX;
    write_archive(&archive, sizeof archive);
    assert_string_equal(replaced("LANG", "fr_FR"), "C");
    archive.head[0] = 0;
    write_archive(&archive, sizeof archive);
    assert_string_equal(replaced("LANG", "fr_FR"), "C");
    write_archive("", 0);
    assert_string_equal(replaced("LANG", "fr_FR"), "C");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(locales_in_folders_are_kept, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(missing_locales_become_c_utf8, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(other_places_of_locales_are_the_users, make_folder,
                                        remove_folder),
        cmocka_unit_test_setup_teardown(names_of_an_archive_are_read_within_bounds, make_folder,
                                        remove_folder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
