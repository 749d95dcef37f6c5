"""vhpc fabric manager: the other end of a vhpcd whose OpenSM runs on another host."""

from __future__ import annotations

import sys

import msgspec

from vhpc_slurm.config import Config
from vhpc_slurm.errors import UserError
from vhpc_slurm.fabric.managers import serve, words_of_ssh
from vhpc_slurm.fabric.opensm import MAX_FILE
from vhpc_slurm.fabric.select import local_opensm


def manager(config: Config, words: list[str], *, from_ssh: bool) -> int:
    """Do it, print the answer; 1 when it could not be done."""
    if from_ssh and words:
        raise UserError("with --from-ssh the words come from SSH", f"{' '.join(words)!r} is given as well")
    if from_ssh:
        words = words_of_ssh()
    given = sys.stdin.buffer.read(MAX_FILE + 1) if words == ["replace"] else b""
    answer = serve(local_opensm(config.fabric), words, given)
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()
    return 1 if answer.error else 0
