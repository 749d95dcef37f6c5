# SPDX-License-Identifier: Apache-2.0
"""Completions for shells: commands and options of the command line itself, images, and jobs of the user.

Nothing is kept from one call to the next, so nothing is out of date.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from vhpc_slurm.cli import context, options
from vhpc_slurm.cli.verbs import loaded
from vhpc_slurm.errors import VhpcError


def complete(
    ctx: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="[WORD]...", show_default=False)] = None,
) -> int:
    """Print what may stand in place of the last word of a command line, for completions/."""
    print("\n".join(candidates(ctx.find_root().command, words or [""])))
    return 0


def candidates(root: Any, words: Sequence[str]) -> list[str]:
    """Completions of the last of the words after ``vhpc``.

    Args:
        root: the command of typer.
        words: the others are complete; the last may be empty.

    Returns:
        words that begin with the last one; empty if the shell should offer files, or nothing is known.
    """
    command, waiting, places = root, None, 0
    for word in words[:-1]:
        if waiting is not None:
            waiting = None
        elif word.startswith("-"):
            waiting = _taking_value(command, word)
        elif word in getattr(command, "commands", {}):
            command, places = loaded(command.commands[word]), 0
        else:
            places += 1
    last = words[-1]
    if waiting is not None:
        found = _values(waiting)
    elif last.startswith("-"):
        found = sorted(
            {name for p in command.params for name in p.opts if name.startswith("--")} | {"--help"}
        )
    elif hasattr(command, "commands"):
        names = [] if places else command.commands
        found = sorted(name for name in names if not command.commands[name].hidden)
    else:
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        found = _values(arguments[places]) if places < len(arguments) else []
    return [word for word in found if word.startswith(last)]


def _taking_value(command: Any, word: str) -> Any:
    """The option that takes the next word as its value, if there is one."""
    for parameter in command.params:
        if word in parameter.opts and not getattr(parameter, "is_flag", False):
            return parameter
    return None


def _values(parameter: Any) -> list[str]:
    """Values of an option or argument, by the name that the manual gives them."""
    metavar = parameter.metavar or ""
    kinds: dict[str, Callable[[], list[str]]] = {
        "JOBID": _jobs,
        "SRC": lambda: [f"{job}:" for job in _jobs()],
        "DST": lambda: [f"{job}:" for job in _jobs()],
    }
    find = kinds.get(metavar, _images if "NAME[:TAG]" in metavar or metavar.startswith("IMAGE") else list)
    with contextlib.suppress(VhpcError):  # a shell has no place for messages
        return find()
    return []


def _images() -> list[str]:
    from vhpc_slurm.cli.images.names import image_names

    return image_names(options.config())


def _jobs() -> list[str]:
    from vhpc_slurm import slurm

    return [str(job) for job in slurm.user_jobs(options.config()).running(context.user_name())]
