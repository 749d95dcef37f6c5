/* SPDX-License-Identifier: Apache-2.0 */
/* Which interpreter a program's file names: ELF files of both sizes as elf(5) has them, and damaged
 * ones. */
#include <elf.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "interpreter.h"

static char found[256];

static enum interpreter_kind in(const void *bytes, size_t size)
{
    int fd = memfd_create("program", MFD_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, bytes, size), size);
    found[0] = '\0';
    enum interpreter_kind kind = interpreter_of(fd, found, sizeof found);
    (void)close(fd);
    return kind;
}

static struct {
    Elf32_Ehdr head;
    Elf32_Phdr segment[2];
    char loader[32];
} narrow = {
    .head = {.e_ident = {ELFMAG0, ELFMAG1, ELFMAG2, ELFMAG3, ELFCLASS32},
             .e_phoff = 52,
             .e_phnum = 2},
    .segment = {{.p_type = PT_PHDR}, {.p_type = PT_INTERP, .p_offset = 52 + 2 * 32}},
    .loader = "/lib/ld-linux.so.2",
};

static struct wide {
    Elf64_Ehdr head;
    Elf64_Phdr segment[2];
    char loader[32];
} wide = {
    .head = {.e_ident = {ELFMAG0, ELFMAG1, ELFMAG2, ELFMAG3, ELFCLASS64},
             .e_phoff = 64,
             .e_phnum = 2},
    .segment = {{.p_type = PT_LOAD}, {.p_type = PT_INTERP, .p_offset = 64 + 2 * 56}},
    .loader = "/lib64/ld-linux-x86-64.so.2",
};

static void an_elf_file_of_either_size_has_its_loader(void **state)
{
    (void)state;
    assert_int_equal(in(&narrow, sizeof narrow), INTERPRETER_ELF);
    assert_string_equal(found, "/lib/ld-linux.so.2");
    assert_int_equal(in(&wide, sizeof wide), INTERPRETER_ELF);
    assert_string_equal(found, "/lib64/ld-linux-x86-64.so.2");
}

static void a_static_program_and_a_damaged_one_have_none(void **state)
{
    (void)state;
    struct wide other = wide;
    other.segment[1].p_type = PT_NOTE;
    assert_int_equal(in(&other, sizeof other), INTERPRETER_NONE);
    other = wide;
    other.head.e_phoff = UINT64_MAX - 8;
    assert_int_equal(in(&other, sizeof other), INTERPRETER_NONE);
    other = wide;
    other.segment[1].p_offset = 1ULL << 63;
    assert_int_equal(in(&other, sizeof other), INTERPRETER_NONE);
    other = wide;
    other.head.e_phnum = UINT16_MAX;
    other.segment[1].p_type = PT_NULL;
    assert_int_equal(in(&other, sizeof other), INTERPRETER_NONE);
    assert_int_equal(in(&wide, sizeof wide.head + 10), INTERPRETER_NONE);
    assert_int_equal(in(&wide, sizeof wide - sizeof wide.loader), INTERPRETER_NONE);
    assert_int_equal(in("", 0), INTERPRETER_NONE);
    assert_int_equal(in("\177ELF", 4), INTERPRETER_NONE);
}

static void a_script_has_the_rest_of_its_first_line(void **state)
{
    (void)state;
    assert_int_equal(in("#! /bin/sh -e\necho", 18), INTERPRETER_SCRIPT);
    assert_string_equal(found, " /bin/sh -e");
    assert_int_equal(in("#!", 2), INTERPRETER_NONE);
    assert_int_equal(in("echo #!/bin/sh\n", 15), INTERPRETER_NONE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_elf_file_of_either_size_has_its_loader),
        cmocka_unit_test(a_static_program_and_a_damaged_one_have_none),
        cmocka_unit_test(a_script_has_the_rest_of_its_first_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
