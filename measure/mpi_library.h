/* SPDX-License-Identifier: Apache-2.0 */
/* The machine's MPI library, found when the program runs: this program needs no MPI and no compiler
 * to be installed, and one file works with Open MPI and with all libraries of MPICH's ABI. */
#ifndef VHPC_MEASURE_MPI_LIBRARY_H
#define VHPC_MEASURE_MPI_LIBRARY_H

#include <stdbool.h>
#include <stdint.h>

/* A handle of the library: a pointer in Open MPI, an int in MPICH's ABI.  On x86-64 both are passed
 * in the same register, and a callee that takes an int reads its lower half. */
typedef uintptr_t mpi_handle;

struct mpi {
    int (*init)(int *argc, char ***argv);
    int (*finalize)(void);
    int (*abort)(mpi_handle comm, int code);
    int (*rank)(mpi_handle comm, int *rank);
    int (*size)(mpi_handle comm, int *size);
    int (*barrier)(mpi_handle comm);
    int (*send)(const void *data, int count, mpi_handle type, int to, int tag, mpi_handle comm);
    int (*receive)(void *data, int count, mpi_handle type, int from, int tag, mpi_handle comm,
                   void *status);
    int (*allreduce)(const void *in, void *out, int count, mpi_handle type, mpi_handle operation,
                     mpi_handle comm);
    int (*version)(char *text, int *length);
    mpi_handle world, byte, number, sum, maximum; /* number: MPI_DOUBLE */
};

/* Load the library.  OPEN_MPI_FIRST: where both kinds are installed, try Open MPI before MPICH.
 * False: none was found, and the reason is on stderr. */
bool mpi_load(struct mpi *mpi, bool open_mpi_first);

#endif
