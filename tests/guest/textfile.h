/* SPDX-License-Identifier: Apache-2.0 */
/* Files and folders of tests. */
#ifndef TEXTFILE_H
#define TEXTFILE_H

#include <ftw.h>
#include <stdio.h>

#include "check.h"

static inline void put_text(const char *path, const char *text)
{
    FILE *f = fopen(path, "we");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

static inline void expect_text(const char *path, const char *text)
{
    char got[1024] = "";
    FILE *f = fopen(path, "re");
    assert_non_null(f);
    assert_true(fread(got, 1, sizeof got - 1, f) < sizeof got);
    assert_int_equal(fclose(f), 0);
    assert_string_equal(got, text);
}

static inline int drop_one(const char *path, const struct stat *st, int kind, struct FTW *at)
{
    (void)st;
    (void)kind;
    (void)at;
    return remove(path);
}

/* Remove a folder with all in it; 0 or -1. */
static inline int remove_folder(const char *path)
{
    return nftw(path, drop_one, 16, FTW_DEPTH | FTW_PHYS);
}

#endif
