/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Numbers of GPUs: Slurm counts those of the node, programs in a guest those
 * that the guest has.  This module does not know Slurm.
 */
#ifndef VHPC_SPANK_GPUS_H
#define VHPC_SPANK_GPUS_H

#include <stdbool.h>
#include <stddef.h>

/* Longest list that is renumbered, with its NUL; longer ones are left alone. */
#define VHPC_GPUS_SIZE 4096

/*
 * Write a list of the node's numbers ("5,2") as the guest's.  gpus names the
 * node's numbers in the order of the guest's ("2:5").  False, with out
 * undefined, when the list has anything that is not in gpus.
 */
bool vhpc_gpus_renumber(const char *gpus, const char *list, char *out, size_t size);

/*
 * The same for a variable that counts either way: by the node's numbers, or,
 * with ConstrainDevices, by those of the devices that the job may see.  host
 * is Slurm's own list for this job or step, "" when there is none.  False when
 * it must stay as it is: it has no such list, or counts as the guest does.
 */
bool vhpc_gpus_renumber_visible(const char *gpus, const char *host, const char *list, char *out,
                                size_t size);

/*
 * For one of several guests of a node, of which each has a part of the job's
 * GPUs: write those of a list that this guest has, as it counts them; there
 * may be none.  visible says that the list may count by the places in host, as
 * it does with ConstrainDevices.  False when it is no list of numbers.
 */
bool vhpc_gpus_share(const char *gpus, const char *host, const char *list, bool visible, char *out,
                     size_t size);

#endif
