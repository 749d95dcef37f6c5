# SPDX-License-Identifier: Apache-2.0
"""Environment files: options of sbatch as a table of TOML, which a group can share.

The keys are the names of the options without --vhpc-. A value is what a user writes after the equals sign;
numbers may be numbers of TOML, lists arrays, and the variables of --vhpc-env a table.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from typing import Any

from vhpc_slurm.options.declared import ENVIRONMENT, OPTIONS
from vhpc_slurm.options.grammars import ValueRefusedError
from vhpc_slurm.options.option import Option
from vhpc_slurm.options.saving import RESUME

_WORDS = {str: "a string", int: "a whole number", list: "an array of strings", dict: "a table of strings"}


def parse_environment(text: str) -> list[tuple[Option, str]]:
    """The options of a file with their values as a user writes them, in the order of the declarations.

    Raises:
        ValueRefusedError: the text is not such a file; the message has the line.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as err:
        raise ValueRefusedError(f"it is not TOML: {err}") from None
    known = {option.name: option for option in OPTIONS if option not in (ENVIRONMENT, RESUME)}
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"options are {', '.join(known)}"
            raise ValueRefusedError(f"{_place(text, key)}there is no option {key[:80]!r} ({hint})")
    return [
        (option, _value(option, table[name], _place(text, name)))
        for name, option in known.items()
        if name in table
    ]


def _value(option: Option, value: Any, place: str) -> str:
    """A value as a user writes it, after the equals sign of the option."""
    about = f"{place}{option.name}"
    if type(value) not in option.grammar.in_files:
        expected = " or ".join(_WORDS[one] for one in option.grammar.in_files)
        raise ValueRefusedError(f"{about}: {expected} is expected")
    text = _joined(value, about) if isinstance(value, list | dict) else str(value)
    try:
        option.grammar.parse(text)
    except ValueRefusedError as err:
        raise ValueRefusedError(f"{about}={text[:80]}: {err}") from None
    return text


def _joined(value: list[Any] | dict[str, Any], about: str) -> str:
    """The strings of an array or a table, with commas between them."""
    if not all(isinstance(one, str) for one in (value.values() if isinstance(value, dict) else value)):
        raise ValueRefusedError(f"{about}: {_WORDS[type(value)]} is expected")
    parts = [f"{name}={one}" for name, one in value.items()] if isinstance(value, dict) else value
    if any("," in part for part in parts):
        raise ValueRefusedError(f"{about}: a value has a comma, which the option has between values")
    return ",".join(parts)


def _place(text: str, key: str) -> str:
    """The line of a key; empty if it is not written in the usual way."""
    written = rf"""^[ \t]*(\[[ \t]*)?["']?{re.escape(key)}["']?[ \t]*[\].=]"""
    found = re.search(written, text, re.MULTILINE)
    return f"line {text.count(chr(10), 0, found.start()) + 1}: " if found else ""
