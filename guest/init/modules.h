/* SPDX-License-Identifier: Apache-2.0 */
/* Kernel modules of the initrd. */
#ifndef VHPC_INIT_MODULES_H
#define VHPC_INIT_MODULES_H

/* Loads the modules named in /modules/load, in that order, or dies. */
void load_modules(void);

#endif
