#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# start.sh: in a bare Debian tree, install Slurm and the packages of /packages on one host, and start what needs
# Slurm, in a network of its own.  Writes what is said to /packages/started/.
set -euo pipefail
report=/packages/started
mkdir -p $report
apt-get -q update
apt-get -q -y --no-install-recommends install iproute2 munge slurm-client slurmctld slurmd
apt-get -q -y --no-install-recommends install /packages/*.deb

hostname one
echo 10.9.9.1 one >> /etc/hosts
install -m 644 /usr/share/doc/vhpc-common/examples/vhpc.toml /etc/vhpc/vhpc.toml
sed -i 's/^host = .*/host = "one"/' /etc/vhpc/vhpc.toml
cat > /etc/slurm/slurm.conf <<'CONF'
ClusterName=one
SlurmctldHost=one
SlurmUser=slurm
ProctrackType=proctrack/linuxproc
StateSaveLocation=/var/lib/slurm
SlurmctldPidFile=/var/lib/slurm/slurmctld.pid
NodeName=one CPUs=1
PartitionName=all Nodes=ALL
CONF
install -d -o munge /run/munge
install -d -o slurm /var/lib/slurm /var/log/slurm
install -d -o slurm /run/vhpc-hookd
install -d -o vhpc /var/lib/vhpc /var/lib/vhpc/vhpcd
cat > /tmp/inside <<'INSIDE'
ip link set lo up
ip address add 10.9.9.1/32 dev lo
runuser -u munge -- munged
until_true() {
    for _ in $(seq 300); do
        if "$@" >/dev/null 2>&1; then return; fi
        sleep 0.2
    done
    echo "still fails: $*"
}
runuser -u slurm -- slurmctld -D > /tmp/slurmctld.log 2>&1 &
until_true scontrol ping
runuser -u vhpc -- vhpcd --foreground > "$1/vhpcd" 2>&1 &
until_true vhpc ps
runuser -u slurm -- /usr/libexec/vhpc/vhpc-hookd > "$1/hookd" 2>&1 &
until_true test -S /run/vhpc-hookd/socket
vhpc ps > "$1/ps" 2>&1
vhpc setup login > "$1/setup" 2>&1
srun --help > "$1/srun" 2>&1
vhpc doctor --json > "$1/doctor.json"
INSIDE
# the end of this namespace's first process ends the daemons; the exit status of setup and doctor is 1 if they warn
unshare --net --pid --fork --kill-child --mount-proc bash -u /tmp/inside $report || true
python3 -c 'import msgspec' > $report/system 2>&1 || true
