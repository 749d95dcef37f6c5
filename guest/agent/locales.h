/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Locales of a submission that an image lacks: perl and bash would warn at each start. Programs get
 * C.UTF-8 instead, or C if the image lacks that too.
 */
#ifndef VHPC_LOCALES_H
#define VHPC_LOCALES_H

#include "execspec.h"

/* glibc's; an image without it, as of musl, keeps its variables. */
#define LOCALES_FOLDER "/usr/lib/locale"

/*
 * Replace values of LANG and LC_* that the folder lacks, with one line on stderr for the first one
 * of this process. LOCPATH and LOCALE_ARCHIVE name other places, so with them nothing is changed. 0
 * or -ENOMEM.
 */
int locales_replace_missing(struct execspec *spec, const char *folder);

#endif
