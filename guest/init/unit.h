/* SPDX-License-Identifier: Apache-2.0 */
/* The agent as a unit of the image's own systemd. */
#ifndef VHPC_INIT_UNIT_H
#define VHPC_INIT_UNIT_H

/*
 * Writes a unit for the agent, and settings that leave the guest's networks to it, into the new
 * root's /run, which the image's init takes over; or dies. The image itself is not changed.
 * new_root: where the root of the guest is mounted, with a tmpfs on its /run.
 */
void install_unit(const char *new_root);

#endif
