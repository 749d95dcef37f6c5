/* SPDX-License-Identifier: Apache-2.0 */
#ifndef VHPC_SPANK_INHERITED_H
#define VHPC_SPANK_INHERITED_H

/*
 * Remove the variables that describe a guest from this process's environment: a job that is
 * submitted from a guest inherits the environment, and runs in other guests or in none.  Variables
 * that the guest's agent has set for its adapters and its network are listed in VHPC_FABRIC and
 * VHPC_INTERFACE; those that the user has changed stay.
 */
void vhpc_forget_guest(void);

#endif
