/* SPDX-License-Identifier: Apache-2.0 */
/* Kernel modules of the initrd. */
#ifndef VHPC_INIT_MODULES_H
#define VHPC_INIT_MODULES_H

/* Lists of modules in /modules. */
#define MODULES_ALWAYS "load"       /* for every guest */
#define MODULES_FOR_DISK "disk"     /* for a guest with a disk of its own */
#define MODULES_FOR_VERITY "verity" /* for a guest whose root has a hash tree */

/* Loads the modules named in a list, in that order, or dies. Without the list there is nothing to
 * load. */
void load_modules(const char *list);

#endif
