# SPDX-License-Identifier: Apache-2.0
"""The work of Prolog: boots the guests of a lease, or reports in one message why it cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import TypeVar

from vhpc_slurm import files, slurm
from vhpc_slurm.config import Config
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import FabricError, NodeError, TeardownError, UserError
from vhpc_slurm.hooks import barrier, checking, common, requeueing, statefields, timelimit
from vhpc_slurm.hooks.told import Told
from vhpc_slurm.model import Generation, HostInventory, Lease, LeaseState, NodePlan, RunningNode, Share
from vhpc_slurm.node import teardown
from vhpc_slurm.node.boot import follower, keeper, permission
from vhpc_slurm.node.boot.reserve import reserve
from vhpc_slurm.node.boot.sequence import boot
from vhpc_slurm.node.boot.state import Boot
from vhpc_slurm.node.devices import quarantine
from vhpc_slurm.node.guest import busy, check, console, libvirtd, refusal, shares
from vhpc_slurm.node.host import accounts, inventory
from vhpc_slurm.node.resource.run_folder import RunFolder
from vhpc_slurm.node.store import joblock, journal, outbox, statefile, timeline, usage
from vhpc_slurm.node.store.journal import Journal, Stopped
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.reconcile import acknowledging, ended_jobs
from vhpc_slurm.record import Record

T = TypeVar("T")


class _Job(Record, frozen=True):
    """The job that this Prolog prepares, and the objects for its preparation."""

    config: Config
    layout: Layout
    env: common.HookEnv
    client: ControllerClient
    lease: Lease
    journal: Journal
    recorder: timeline.Recorder
    told: Told


def run(config: Config, layout: Layout, env: common.HookEnv, asked: common.Asked) -> int:
    """Act on the lease of a job."""
    with _reported(config, env):
        _prepare(config, layout, env, asked)
    return 0


def run_without_lease(config: Config, layout: Layout, env: common.HookEnv, error: FabricError) -> int:
    """Requeue a job whose lease could not be had, or act on its lease after all."""
    with _reported(config, env):
        began = statefile.uptime()
        lease = requeueing.lease_instead(config, env, error)
        if lease is not None:
            _prepare(config, layout, env, common.Asked(lease, began, statefile.uptime()))
    return 0


def run_after_crash(config: Config, layout: Layout, env: common.HookEnv) -> int:
    """Clear the node of what was left of a job, then ask vhpcd and act on the lease."""
    with _reported(config, env):
        cleared = _clear_stale(layout, env)
        asked = common.ask(config, env)
        for old in cleared:
            if old != asked.lease.generation:  # this one is acknowledged by its own Epilog
                _queue_clean(layout, env, old, "cleared by Prolog")
        _prepare(config, layout, env, asked)
    return 0


@contextlib.contextmanager
def _reported(config: Config, env: common.HookEnv) -> Iterator[None]:
    """Requeue the job, or drain the node, if the job cannot be prepared."""
    try:
        yield
    except FabricError as err:
        requeueing.requeue_or_tell(config, env, err)
    except (NodeError, TeardownError) as err:
        common.drain(config, env.node, err)
        raise


def _prepare(config: Config, layout: Layout, env: common.HookEnv, asked: common.Asked) -> None:
    client, lease = ControllerClient(config), asked.lease
    if joblock.has_tombstone(layout, lease.generation):
        common.log.info("the job's Epilog has run already: nothing to prepare")
        # vhpcd may have recorded the lease after it received the Epilog's acknowledgement, and now waits
        _queue_clean(layout, env, lease.generation, "nothing prepared after its Epilog")
        acknowledging.deliver(config, client, layout.outbox)
        return
    began, answered = timeline.at(asked.began), timeline.at(asked.ended)
    recorder = timeline.Recorder(layout.timeline(lease.generation), lease.generation, env.node)
    recorder.note("python", timeline.process_began(), began)
    recorder.note("lease", began, answered)
    recorder.note("modules", answered)
    journal = Journal(layout.journals, lease.generation)
    journal.stop_when(layout.tombstone(lease.generation))
    try:
        told = Told(lease.generation, env.node)
        _bring_up(_Job(config, layout, env, client, lease, journal, recorder, told), began)
    finally:
        journal.close()


def _bring_up(job: _Job, began: float) -> None:
    """Boot the job's guests, and handle the result.

    Raises:
        NodeError, TeardownError: this node is at fault, or cannot be cleared; everything else is released.
    """
    try:
        _open_run_dir(job)
        node = _boot(job)
        if node.plan.segment is not None:
            follower.start(job.layout, job.journal, job.lease, job.env.node)
        if barrier.is_wanted(job.config, job.lease):
            with job.recorder.stage("barrier"):
                barrier.wait(job.layout, job.client, job.lease, node, lambda: _check(job, node))
        if timeline.now() - began > timelimit.SHORTEST_S and _has_ended(job):
            raise Stopped(f"generation {job.lease.generation} was ended")
        keeper.start(job.layout, job.journal, node.plan)
        _write_ready(job, node.plan)
        common.log.info("ready in %.2f s", timeline.now() - began)
    except UserError as err:
        _fail_job(job, err)
    except Stopped:
        _stop(job, began)
        return
    except FabricError as err:
        _try_again(job, err)
        return
    except libvirtd.BusyError as err:
        if busy.persists(job.layout, err):
            teardown.tear_down(job.layout, job.journal, job.recorder)
            raise
        _try_again(job, FabricError(err.what, err.why, err.hint))
        return
    except OSError as err:
        if not files.is_full(err):
            raise
        what = f"a file system of {job.env.node} is full"
        _try_again(job, FabricError(what, f"{err.strerror}: {err.filename or 'paths.state or paths.run'}"))
        return
    except check.UnhealthyError as err:
        _drain_and_try_again(job, err)
    except (NodeError, TeardownError):
        teardown.tear_down(job.layout, job.journal, job.recorder)
        raise
    # also reports to vhpcd that this Prolog has ended, in case slurmd's report to slurmctld is lost
    with contextlib.suppress(FabricError):
        job.client.report_timeline(job.recorder.timeline(), job.told.report())


def _stop(job: _Job, began: float) -> None:
    """Release everything of a job that has ended, and tell its user if the boot took its whole time limit."""
    text = timelimit.explain(job.config, job.env, job.recorder, began)
    text += _copy_consoles(job) if text else ""
    teardown.tear_down(job.layout, job.journal, job.recorder)
    if text:
        job.told.say(text)
        timelimit.tell(job.config, job.client, job.lease, text, (job.recorder.timeline(), job.told.report()))


def _boot(job: _Job) -> RunningNode:
    """Boot the guests of the lease until they are ready for tasks."""
    config, lease = job.config, job.lease
    if lease.state is LeaseState.REFUSED or lease.image is None:
        raise UserError(lease.refusal or "the job's lease was refused")
    common.check_user(job.env, lease.request.uid)
    account = accounts.account(lease.request.uid)
    with job.recorder.stage("shares"):
        found = shares.of_job(config, account, lease.request)
    with job.recorder.stage("plan"):
        host: HostInventory = inventory.read_inventory(job.env.node, config)
        plan = _reserve(job, host, found)
    job.told.place(host, plan)
    job.told.say(*plan.notes)
    if not host.kvm:
        line = f"guests run in software emulation (TCG), many times slower: {host.kvm_reason}"
        common.log.warning("%s", line)
        job.told.say(line)
    with libvirtd.connect(config.guests.libvirt_uri, config.guests.stage_timeout_s) as hypervisor:
        busy.forget(job.layout)
        work = Boot(
            job.layout, lease, lease.image, plan, host, job.journal, job.recorder, account, hypervisor
        )
        node = _while_job_exists(job, boot(work))
    job.told.place(host, node.plan)
    job.told.say(*node.notes)
    return node


def _reserve(job: _Job, host: HostInventory, found: tuple[Share, ...]) -> NodePlan:
    """Reserve the plan's resources; if that fails, clear jobs that have ended for Slurm and try again."""
    try:
        return reserve(job.layout, job.lease, host, found, job.journal)
    except FabricError:
        if not ended_jobs.clear(
            job.layout, slurm.commands(job.config), job.env.node, excluding=job.lease.generation
        ):
            raise
        return reserve(job.layout, job.lease, host, found, job.journal)


def _check(job: _Job, node: RunningNode) -> None:
    """Run the site's check in the guests; not in restored ones, which have run programs of the user."""
    settings = job.config.guests
    if not settings.check or job.lease.resume is not None:
        return
    checks = check.run(settings, job.lease, node.guests, checking.environment(job.env))
    with job.recorder.stage("check", " ".join(settings.check)):
        lines = _while_job_exists(job, checks)
    for line in lines:
        common.log.warning("%s", line)
    job.told.say(*lines)


def _drain_and_try_again(job: _Job, error: check.UnhealthyError) -> None:
    """Drain this node and requeue the job; a job whose check has failed before fails, and drains nothing."""
    if (again := checking.repeated(job.client, job.lease, job.env, error)) is not None:
        _fail_job(job, again)
        return
    job.told.say(error.line())
    common.drain(job.config, job.env.node, error)
    _try_again(job, FabricError(error.what, error.why, error.hint))


def _while_job_exists(job: _Job, waiting: Generator[None, None, T]) -> T:
    """Drive a boot or a check to its end; during long waits ask vhpcd whether the job still exists.

    slurmd starts no Epilog before the Prolog has ended, so nothing else would stop the boot.

    Raises:
        Stopped: the job does not exist; also every exception of the boot or the check.
    """
    while True:
        try:
            next(waiting)
        except StopIteration as end:
            found: T = end.value
            return found
        if _has_ended(job):
            waiting.throw(Stopped(f"generation {job.lease.generation} was ended"))


def _has_ended(job: _Job) -> bool:
    """Whether vhpcd knows that the job has ended; if it does not answer, the boot continues.

    The same request tells vhpcd what this node does, for those who wait for the job.
    """
    doing = job.recorder.doing()
    try:
        now = job.client.look(job.env.job_id, job.env.restart, job.env.node, doing)
    except FabricError:
        return False
    return now.generation != job.lease.generation or now.state is not job.lease.state


def _open_run_dir(job: _Job) -> None:
    RunFolder().take(job.layout, job.journal)
    _write_state(job, {"status": "booting"})


def _write_ready(job: _Job, plan: NodePlan) -> None:
    """Write the state file: the SPANK plugin may start tasks."""
    assert job.lease.image is not None
    fields = {
        "status": "ready",
        "digest": job.lease.image.digest,
        "batch": job.lease.request.batch.value,
        "socket": str(job.layout.guest(job.env.job_id, 0) / "run.sock"),
        "commands": ":".join(job.config.host.commands),
        "command_path": slurm.folder_of_commands(job.config),
        "guests": str(len(plan.guests)),
        "gpus": ",".join(":".join(map(str, own)) for own in statefields.gpu_indexes(job.layout, plan)),
        "cpus": statefields.pins(plan),
        "warning": _warning(job.lease, job.env),
    }
    if job.lease.resume is not None and job.env.node == job.lease.allocation.node_names[0]:
        fields["attach"] = "batch"  # the batch script continues in the guest, and is not started
    job.told.say(fields["warning"])
    if components := statefields.components(job.lease, plan):
        fields["components"] = str(components)
    _write_state(job, fields)


def _write_state(job: _Job, fields: dict[str, str]) -> None:
    header = statefile.header(job.lease.generation, str(job.lease.request.image))
    header["console"] = "no" if job.lease.request.console is None else "yes"
    statefile.write_state(job.layout.state_file(job.env.job_id), header | fields, job.lease.request.uid)


def _warning(lease: Lease, env: common.HookEnv) -> str:
    """A warning for the user when the job starts: the console file is not writable; or empty."""
    if lease.request.console is None:
        return ""
    target = console.user_path(lease.request, env.node)
    why = console.why_not(target, accounts.account(lease.request.uid))
    if not why:
        return ""
    return f"--vhpc-console: {target} cannot be written on {env.node}: {why}; the job runs without that file"


def _fail_job(job: _Job, error: UserError) -> None:
    """Write the message that the plugin shows at task start, and copy the consoles for the user.

    The guests are ended now; the run folder with the state file stays until
    the Epilog.
    """
    refused = ""
    if isinstance(error, refusal.RefusedGuestError | permission.RefusedHereError | checking.RepeatedError):
        refused = error.cause
    if refused:
        common.log.error("%s", error.line())
    else:
        common.log.info("user error: %s", error.line())
    consoles = "" if isinstance(error, barrier.PeerFailedError) else _copy_consoles(job)
    fields = {"status": "failed", "kind": error.kind, "message": error.line() + consoles}
    job.told.say(fields["message"])
    barrier.report_failure(job.config, job.client, job.lease, job.env.node, error, fields["message"])
    if refused:
        fields["alarm"] = refused
    try:
        _write_state(job, fields)
    except FabricError as err:  # the plugin refuses the job's tasks without it, too
        common.log.warning("the job's user is not told: %s", err.line())
    teardown.release_guests(job.layout, job.journal, job.recorder)


def _copy_consoles(job: _Job) -> str:
    """Copy the consoles of guests that did not become ready; returns the end of the user's message."""
    lease, env = job.lease, job.env
    written = [one for one in console.of_guests(job.layout.job(env.job_id)) if one[1].stat().st_size]
    if not written:
        return ""
    account, limit = accounts.account(lease.request.uid), job.config.guests.console_limit_kib
    copies = console.hand_over(written, lease.request, env.node, account, limit)
    failed = [f"{copy.target} ({copy.why_not})" for copy in copies if copy.why_not]
    given = [copy.target for copy in copies if not copy.why_not]
    message = ""
    if failed:
        message += f"; a console could not be written: {', '.join(failed)}"
    if given:
        message += f"; {'its console' if len(given) == 1 else 'consoles'}: {', '.join(given)}"
    return message


def _try_again(job: _Job, error: FabricError) -> None:
    """Requeue the job; if it may not be requeued, let it fail with the reason."""
    why = requeueing.requeue(job.config, job.env, error)
    if not why:
        teardown.tear_down(job.layout, job.journal, job.recorder)
        return
    hint = "; ".join(filter(None, (error.hint, why)))
    _fail_job(job, UserError(error.what, error.why, hint))


def _clear_stale(layout: Layout, env: common.HookEnv) -> list[Generation]:
    """Remove what an earlier generation or a killed Prolog left of this job."""
    stale = [old for old in journal.generations(layout.journals) if old.job_id == env.job_id]
    for old in stale:
        common.log.warning("clearing generation %s, left by a crash", old)
        try:
            teardown.clear(layout, old, env.node)
        except quarantine.QuarantinedError as err:
            _queue_clean(layout, env, old, err.line())
            raise
    return stale


def _queue_clean(layout: Layout, env: common.HookEnv, generation: Generation, note: str) -> None:
    """Queue an acknowledgement: this node holds nothing of a generation."""
    used = usage.of_node(layout.usage(generation), generation, env.node)
    ack = outbox.Acknowledgement(generation, env.node, clean=True, note=note, usage=used)
    outbox.put(layout.outbox, ack)
