/* SPDX-License-Identifier: Apache-2.0 */
/* The environment of a job that is submitted from a guest does not describe that guest. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "inherited.h"

/* promise: job.inherit */
static void variables_of_a_guest_are_removed(void **state)
{
    static const char *const gone[] = {
        "VHPC_JOB_GENERATION",
        "VHPC_JOB_IMAGE",
        "VHPC_JOB_GUESTS",
        "VHPC_GUEST",
        "VHPC_NODELIST",
        "VHPC_PKEY",
        "VHPC_SESSION",
        "VHPC_CWD",
        "VHPC_HOSTFILE",
        "VHPC_MACHINEFILE",
        "VHPC_FABRIC",
        "VHPC_INTERFACE",
        "FI_TCP_IFACE",
        "OMPI_MCA_btl_tcp_if_include",
        "NCCL_TOPO_FILE",
        "UCX_NET_DEVICES",
        "NCCL_IB_HCA",
        "VHPC_HOST_CUDA_VISIBLE_DEVICES",
        "NCCL_IB_PKEY",
        "VHPC_HOST_SLURM_JOB_GPUS",
        "VHPC_MEM_MB",
        "VHPC_CLUSTER_NAME",
        "VHPC_CLUSTER_JOB",
        "VHPC_CLUSTER_HOSTFILE",
        "VHPC_CLUSTER_MACHINEFILE",
    };

    (void)state;
    for (size_t i = 0; i < sizeof gone / sizeof gone[0]; i++)
        assert_int_equal(setenv(gone[i], "x", 1), 0);
    setenv("NCCL_TOPO_FILE", "/run/vhpc/nccl-topology.xml", 1);
    setenv("UCX_NET_DEVICES", "mlx5_0:1,mlx5_1:1", 1);
    setenv("NCCL_IB_HCA", "=mlx5_0:1", 1);
    setenv("NCCL_IB_PKEY", "", 1);
    setenv("VHPC_FABRIC",
           " UCX_NET_DEVICES=mlx5_0:1,mlx5_1:1 NCCL_IB_HCA==mlx5_0:1  NCCL_IB_PKEY=", 1);
    setenv("FI_TCP_IFACE", "vhpc0", 1);
    setenv("OMPI_MCA_btl_tcp_if_include", "vhpc0", 1);
    setenv("VHPC_INTERFACE",
           "FI_TCP_IFACE=vhpc0 OMPI_MCA_btl_tcp_if_include=vhpc0 UCX_NET_DEVICES=vhpc0", 1);
    vhpc_forget_guest();
    for (size_t i = 0; i < sizeof gone / sizeof gone[0]; i++)
        assert_null(getenv(gone[i]));
}

static void variables_of_the_user_stay(void **state)
{
    (void)state;
    setenv("VHPC_IMAGE", "debian", 1);
    setenv("CUDA_VISIBLE_DEVICES", "0", 1);
    setenv("NCCL_TOPO_FILE", "/home/alice/topology.xml", 1);
    setenv("UCX_NET_DEVICES", "mlx5_0:1,mlx5_1:1", 1);
    setenv("UCX_IB_PKEY", "0x8001", 1);
    setenv("VHPC_FABRIC", "UCX_NET_DEVICES=mlx5_0:1 UCX_IB_PKEY=0x80012 NOT_SET=5 odd", 1);
    setenv("NCCL_SOCKET_IFNAME", "eth0", 1);
    setenv("VHPC_INTERFACE", "NCCL_SOCKET_IFNAME=vhpc0 UCX_NET_DEVICES=vhpc0", 1);
    vhpc_forget_guest();
    assert_string_equal(getenv("NCCL_SOCKET_IFNAME"), "eth0");
    assert_string_equal(getenv("VHPC_IMAGE"), "debian");
    assert_string_equal(getenv("CUDA_VISIBLE_DEVICES"), "0");
    assert_string_equal(getenv("NCCL_TOPO_FILE"), "/home/alice/topology.xml");
    assert_string_equal(getenv("UCX_NET_DEVICES"), "mlx5_0:1,mlx5_1:1");
    assert_string_equal(getenv("UCX_IB_PKEY"), "0x8001");
}

static void an_overlong_list_is_harmless(void **state)
{
    static char text[4096];

    (void)state;
    memset(text, 'A', sizeof text - 1);
    text[2000] = '=';
    setenv("VHPC_FABRIC", text, 1);
    vhpc_forget_guest();
    assert_null(getenv("VHPC_FABRIC"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(variables_of_a_guest_are_removed),
        cmocka_unit_test(variables_of_the_user_stay),
        cmocka_unit_test(an_overlong_list_is_harmless),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
