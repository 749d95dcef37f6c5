/* SPDX-License-Identifier: Apache-2.0 */
#include "mpi_library.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "measure.h"

/* Handles of MPICH's ABI (mpi.h of MPICH 3.1 to 4; Intel MPI, MVAPICH and Cray MPICH have the
 * same). */
#define MPICH_COMM_WORLD 0x44000000U
#define MPICH_BYTE 0x4c00010dU
#define MPICH_DOUBLE 0x4c00080bU
#define MPICH_MAX 0x58000001U
#define MPICH_SUM 0x58000003U

/* Names that release 1.10 to 5 of Open MPI, and libraries of MPICH's ABI have. */
static const char *const OPEN_MPI[] = {"libmpi.so.40", "libmpi.so.20", "libmpi.so.12", NULL};
static const char *const MPICH[] = {"libmpich.so.12", "libmpi_cray.so.12", "libmpi.so.12", NULL};

static void *open_one(const char *const *names, bool open_mpi)
{
    for (; *names != NULL; names++) {
        /* Open MPI's components need the library's symbols */
        void *library = dlopen(*names, RTLD_NOW | RTLD_GLOBAL);
        if (library != NULL && (dlsym(library, "ompi_mpi_comm_world") != NULL) == open_mpi) {
            return library;
        }
        if (library != NULL) {
            (void)dlclose(library);
        }
    }
    return NULL;
}

/* Functions by dlsym: POSIX guarantees that the pointer can be converted, C does not. */
static bool functions(struct mpi *mpi, void *library)
{
    const struct {
        const char *name;
        void *place;
    } table[] = {
        {"MPI_Init", &mpi->init},           {"MPI_Finalize", &mpi->finalize},
        {"MPI_Abort", &mpi->abort},         {"MPI_Comm_rank", &mpi->rank},
        {"MPI_Comm_size", &mpi->size},      {"MPI_Barrier", &mpi->barrier},
        {"MPI_Send", &mpi->send},           {"MPI_Recv", &mpi->receive},
        {"MPI_Allreduce", &mpi->allreduce}, {"MPI_Get_library_version", &mpi->version},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        void *function = dlsym(library, table[i].name);
        if (function == NULL) {
            measure_complain(0, "the MPI library has no %s", table[i].name);
            return false;
        }
        memcpy(table[i].place, &function, sizeof function);
    }
    return true;
}

static bool handles_of_open_mpi(struct mpi *mpi, void *library)
{
    const struct {
        const char *name;
        mpi_handle *place;
    } table[] = {
        {"ompi_mpi_comm_world", &mpi->world}, {"ompi_mpi_byte", &mpi->byte},
        {"ompi_mpi_double", &mpi->number},    {"ompi_mpi_op_sum", &mpi->sum},
        {"ompi_mpi_op_max", &mpi->maximum},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        *table[i].place = (mpi_handle)dlsym(library, table[i].name);
        if (*table[i].place == 0) {
            measure_complain(0, "the MPI library has no %s", table[i].name);
            return false;
        }
    }
    return true;
}

bool mpi_load(struct mpi *mpi, bool open_mpi_first)
{
    for (int attempt = 0; attempt < 2; attempt++) {
        bool open_mpi = open_mpi_first == (attempt == 0);
        void *library = open_one(open_mpi ? OPEN_MPI : MPICH, open_mpi);
        if (library == NULL) {
            continue;
        }
        if (open_mpi) {
            return functions(mpi, library) && handles_of_open_mpi(mpi, library);
        }
        mpi->world = MPICH_COMM_WORLD;
        mpi->byte = MPICH_BYTE;
        mpi->number = MPICH_DOUBLE;
        mpi->sum = MPICH_SUM;
        mpi->maximum = MPICH_MAX;
        return functions(mpi, library);
    }
    measure_complain(
        0, "no MPI library is installed or in LD_LIBRARY_PATH (tried libmpi.so.40, libmpi.so.20, "
           "libmpi.so.12, libmpich.so.12, libmpi_cray.so.12)");
    return false;
}
