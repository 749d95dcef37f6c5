/* SPDX-License-Identifier: Apache-2.0 */
/* The machine as a program sees it: hypervisor, CPU, kernel. */
#ifndef VHPC_MEASURE_MACHINE_H
#define VHPC_MEASURE_MACHINE_H

/* Print the facts, return an exit status. */
int machine(void);

#endif
