# SPDX-License-Identifier: Apache-2.0
"""Writes the options in C, for the plugin; the build runs ``python3 -m vhpc_slurm.options.table FOLDER``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vhpc_slurm.options import OPTIONS, Option

HEAD = "/* Made by vhpc_slurm.options.table from the declarations in vhpc_slurm.options.declared. */\n"


def ids() -> str:
    """A header: the options' numbers, and their largest values."""
    names = [option.variable for option in OPTIONS]
    largest = {option.variable: option.grammar.most for option in OPTIONS if hasattr(option.grammar, "most")}
    lines = [
        "#ifndef VHPC_SPANK_OPTION_IDS_H",
        "#define VHPC_SPANK_OPTION_IDS_H",
        "enum vhpc_option_id {",
        *(f"    {name}," for name in names),
        "    VHPC_OPTION_COUNT,",
        "};",
        "enum {",
        *(f"    {name}_MOST = {most}," for name, most in largest.items()),
        "};",
        "#endif",
    ]
    return HEAD + "\n".join(lines) + "\n"


def rows() -> str:
    """The rows of the array ``vhpc_options``."""
    text = HEAD
    for option in OPTIONS:
        members = "".join(f"    .{name} = {value},\n" for name, value in _members(option))
        text += f"[{option.variable}] = {{\n{members}}},\n"
    return text


def write(folder: Path) -> None:
    """Write the header and the rows, as option_ids.h and option_table.inc."""
    (folder / "option_ids.h").write_text(ids())
    (folder / "option_table.inc").write_text(rows())


def _members(option: Option) -> Iterator[tuple[str, str]]:
    grammar: Any = option.grammar
    yield "name", _text(f"vhpc-{option.name}")
    yield "arginfo", _text(option.shape)
    yield "variable", _text(option.variable)
    yield "usage", _text(option.usage)
    yield "detail", _text(option.detail)
    yield "expected", _text(grammar.expected)
    yield "parse", f"parse_{type(grammar).__name__.lower()}"
    for limit in ("least", "most"):
        if hasattr(grammar, limit):
            yield limit, str(getattr(grammar, limit))
    if hasattr(grammar, "words"):
        yield "words", f"(const char *const[]){{{', '.join(map(_text, grammar.words))}, NULL}}"
    if hasattr(grammar, "refused"):
        rules = [
            f"{_mask(grammar.words, rule.present)}, {_mask(grammar.words, rule.absent)}, {_text(rule.why)}"
            for rule in grammar.refused
        ]
        rows = ", ".join(f"{{{rule}}}" for rule in (*rules, "0, 0, NULL"))
        yield "refused", f"(const struct vhpc_words_refused[]){{{rows}}}"


def _mask(words: tuple[str, ...], some: tuple[str, ...]) -> str:
    return f"{sum(1 << words.index(word) for word in some)}U"


def _text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


if __name__ == "__main__":
    write(Path(sys.argv[1]))
