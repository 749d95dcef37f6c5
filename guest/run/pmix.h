/* SPDX-License-Identifier: Apache-2.0 */
/* The PMIx server of a step, which is in slurmstepd. */
#ifndef VHPC_RUN_PMIX_H
#define VHPC_RUN_PMIX_H

#include "execspec.h"
#include "link.h"

/*
 * The address in PMIX_SERVER_URI*: "NAME;tcp4://127.0.0.1:PORT" or "NAME;tcp6://[::1]:PORT". False
 * if the variables have no address, different ones, or one that is not of the loopback interface.
 */
bool pmix_find(const struct execspec *spec, struct link_server *server);

#endif
