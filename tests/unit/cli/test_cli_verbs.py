# SPDX-License-Identifier: Apache-2.0
"""How verbs of `vhpc` are registered: their lists, and what is imported for one of them."""

from __future__ import annotations

import typing

from command_tree import commands, in_new_python


def test_lists_of_groups_have_the_first_sentence_of_each_help() -> None:
    found = commands()
    rows = {
        f"{name} {word}": verb
        for name, group in found.items()
        for word, verb in getattr(group, "commands", {}).items()
        if verb.help and not hasattr(found[f"{name} {word}".strip()], "commands")
    }
    assert len(rows) > 25
    for name, row in rows.items():
        assert " ".join(found[name].help.split()).startswith(row.help), name
        assert row.help.endswith("."), name


def test_a_verb_imports_no_module_of_another() -> None:
    code = (
        "import sys; from vhpc_slurm.cli.main import main; main(['image', 'names', '--help']);"
        " print(sorted(m for m in sys.modules if m.startswith(('vhpc_slurm.cli.', 'vhpc_slurm.controller'))))"
    )
    printed = in_new_python(code)
    shared = ("context", "main", "options", "output", "progress", "verbs")
    expected = [f"vhpc_slurm.cli.{name}" for name in (*shared, "images", "images.names")]
    assert printed.splitlines()[-1] == str(sorted(expected))


def test_help_of_verbs_needs_no_optional_parts() -> None:
    """A login host does not have libvirt and the packages of `vhpc web`."""
    code = (
        "import sys; sys.modules |= dict.fromkeys(('libvirt', 'uvicorn', 'starlette', 'pyslurm'));"
        " from command_tree import commands; print(len(commands()))"
    )
    printed = in_new_python(code)
    assert int(printed) > 50


def test_no_command_needs_a_newer_typer_than_debian_has() -> None:
    """typer 0.15 of Debian 13 ends every command if one has an argument of a Literal type (0.19 knows it)."""

    found = [command.callback for command in commands().values()]
    assert len(found) > 40
    for callback in found:
        types = str(typing.get_type_hints(callback, include_extras=True))
        assert "Literal" not in types, callback
