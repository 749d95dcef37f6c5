# SPDX-License-Identifier: Apache-2.0
"""The command line of a campaign."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from cluster import Lab

from campaign import light, report
from campaign.findings import carry_out
from campaign.plan import draw

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run a campaign on the lab that is up; 1 when something is left, drained, unexplained, or grows."""
    parser = _parser()
    options = parser.parse_args()
    of_light = light.is_light()
    if of_light and options.attacked:
        parser.error("--attacked needs guests, and this is a light lab")
    plan = draw(
        options.seed,
        options.jobs,
        options.faults,
        short=options.short,
        attacked=options.attacked,
        light=of_light,
    )
    if options.plan:
        print(json.dumps(asdict(plan), indent=1))
        return 0
    _leave_terminal()
    stop = _stopped_by_signals(options.minutes)
    if of_light:
        light.prepare()
    record, found = carry_out(Lab(), plan, stop)
    text = report.markdown(plan, record, found)
    print(text)
    if options.report:
        options.report.write_text(text, encoding="utf-8")
    if options.json:
        data = {"plan": asdict(plan), **report.plain(plan, record, found)}
        options.json.write_text(json.dumps(data, indent=1), encoding="utf-8")
    return 0 if found.passed else 1


def _leave_terminal() -> None:
    """Go on in a child with a session of its own: Ctrl-C must not reach commands and daemons of hosts.

    This process passes SIGINT and SIGTERM on, and ends as the child does.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        return

    def pass_on(number: int, _: FrameType | None) -> None:
        del number
        os.kill(child, signal.SIGTERM)

    signal.signal(signal.SIGINT, pass_on)
    signal.signal(signal.SIGTERM, pass_on)
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _stopped_by_signals(minutes: float | None) -> threading.Event:
    """The event that SIGTERM and the end of the time set; a second SIGTERM ends this process at once."""
    stop = threading.Event()

    def end(number: int, _: FrameType | None) -> None:
        stop.set()
        print(
            "no more jobs and faults; the report follows when the queue is empty", file=sys.stderr, flush=True
        )
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, end)
    if minutes is not None:
        timer = threading.Timer(60 * minutes, stop.set)
        timer.daemon = True
        timer.start()
    return stop


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "campaign",
        description="Random jobs and random faults on the lab. On a light lab (vlab up --light) also: does "
        "anything grow while jobs come and go?",
    )
    parser.add_argument("--seed", type=int, default=1, help="what jobs and faults are drawn from (default 1)")
    parser.add_argument("--jobs", type=int, default=300, help="default 300")
    parser.add_argument("--faults", type=int, default=100, help="default 100")
    parser.add_argument("--short", action="store_true", help="leave out kinds that take minutes")
    parser.add_argument(
        "--attacked", action="store_true", help="alice attacks meanwhile, and all jobs are bob's"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help="submit nothing more after N minutes, and report what was done; Ctrl-C and SIGTERM do the same",
    )
    parser.add_argument("--plan", action="store_true", help="only print the plan, as JSON")
    parser.add_argument("--report", metavar="FILE", type=Path, help="write the report, as Markdown")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write plan and findings, as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
