/* SPDX-License-Identifier: Apache-2.0 */
/* The name of an image, as users write it. */
#ifndef VHPC_SPANK_IMAGE_H
#define VHPC_SPANK_IMAGE_H

#include <stdbool.h>

#include "bounds.h"

/* In place of a name: the images are listed, and no job is created.  An image of this name is
 * "list:latest". */
#define VHPC_IMAGE_LIST "list"
/* Before the name of a checkpoint in place of an image (vhpc_slurm.hooks.slurmctld). */
#define VHPC_OF_CHECKPOINT "checkpoint://"

/* docker://NAME, or one of the kinds of `vhpc image import` with a slash in its path. */
bool vhpc_is_source(const char *text);

/*
 * [own/]NAME[:TAG][@DIGEST] -> [own/]NAME:TAG[@DIGEST]; an absent tag means latest. With a digest
 * the job gets the image of that digest, whatever the name points to; with own/ the image is in the
 * user's own catalogue.  A source stays as it is until the job is created (allocator.c).  why is
 * set only if the source is not correct.
 */
bool vhpc_image_parse(const char *given, char value[VHPC_VALUE_SIZE], const char **why);

#endif
