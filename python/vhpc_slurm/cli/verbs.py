# SPDX-License-Identifier: Apache-2.0
"""Registration of verbs: each is a row that names a function.

The parameters of the function are the arguments of the verb, its docstring is the help. The module of the
function is imported when the verb runs or prints its help: `vhpc --help` must not wait for libvirt, and
`vhpc image ls` not for the client of vhpcd.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

PASS_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of a verb that passes unknown options on to another program."""
PASS_ALL = PASS_OPTIONS | {"allow_interspersed_args": False}
"""The same for a verb that passes all on that follows its arguments, such as a command with options."""


class Verb(TyperCommand):
    """A row in the help of `vhpc` or of a group."""

    def __init__(
        self,
        name: str,
        target: str,
        sentence: str | None = None,
        *,
        settings: dict[str, Any] | None = None,
        **row: Any,
    ) -> None:
        """A verb whose module is not imported yet.

        Args:
            name: what the user writes.
            target: ``module:name`` of its function or :class:`Group`; the module is one below this package.
            sentence: the first sentence of its help; a list shortens it to one line.
            settings: of its context (click's context_settings).
            row: ``short_help``, which a list shows in place of the sentence; ``hidden``.
        """
        super().__init__(name, help=sentence, **row)
        self._target, self._settings = target, settings

    def load(self) -> Any:
        """The command, or the group of commands, with its arguments."""
        module, _, name = self._target.partition(":")
        target = getattr(import_module(f"vhpc_slurm.cli.{module}"), name)
        if isinstance(target, Group):
            return target.command(self.name, self.help)
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(self.name, hidden=self.hidden, context_settings=self._settings)(target)
        return typer.main.get_command(app)


class LazyGroup(TyperGroup):
    """Imports the verb that runs, and only this one."""

    default = ""
    """The verb of a first word that is a number; empty: there is none."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb that the first word names, loaded."""
        if self.default and args[0].isdecimal():
            args = [self.default, *args]
        if self.default and self.get_command(ctx, args[0]) is None:
            verbs = ", ".join(self.list_commands(ctx))
            ctx.fail(f"{args[0][:80]!r} is neither a job id nor a verb of this command: {verbs}")
        name, verb, rest = super().resolve_command(ctx, args)
        return name, loaded(verb), rest


def loaded(command: Any) -> Any:
    """A command of a group, with its arguments; None if the group has no such command."""
    return command.load() if isinstance(command, Verb) else command


def print_help(ctx: typer.Context) -> None:
    """Print the help of a group, if no verb of it follows."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        raise typer.Exit


class Group:
    """Verbs that follow one word."""

    def __init__(self, *verbs: Verb, callback: Callable[..., Any] = print_help, default: str = "") -> None:
        """A group.

        Args:
            verbs: in the order of the help.
            callback: runs first; its parameters are the options between the word and a verb.
            default: name of the verb that may be left out before a number.
        """
        self._verbs, self._callback, self._default = verbs, callback, default

    def command(self, name: str | None, text: str | None, **settings: Any) -> Any:
        """The command of the group, with this help; ``settings`` are those of typer.Typer."""
        app = typer.Typer(
            name=name, help=text, cls=LazyGroup, add_completion=False, rich_markup_mode=None, **settings
        )
        app.callback(invoke_without_command=True)(self._callback)
        group: Any = typer.main.get_command(app)
        group.default = self._default
        for verb in self._verbs:
            group.add_command(verb)
        return group
