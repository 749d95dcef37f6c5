# SPDX-License-Identifier: Apache-2.0
"""Paths of a job's files on a node; only this module builds them."""

from __future__ import annotations

from pathlib import Path

from vhpc_slurm.config import Config
from vhpc_slurm.model import Generation, GuestPaths
from vhpc_slurm.record import Record


class Layout(Record, frozen=True):
    """Paths of the node, from the configuration."""

    config: Config

    @property
    def run(self) -> Path:
        """Root of files that need not survive a reboot."""
        return Path(self.config.paths.run)

    @property
    def state(self) -> Path:
        """Root of files that must survive a reboot."""
        return Path(self.config.paths.state)

    @property
    def log(self) -> Path:
        """Folder of the hooks' logs."""
        return Path(self.config.paths.log)

    @property
    def journals(self) -> Path:
        """Folder of the journals."""
        return self.state / "journal"

    @property
    def timelines(self) -> Path:
        """Folder of finished timelines."""
        return self.state / "timeline"

    @property
    def outbox(self) -> Path:
        """Acknowledgements that vhpcd has not received yet."""
        return self.state / "outbox"

    @property
    def quarantine(self) -> Path:
        """Devices in quarantine, one file each."""
        return self.state / "quarantine"

    @property
    def quarantine_told(self) -> Path:
        """There is such a file while vhpcd may show devices of this node in quarantine."""
        return self.run / "quarantine-told"

    @property
    def libvirt_busy(self) -> Path:
        """There is such a file while libvirt does not answer."""
        return self.run / "libvirt-busy"

    @property
    def blobs(self) -> Path:
        """Files of the site's images on this node, each named by its sha256."""
        return Path(self.config.images.store) / "blobs" / "sha256"

    def blobs_of(self, owner: int | None) -> Path:
        """Files of images in the own catalogue of a uid; None: of the site's images.

        Users do not share files: none gets a file of another by naming its digest.
        """
        if owner is None:
            return self.blobs
        return Path(self.config.images.store) / "own" / str(owner) / "sha256"

    @property
    def disks(self) -> Path:
        """Folder of the guests' own disks."""
        return Path(self.config.disks.folder)

    @property
    def uids(self) -> Path:
        """Allocated uids of the range for QEMU."""
        return self.run / "uids"

    @property
    def guarded_ports(self) -> Path:
        """UDP ports of job networks since the last reboot, one file each."""
        return self.run / "guarded-ports"

    @property
    def warming(self) -> Path:
        """Offers of this node to others that ``vhpc image warm`` prepares at the same time."""
        return self.run / "warming"

    @property
    def jobs(self) -> Path:
        """Folder of the jobs' run folders."""
        return self.run / "jobs"

    def job(self, job_id: int) -> Path:
        """Run folder of a job: sockets, state file, consoles."""
        return self.jobs / str(job_id)

    def guest(self, job_id: int, index: int) -> Path:
        """Run folder of one guest of a job."""
        return self.job(job_id) / f"g{index}"

    def guest_paths(self, job_id: int, index: int, root_sha256: str, owner: int | None = None) -> GuestPaths:
        """Files of one guest.

        Args:
            job_id, index: the job, and the guest's number.
            root_sha256: digest of its image's root file system.
            owner: uid, if the image is in that user's own catalogue.
        """
        run_dir = self.guest(job_id, index)
        return GuestPaths(
            run_dir=str(run_dir),
            kernel=str(run_dir / "kernel"),
            initrd=str(run_dir / "initrd"),
            root=str(self.blobs_of(owner) / root_sha256),
            # libvirt makes the socket writable for a group: only root may enter its folder
            agent_socket=str(run_dir / "channel" / "agent.sock"),
            console_log=str(run_dir / "console.log"),
        )

    def guest_of(self, domain: str) -> Path:
        """Run folder of the guest of a domain name."""
        _, job_id, _, _, index = domain.split("-")
        return self.guest(int(job_id), int(index.removeprefix("g")))

    def state_file(self, job_id: int) -> Path:
        """The state file, which the SPANK plugin reads at task start."""
        return self.job(job_id) / "state"

    def saveable(self, job_id: int) -> Path:
        """The file with what a checkpoint needs to know of a job's guests."""
        return self.job(job_id) / "saveable.json"

    def lock(self, job_id: int) -> Path:
        """The lock file (flock) of a job's Prolog and Epilog."""
        return self.run / "locks" / str(job_id)

    def attendant_lock(self, job_id: int, role: str) -> Path:
        """The lock file (flock) of a job's keeper or follower: it is held as long as one runs."""
        return self.job(job_id) / f"{role}.lock"

    def guests_ended(self, job_id: int) -> Path:
        """The mark of guests that a checkpoint has ended: their shims say nothing of it."""
        return self.job(job_id) / "guests.ended"

    def attendant_over(self, job_id: int, role: str) -> Path:
        """The mark of a keeper or follower that has ended with its job."""
        return self.job(job_id) / f"{role}.over"

    def membership(self, job_id: int) -> Path:
        """The file with what this node knows of the job's cluster."""
        return self.job(job_id) / "cluster.json"

    def network_lock(self, job_id: int) -> Path:
        """The lock file (flock) of those that change a segment and its firewall while the job runs."""
        return self.job(job_id) / "network.lock"

    def tombstone(self, generation: Generation) -> Path:
        """The tombstone: its Prolog may acquire nothing any more."""
        return self.run / "tombstones" / str(generation)

    def timeline(self, generation: Generation) -> Path:
        """Timeline of a generation on this node."""
        return self.timelines / f"{generation}.json"

    @property
    def usages(self) -> Path:
        """Folder of what ended generations have used."""
        return self.state / "usage"

    def usage(self, generation: Generation) -> Path:
        """The file with the usage of a generation on this node."""
        return self.usages / f"{generation}.json"


def domain_name(generation: Generation, index: int) -> str:
    """libvirt's name of a guest; contains its generation."""
    return f"vhpc-{generation.job_id}-{generation.restart}-{generation.nonce}-g{index}"
