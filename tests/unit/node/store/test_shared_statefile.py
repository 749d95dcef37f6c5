# SPDX-License-Identifier: Apache-2.0
"""The plugin, which is C, reads the state file of a job as the hooks, which are Python, write it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from c_probe import PLUGIN, run_c, values

from vhpc_slurm.domain.spec import SOCKET_PATH_MAX
from vhpc_slurm.model import Generation
from vhpc_slurm.node.store import statefile
from vhpc_slurm.options import MAX_GUESTS_PER_NODE

STATE_PROBE = """
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "state.h"
int main(int argc, char **argv)
{
    struct vhpc_state s;
    char why[4096] = "absent";
    if (argc != 3 || vhpc_state_read(&s, argv[1], (uint32_t)atoi(argv[2]), getuid(), why,
                                     sizeof why) != VHPC_STATE_OK)
        return puts(why) < 0;
    printf("job=%u\\nrestart=%u\\nstatus=%d\\nbatch=%d\\nguests=%u\\ncomponents=%u\\n", s.job,
           s.restart, s.status, s.batch_on_host, s.guests, s.components);
    printf("generation=%s\\nimage=%s\\nmessage=%s\\nwarning=%s\\nsocket=%s\\n", s.generation, s.image,
           s.message, s.warning, s.socket ? s.socket : "");
    printf("commands=%s\\ncommand_path=%s\\n", s.commands, s.command_path);
    printf("gpus=%s\\ncpus=%s\\nattach=%s\\n", s.gpus, s.cpus, s.attach);
    vhpc_state_free(&s);
    return 0;
}
"""


def read_by_plugin(folder: Path, fields: dict[str, str]) -> dict[str, str] | str:
    """What the plugin reads of a file that the hooks have written; its complaint if it refuses the file."""
    (folder / "jobs/7").mkdir(parents=True)
    own = statefile.header(Generation(7, 1, "0123abcd"), "debian:12")
    statefile.write_state(folder / "jobs/7/state", own | fields, os.getuid())
    sources = (PLUGIN / "state.c", PLUGIN / "text.c")
    lines = run_c(folder, STATE_PROBE, str(folder), "7", sources=sources).splitlines()
    return dict(line.split("=", 1) for line in lines) if len(lines) > 1 else lines[0]


def test_the_plugin_reads_each_field_that_the_hooks_write(tmp_path: Path) -> None:
    socket = "/" + "s" * (SOCKET_PATH_MAX - len("//g0/run.sock")) + "/g0/run.sock"
    texts = {
        "message": "m" * (statefile.LIMIT + 1),
        "warning": "w" * statefile.LIMIT,
        "socket": socket,
        "commands": "srun:squeue",
        "command_path": "/opt/slurm/bin",
        "gpus": "0:1,2:3",
        "cpus": "4:5:6,7:0:1",
        "attach": "batch",
    }
    counts = {"guests": str(MAX_GUESTS_PER_NODE), "components": "128"}
    numbers = {"status": "ready", "batch": "host"} | counts
    said = read_by_plugin(tmp_path, texts | numbers)
    own = {"job": "7", "restart": "1", "generation": "7.1.0123abcd", "image": "debian:12"}
    cut = {"message": "m" * statefile.LIMIT}
    ready, host = "1", "1"
    assert said == own | texts | cut | {"status": ready, "batch": host} | counts
    assert {"version", *own, *texts, *numbers} == statefile.PLUGIN_KEYS


@pytest.mark.parametrize("status", ["booting", "failed"])
def test_the_plugin_knows_each_status(tmp_path: Path, status: str) -> None:
    said = read_by_plugin(tmp_path, {"status": status, "kind": "user", "message": "m"})
    assert isinstance(said, dict)
    assert said["message"] == "m"


def test_the_plugin_refuses_a_socket_that_is_too_long(tmp_path: Path) -> None:
    said = read_by_plugin(tmp_path, {"status": "ready", "socket": "/" + "s" * SOCKET_PATH_MAX})
    assert "socket" in said
    assert isinstance(said, str)


def test_a_key_that_no_reader_knows_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="statsu"):
        statefile.write_state(tmp_path / "state", {"statsu": "ready"}, os.getuid())
    assert not list(tmp_path.iterdir())


def test_the_largest_state_file_is_one_that_the_plugin_reads(tmp_path: Path) -> None:
    limits = values(tmp_path, {"state.h": ["VHPC_STATE_MAX", "VHPC_STATE_LINE_MAX"]})
    keys = statefile.PLUGIN_KEYS | statefile.HOOK_KEYS
    longest = max(len(key) for key in keys) + len("=") + statefile.LIMIT
    assert longest <= limits["VHPC_STATE_LINE_MAX"]
    assert len(keys) * (longest + 1) <= limits["VHPC_STATE_MAX"]


def test_the_plugin_reads_the_keys_that_python_says_it_reads() -> None:
    table = re.findall(
        r'\[[A-Z_]+\] = "(\w+)"', (PLUGIN / "state.c").read_text().split("key_names[KEYS] = {")[1]
    )
    assert set(table[: len(statefile.PLUGIN_KEYS)]) == statefile.PLUGIN_KEYS
