#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The job of `vhpc bench`, the same natively and in guests: sh job.sh FOLDER.  The file "parameters" there sets
#   TESTS      names of the tests, in their order
#   SETUP      a shell command that runs first, such as "module load openmpi"; may be empty
#   MPI        value of srun's --mpi
#   LIBRARY    openmpi or mpich: which MPI library vhpc-measure-mpi prefers
#   NODES      number of nodes
#   TASKS      MPI ranks per node; empty: one for each CPU of the allocation
#   TRIAD_MIB TRIAD_ROUNDS FILES_MIB FILES_COUNT MPI_COUNT LJ_SIDE LJ_STEPS HPCC_MIB   sizes of the tests
# Each test leaves NAME.out, NAME.err and NAME.status (exit status; 127: a program is not installed).
# The file "ended" is its last one.  The folder above has the programs and their inputs.

cd "$1" || exit 1
# shellcheck source=/dev/null
. ./parameters

# run NAME COMMAND…: a status file exists only for a test that has ended
run() {
    name=$1
    shift
    "$@" >"$name.out" 2>"$name.err" </dev/null
    echo $? >"$name.status.new"
    mv "$name.status.new" "$name.status"
}

# need PROGRAM: fails with a line if it is not installed
need() {
    command -v "$1" >/dev/null 2>&1 && return
    echo "$1 is not installed, or not in PATH" >&2
    return 127
}

# step RANKS PER-NODE COMMAND…
step() {
    step_ranks=$1 step_tasks=$2
    shift 2
    srun --mpi="$MPI" --nodes="$NODES" --ntasks="$step_ranks" --ntasks-per-node="$step_tasks" "$@"
}

lammps() {
    need lmp || return
    step "$ranks" "$tasks" lmp -in ../lj.in -log none -var side "$LJ_SIDE" -var steps "$LJ_STEPS"
}

# HPCC reads hpccinf.txt in the working directory.  P x Q is the most square grid of all ranks; N fills
# HPCC_MIB of each rank with the matrix, in multiples of the block size.
hpcc_test() {
    need hpcc || return
    p=1 i=1
    while [ $((i * i)) -le "$ranks" ]; do
        [ $((ranks % i)) -ne 0 ] || p=$i
        i=$((i + 1))
    done
    block=64 n=64
    while [ $(((n + block) * (n + block))) -le $((HPCC_MIB * 131072 * ranks)) ]; do n=$((n + block)); done
    sed -e "s/@N@/$n/" -e "s/@NB@/$block/" -e "s/@P@/$p/" -e "s/@Q@/$((ranks / p))/" ../hpccinf.in >hpccinf.txt || return
    step "$ranks" "$tasks" hpcc || return
    cat hpccoutf.txt
}

if [ -n "$SETUP" ]; then
    printf '%s\n' "$SETUP" >setup.sh
    run setup . ./setup.sh
    if [ "$(cat setup.status)" -ne 0 ]; then
        : >ended
        exit 0
    fi
fi
# One thread per rank, also in BLAS libraries, unless the site chose otherwise.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
tasks=${TASKS:-${SLURM_CPUS_ON_NODE:-$(nproc)}}
ranks=$((NODES * tasks))
printf 'nodes %s\nnodelist %s\ntasks_per_node %s\nranks %s\n' \
    "$NODES" "${SLURM_JOB_NODELIST:-}" "$tasks" "$ranks" >shape.out
run machine ../vhpc-measure machine
for test in $TESTS; do
    case $test in
    triad) run triad ../vhpc-measure triad "$TRIAD_MIB" "$TRIAD_ROUNDS" ;;
    files) run files ../vhpc-measure files . "$FILES_MIB" "$FILES_COUNT" ;;
    pingpong) run pingpong step "$NODES" 1 ../vhpc-measure-mpi "$LIBRARY" pingpong "$NODES" "$MPI_COUNT" ;;
    allreduce) run allreduce step "$ranks" "$tasks" ../vhpc-measure-mpi "$LIBRARY" allreduce "$ranks" "$MPI_COUNT" ;;
    lammps) run lammps lammps ;;
    hpcc) run hpcc hpcc_test ;;
    esac
done
: >ended
