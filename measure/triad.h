/* SPDX-License-Identifier: Apache-2.0 */
/* Memory bandwidth: a[i] = b[i] + s * c[i], one thread on each CPU of the process. */
#ifndef VHPC_MEASURE_TRIAD_H
#define VHPC_MEASURE_TRIAD_H

/* Measure with three arrays of MIB for each thread, ROUNDS times; print the results, return an exit
 * status. */
int triad(long mib, long rounds);

#endif
