/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The environment of an image, as containers have one. An import writes it as a list: entries
 * NAME=VALUE with a NUL after each, in which names may have all characters that execve takes, and
 * values several lines. People write lines NAME=VALUE, which win.
 *
 * The values replace those of the host where a program enters the guest, for example a PATH. A mark
 * in the environment shows that this has been done: what a script changes afterwards stays, also in
 * its steps on other guests. Variables that the user names in --export are the user's: the plugin
 * lists them in a variable (spank_plugin/exported.h).
 */
#ifndef VHPC_IMAGEENV_H
#define VHPC_IMAGEENV_H

#include <stddef.h>
#include <stdint.h>

#include "execspec.h"

#define IMAGE_ENV_EXPORTED "SLURM_VHPC_EXPORTED" /* NAME,NAME... */
#define IMAGE_ENV_LIST "/etc/vhpc/container-environment"
#define IMAGE_ENV_LINES "/etc/vhpc/environment"

enum { IMAGE_ENV_SIZE_MAX = 131072, IMAGE_ENV_ENTRIES_MAX = 1024 };

struct image_env {
    char **entries; /* NAME=VALUE */
    size_t count;
    size_t users;  /* how many of them, at the end, are the user's and not the image's */
    char *kept;    /* NAME,NAME...: values of the host that those of the image do not replace */
    uint64_t hash; /* of the files */
    char mark[64]; /* the variable that shows that these values have been set */
};

/*
 * Add the content of a file to *e, which begins as zeros. Variables that are the job's are left
 * out; of lines, empty ones and comments too. 0, -ENOMEM, or -EINVAL: an entry is not NAME=VALUE,
 * or there are too many; then *e stays as it was.
 */
typedef int image_env_add(struct image_env *e, const char *data, size_t len);
image_env_add image_env_add_list, image_env_add_lines;
/* Read a file and add it; one that does not exist has no variables. 0 or -errno. */
int image_env_load(struct image_env *e, const char *path, image_env_add *content);
/* Read and add the files of this guest's image; one line on stderr for each that is not used. */
void image_env_load_all(struct image_env *e);
/* The value of a variable, NULL if it is not set. */
const char *image_env_get(const struct image_env *e, const char *name);
/*
 * Take out of srun's environment what its --export sets and the image has set: with ALL, srun lets
 * its environment win, but this value is not the user's.
 */
void image_env_yield(const struct image_env *e, const char *exported, struct execspec *spec);
/* 0 or -ENOMEM. */
int image_env_apply(const struct image_env *e, struct execspec *spec);
void image_env_free(struct image_env *e);

#endif
