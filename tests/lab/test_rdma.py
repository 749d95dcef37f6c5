# SPDX-License-Identifier: Apache-2.0
"""Programs that use verbs, in guests of image debian-rdma, with soft-RoCE on the job's network as adapter.

No machine here has an adapter. soft-RoCE (rdma_rxe) offers the same device nodes, netlink messages and
verbs; root of the guest creates it, and everything else runs with the user's rights.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pytest
from cluster import Lab, publish
from mpi_program import RING, ring_lines

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.results, pytest.mark.timeout(2400)]

IMAGE = "debian-rdma"
# A CPU per node, which two ranks share: emulated CPUs that spin slow down all others.
OPTIONS = ("-N2", "--ntasks-per-node=2", "--overcommit", "--mem=900", "--vhpc-network=job")
EACH = "srun -N2 -n2 --ntasks-per-node=1"
BYTES = 9_000_000
"""More than the usual limit of locked memory, which is 8 MiB."""
WAYS = {
    "srun-pmix": ("openmpi", "srun -K1 --mpi=pmix -n4"),
    "mpirun-openmpi": ("openmpi", "mpirun.openmpi --map-by ppr:2:node:OVERSUBSCRIBE -n 4"),
    "srun-pmi2": ("mpich", "srun -K1 --mpi=pmi2 -n4"),
    "mpirun-mpich": ("mpich", "mpirun.mpich -ppn 2 -n 4"),
}
COUNTERS = "cat /sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts"
# UCX 1.18 takes received UD packets for IPv6 unless an mlx5 adapter says otherwise: so a GID of IPv6.
UCX = "OMPI_MCA_pml=ucx UCX_NET_DEVICES=rxe0:1 UCX_IB_GID_INDEX=$gid UCX_TLS=self,sm,rc"


def _pair(server: str, client: str) -> str:
    """A server on the first node; a client on the second, which tries until the server listens."""
    retry = f"for try in 1 2 3 4 5 6 7 8; do {client} n1 && exit 0; sleep 3; done; exit 1"
    return f"timeout 300 {EACH} -l sh -c 'if [ $SLURM_PROCID = 0 ]; then {server}; else {retry}; fi'"


def _script() -> str:
    """One job for all tests of the module; a section per question."""
    write = "ib_write_bw -d rxe0 -R -n 20 -s 65536"
    pingpong = f"ibv_rc_pingpong -d rxe0 -g 1 -n 1 -s {BYTES}"
    lines = [
        "export OMPI_MCA_mpi_yield_when_idle=1 MPIR_CVAR_POLLS_BEFORE_YIELD=1",
        "export SLURM_OVERCOMMIT=1 SLURM_NTASKS_PER_NODE=2",
        f"echo == before; {EACH} sh -c 'ls -d /dev/infiniband /sys/module/mlx5_ib /sys/module/ib_ipoib'",
        f"echo == add; {EACH} sudo rdma link add rxe0 type rxe netdev vhpc0; echo exit $?",
        f"echo == limits; {EACH} sh -c 'ulimit -S -l; ulimit -H -l'",
        f"echo == write; {_pair(write, write)}; echo exit $?",
        f"echo == pingpong; {_pair(pingpong, pingpong)}; echo exit $?",
        f"echo == nodes; {EACH} sh -c 'id -u; cd /dev/infiniband && stat -c \"%n %a\" uverbs0 rdma_cm'",
        "cat > ring.c <<'END'",
        RING,
        "END",
        "mpicc.openmpi -o ring.openmpi ring.c && mpicc.mpich -o ring.mpich ring.c",
        "gid=$(cd /sys/class/infiniband/rxe0/ports/1/gids && grep -l '^fd' * | head -n 1)",
    ]
    for name, (mpi, start) in WAYS.items():
        lines.append(f"echo == {name}; {EACH} {COUNTERS}")
        lines.append(f"env {UCX} timeout 240 {start} ./ring.{mpi} </dev/null; echo exit $?")
        lines.append(f"echo == after-{name}; {EACH} {COUNTERS}")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def said(lab: Lab) -> Iterator[dict[str, list[str]]]:
    """The lines of each section."""
    publish(IMAGE)
    folder = "rdma-test"
    job = lab.submit(
        f"mkdir -p {folder} && cd {folder} || exit\n{{\n{_script()}\n}} 2>&1", *OPTIONS, image=IMAGE
    )
    job.wait(timeout=2000)
    parts = re.split(r"^== ", job.output(), flags=re.M)[1:]
    yield {lines[0]: lines[1:] for lines in (part.splitlines() for part in parts)}
    lab.run("login", "rm", "-rf", folder, user="alice")


@pytest.mark.promise("rdma.devices")
def test_device_nodes_appear_without_udev_for_all_users(said: dict[str, list[str]]) -> None:
    modules = {"/sys/module/mlx5_ib": 2, "/sys/module/ib_ipoib": 2}
    assert {line: said["before"].count(line) for line in modules} == modules, said["before"]
    assert "/dev/infiniband" not in said["before"]  # no adapter yet
    assert said["add"] == ["exit 0"]
    assert Counter(said["nodes"]) == {"2001": 2, "uverbs0 666": 2, "rdma_cm 666": 2}


@pytest.mark.promise("rdma.devices")
def test_tasks_may_lock_all_memory(said: dict[str, list[str]]) -> None:
    assert said["limits"] == ["unlimited"] * 4
    assert said["pingpong"][-1] == "exit 0", said["pingpong"]
    done = [line for line in said["pingpong"] if f": {2 * BYTES} bytes in " in line]
    assert sorted(line.split(":")[0] for line in done) == ["0", "1"], said["pingpong"]


@pytest.mark.promise("rdma.write")
def test_a_guest_writes_into_the_memory_of_another(said: dict[str, list[str]]) -> None:
    """ib_write_bw; it connects by rdma_cm."""
    assert said["write"][-1] == "exit 0", said["write"]
    done = [line for line in said["write"] if re.match(r"[01]: +65536 +20 +\d", line)]
    assert sorted(line.split(":")[0] for line in done) == ["0", "1"], said["write"]


@pytest.mark.promise("rdma.write")
@pytest.mark.parametrize("name", WAYS)
def test_mpi_programs_communicate_by_verbs(said: dict[str, list[str]], name: str) -> None:
    """UCX may use shared memory and verbs only; the adapters count what was sent.

    How a program ends does not count: UCX 1.18 sometimes aborts while it closes queue pairs of soft-RoCE.
    """
    before, output, after = said[name][:2], said[name][2:], said[f"after-{name}"]
    expected = ring_lines("n1", "n1", "n2", "n2")
    assert Counter(line for line in output if line in expected) == expected, output
    # an MPI_Allreduce of 800 kB, in packets of at most 1024 bytes of data
    assert sum(map(int, after)) - sum(map(int, before)) > 800, (before, after)
