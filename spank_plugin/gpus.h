/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Numbers of GPUs: Slurm uses those of the node, programs in a guest use the indexes in the guest.
 * This module does not know Slurm.
 */
#ifndef VHPC_SPANK_GPUS_H
#define VHPC_SPANK_GPUS_H

#include <stdbool.h>
#include <stddef.h>

/* Longest list that is renumbered, with its NUL; longer ones stay as they are. */
#define VHPC_GPUS_SIZE 4096

/*
 * Translate a list of the node's numbers ("5,2") to indexes in the guest.  gpus has the node's
 * numbers in the order of the indexes ("2:5").  False, with out undefined, if the list has anything
 * that is not in gpus.
 */
bool vhpc_gpus_renumber(const char *gpus, const char *list, char *out, size_t size);

/*
 * The same for a variable that may have either the node's numbers or, with ConstrainDevices,
 * indexes of the devices that the job may see.  host is Slurm's own list for this job or step, ""
 * if there is none.  False if the variable must stay as it is: it is not such a list, or it already
 * has indexes in the guest.
 */
bool vhpc_gpus_renumber_visible(const char *gpus, const char *host, const char *list, char *out,
                                size_t size);

/*
 * For one of several guests of a node, each with a part of the job's GPUs: write the indexes of
 * those GPUs of a list that this guest has; there may be none.  visible: the list may have indexes
 * into host, as with ConstrainDevices.  False if it is not a list of numbers.
 */
bool vhpc_gpus_share(const char *gpus, const char *host, const char *list, bool visible, char *out,
                     size_t size);

#endif
