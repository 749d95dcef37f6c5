# SPDX-License-Identifier: Apache-2.0
"""The command line of a campaign."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from cluster import Lab

from campaign import report
from campaign.findings import carry_out
from campaign.plan import draw


def main() -> int:
    """Run a campaign on the lab that is up; 1 when something is left, drained or unexplained."""
    options = _parser().parse_args()
    plan = draw(options.seed, options.jobs, options.faults, short=options.short, attacked=options.attacked)
    if options.plan:
        print(json.dumps(asdict(plan), indent=1))
        return 0
    record, found = carry_out(Lab(), plan)
    text = report.markdown(plan, record, found)
    print(text)
    if options.report:
        options.report.write_text(text, encoding="utf-8")
    if options.json:
        data = {"plan": asdict(plan), **report.plain(plan, record, found)}
        options.json.write_text(json.dumps(data, indent=1), encoding="utf-8")
    return 0 if found.passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("campaign", description="Random jobs and random faults on the lab.")
    parser.add_argument("--seed", type=int, default=1, help="what jobs and faults are drawn from (default 1)")
    parser.add_argument("--jobs", type=int, default=300, help="default 300")
    parser.add_argument("--faults", type=int, default=100, help="default 100")
    parser.add_argument("--short", action="store_true", help="leave out kinds that take minutes")
    parser.add_argument(
        "--attacked", action="store_true", help="alice attacks meanwhile, and all jobs are bob's"
    )
    parser.add_argument("--plan", action="store_true", help="only print the plan, as JSON")
    parser.add_argument("--report", metavar="FILE", type=Path, help="write the report, as Markdown")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write plan and findings, as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
