/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The environment of an image, as containers have one: a file of lines NAME=VALUE.
 *
 * The values replace those of the host where a program enters the guest, for example a PATH. A mark
 * in the environment shows that this has been done: what a script changes afterwards stays, also in
 * its steps on other guests.
 */
#ifndef VHPC_IMAGEENV_H
#define VHPC_IMAGEENV_H

#include <stddef.h>

#include "execspec.h"

#define IMAGE_ENV_FILE "/etc/vhpc/environment"

enum { IMAGE_ENV_SIZE_MAX = 131072, IMAGE_ENV_ENTRIES_MAX = 1024 };

struct image_env {
    char **entries; /* NAME=VALUE */
    size_t count;
    char mark[64]; /* the variable that shows that these values have been set */
};

/* Reads a file; one that does not exist has no variables. 0 or -errno. */
int image_env_load(struct image_env *e, const char *path);
/*
 * Takes the lines of a file's content. Empty ones, comments and variables that are the job's are
 * left out. 0, -ENOMEM, or -EINVAL: a line is not NAME=VALUE, or there are too many; then *e is
 * empty.
 */
int image_env_parse(struct image_env *e, const char *data, size_t len);
/* 0 or -ENOMEM. */
int image_env_apply(const struct image_env *e, struct execspec *spec);
void image_env_free(struct image_env *e);

#endif
