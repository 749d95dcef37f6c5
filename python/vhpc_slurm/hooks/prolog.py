# SPDX-License-Identifier: Apache-2.0
"""Prolog on a compute node: from a lease to guests that are ready, or to one clear line."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from vhpc_slurm import slurm
from vhpc_slurm.config import Config
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import FabricError, NodeError, TeardownError, UserError
from vhpc_slurm.hooks import common
from vhpc_slurm.model import Generation, HostInventory, Lease, LeaseState, NodePlan
from vhpc_slurm.node import (
    accounts,
    console,
    devices,
    guest,
    inventory,
    joblock,
    journal,
    outbox,
    quarantine,
    refusal,
    reservations,
    resources,
    stages,
    statefile,
    teardown,
    timeline,
)
from vhpc_slurm.node.journal import Journal, Stopped
from vhpc_slurm.node.layout import Layout
from vhpc_slurm.node.preflight import GPU
from vhpc_slurm.placement.plan import plan_node
from vhpc_slurm.placement.usage import fold
from vhpc_slurm.reconcile import purged_jobs

LOCK_TIMEOUT_S = 30.0


def run(config: Config) -> int:
    """Prepare this node for the job that Slurm names in the environment."""
    env = common.HookEnv.read()
    layout = Layout(config)
    with joblock.held(layout, env.job_id, timeout_s=LOCK_TIMEOUT_S):
        try:
            cleared = _clear_stale(layout, env)
            return _prepare(config, layout, env, cleared)
        except FabricError as err:
            _requeue(config, env, err)
            return 0
        except (NodeError, TeardownError) as err:
            common.drain(config, env.node, err)
            raise


def _prepare(config: Config, layout: Layout, env: common.HookEnv, cleared: list[Generation]) -> int:
    began = time.time()
    client = ControllerClient(config)
    lease = client.lease(env.job_id, env.restart, env.node, config.controller.lease_wait_s)
    for old in cleared:
        if old != lease.generation:  # what was just taken is acknowledged by its own Epilog
            outbox.put(
                layout.outbox, outbox.Acknowledgement(old, env.node, clean=True, note="cleared by Prolog")
            )
    if joblock.has_tombstone(layout, lease.generation):
        common.log.info("the job's Epilog has been here: nothing to prepare")
        # its acknowledgement may have come before the lease was taken here, and then counts no more
        note = "nothing prepared after its Epilog"
        outbox.put(layout.outbox, outbox.Acknowledgement(lease.generation, env.node, clean=True, note=note))
        outbox.flush(layout.outbox, client.acknowledge)
        return 0
    recorder = timeline.Recorder(layout.timeline(lease.generation), lease.generation, env.node)
    recorder.note("python", timeline.process_began(), began)
    recorder.note("lease", began)
    journal = Journal(layout.journals, lease.generation)
    journal.stop_when(layout.tombstone(lease.generation))
    try:
        _open_run_dir(layout, lease, journal)
        try:
            _boot(config, layout, env, lease, journal, recorder, partial(_over, client, env, lease))
            common.log.info("ready in %.2f s", time.time() - began)
        except UserError as err:
            _user_failure(layout, env, lease, journal, recorder, err)
        except Stopped:
            common.log.info("the job was ended during its boot")
            teardown.tear_down(layout, journal, recorder)
            return 0
        except FabricError as err:
            if _requeue(config, env, err):
                teardown.tear_down(layout, journal, recorder)
            else:
                hint = "; ".join(filter(None, (err.hint, "the job may not be requeued: submit it again")))
                last = UserError(err.what, err.why, hint)
                _user_failure(layout, env, lease, journal, recorder, last)
            return 0
        except (NodeError, TeardownError):
            teardown.tear_down(layout, journal, recorder)
            raise
        # tells vhpcd also that this Prolog has ended, should slurmctld not hear of it
        with contextlib.suppress(FabricError):
            client.report_timeline(recorder.timeline())
        return 0
    finally:
        journal.close()


def _boot(
    config: Config,
    layout: Layout,
    env: common.HookEnv,
    lease: Lease,
    journal: Journal,
    recorder: timeline.Recorder,
    over: Callable[[], bool],
) -> None:
    if lease.state is LeaseState.REFUSED or lease.image is None:
        raise UserError(lease.refusal or "the job's lease was refused")
    common.check_user(env, lease.request.uid)
    account = accounts.account(lease.request.uid)
    with recorder.stage("plan"):
        host: HostInventory = inventory.read_inventory(env.node, config)
        try:
            plan = _reserve(config, layout, host, lease, journal)
        except FabricError:
            if not purged_jobs.clear(layout, slurm.commands(config), env.node, excluding=lease.generation):
                raise
            plan = _reserve(config, layout, host, lease, journal)
    if not host.kvm:
        common.log.warning("guests run in software emulation (TCG), many times slower: %s", host.kvm_reason)
    with guest.connect(config.guests.libvirt_uri, config.guests.stage_timeout_s) as hypervisor:
        work = stages.Boot(
            layout, lease, lease.image, plan, host, journal, recorder, account, hypervisor,
            replan=partial(_reserve, config, layout, host, lease, journal), over=over,
        )  # fmt: skip
        stages.boot(work)
    fields = statefile.header(lease.generation, str(lease.request.image)) | {
        "status": "ready",
        "digest": lease.image.digest,
        "batch": lease.request.batch.value,
        "socket": str(layout.guest(env.job_id, 0) / "run.sock"),
        "commands": ":".join(config.host.commands),
        "guests": str(len(work.plan.guests)),
        "gpus": ",".join(":".join(map(str, own)) for own in _gpu_indexes(layout, work.plan)),
        "warning": _warning(lease, env, account),
    }
    statefile.write_state(layout.state_file(env.job_id), fields, lease.request.uid)


def _warning(lease: Lease, env: common.HookEnv, account: accounts.Account) -> str:
    """What the user should know when the job starts: a console file that he may not write; or empty."""
    if lease.request.console is None:
        return ""
    target = console.user_path(lease.request, env.node)
    why = console.why_not(target, account)
    if not why:
        return ""
    return f"--vhpc-console: {target} cannot be written on {env.node}: {why}; the job runs without that file"


def _over(client: ControllerClient, env: common.HookEnv, lease: Lease) -> bool:
    """Whether vhpcd knows that the job has ended; where it does not answer, the boot goes on."""
    try:
        now = client.lease(env.job_id, env.restart, env.node, 0.0)
    except FabricError:
        return False
    return now.generation != lease.generation or now.state is not lease.state


def _gpu_indexes(layout: Layout, plan: NodePlan) -> list[list[int]]:
    """Slurm's numbers of each guest's GPUs, in the order in which the guest counts them."""
    indexes = {address: index for index, address in enumerate(devices.handed_out(layout).gpus)}
    return [
        [indexes[device.address] for device in guest.devices if device.role == GPU] for guest in plan.guests
    ]


def _reserve(
    config: Config,
    layout: Layout,
    host: HostInventory,
    lease: Lease,
    journal: Journal,
    avoid: frozenset[str] = frozenset(),
) -> NodePlan:
    """Plan from what other jobs leave, and write down what this one takes, before any other may plan.

    ``avoid`` are devices that were found to be busy.
    """
    assert lease.image is not None
    with reservations.plan_lock(layout, LOCK_TIMEOUT_S):
        there = devices.handed_out(layout)
        plan = plan_node(
            lease.generation,
            lease.allocation.on(host.node),
            host,
            lease.request,
            lease.image.manifest,
            config,
            fold(reservations.live(layout, excluding=lease.generation)),
            replace(there, quarantined=(*there.quarantined, *avoid)),
        )
        reservations.reserve(journal, plan)
    return plan


def _open_run_dir(layout: Layout, lease: Lease, journal: Journal) -> None:
    path = layout.job(lease.generation.job_id)
    journal.acquire(resources.RUN_DIR, f"rundir:{path}", path=str(path))
    path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    path.mkdir(mode=0o711)
    statefile.write_state(
        layout.state_file(lease.generation.job_id),
        statefile.header(lease.generation, str(lease.request.image)) | {"status": "booting"},
        lease.request.uid,
    )


def _user_failure(
    layout: Layout,
    env: common.HookEnv,
    lease: Lease,
    journal: Journal,
    recorder: timeline.Recorder,
    error: UserError,
) -> None:
    """Leave the line for the plugin to say at task start, and the console beside the user's output.

    The guests are ended now; the run folder with the state file stays until
    the Epilog.
    """
    refused = error.cause if isinstance(error, refusal.RefusedGuestError) else ""
    if refused:
        common.log.error("%s", error.line())
    else:
        common.log.info("user error: %s", error.line())
    message = error.line()
    written = [one for one in console.of_guests(layout.job(env.job_id)) if one[1].stat().st_size]
    copies = []
    if written:
        account, limit = accounts.account(lease.request.uid), layout.config.guests.console_limit_kib
        copies = console.hand_over(written, lease.request, env.node, account, limit)
    failed = [f"{copy.target} ({copy.why_not})" for copy in copies if copy.why_not]
    given = [copy.target for copy in copies if not copy.why_not]
    if failed:
        message += f"; a console could not be written: {', '.join(failed)}"
    if given:
        message += f"; {'its console' if len(given) == 1 else 'consoles'}: {', '.join(given)}"
    fields = statefile.header(lease.generation, str(lease.request.image)) | {
        "status": "failed",
        "kind": error.kind,
        "message": message,
    }
    if refused:
        fields["alarm"] = refused
    statefile.write_state(layout.state_file(env.job_id), fields, lease.request.uid)
    teardown.release_guests(layout, journal, recorder)


def _requeue(config: Config, env: common.HookEnv, error: FabricError) -> bool:
    """Nothing can be prepared, and the node is not at fault: the job tries again.

    The job may be over already (this Prolog was late).  Else vhpcd went away
    between the controller's hook and ours, or what the job was given is still
    held.  False: the job may not be requeued (``--no-requeue``, an interactive
    one); where no state file says why, the plugin refuses its tasks by itself.
    """
    try:
        known = ControllerClient(config).lease(env.job_id, None, env.node, 0)
    except FabricError:
        known = None
    if known is not None and known.state in (LeaseState.ENDING, LeaseState.RELEASED):
        common.log.info("nothing to prepare: %s", error.line())
        return True
    common.log.warning("%s; requeueing", error.line())
    try:
        slurm.commands(config, slurm.HOOK_TIMEOUT_S).requeue(env.job_id)
    except FabricError as err:
        common.log.warning("not requeued: %s", err.line())
        return False
    return True


def _clear_stale(layout: Layout, env: common.HookEnv) -> list[Generation]:
    """Remove what an earlier incarnation, or a Prolog that was killed, left of this job."""
    stale = [old for old in journal.generations(layout.journals) if old.job_id == env.job_id]
    for old in stale:
        common.log.warning("clearing generation %s, left by a crash", old)
        try:
            teardown.clear(layout, old, env.node)
        except quarantine.QuarantinedError as err:
            outbox.put(layout.outbox, outbox.Acknowledgement(old, env.node, clean=True, note=err.line()))
            raise
    return stale


def entry() -> int:
    """Process entry point."""
    return common.main("prolog", run)


if __name__ == "__main__":
    sys.exit(entry())
