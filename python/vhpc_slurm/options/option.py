# SPDX-License-Identifier: Apache-2.0
"""The parts of an option's declaration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from vhpc_slurm.options.grammars import Grammar


class Limit(NamedTuple):
    """How a rule of the site's policy limits an option.

    Attributes:
        key: of ``Rule``: a largest number, or the permitted words.
        refusal: for a job that asks for more; it may name ``{asked}`` (the number, or the word), ``{most}``
            (of a number), ``{permitted}`` and ``{first}`` (of words: all of them, and the first one).
        none: the same where the largest number is 0.
    """

    key: str
    refusal: str
    none: str = ""


class Option(NamedTuple):
    """An option of sbatch, salloc and srun.

    Attributes:
        name: what follows --vhpc-.
        grammar: its values.
        shape: of a value, for --help.
        usage: one line for --help.
        detail: paragraph for the manual, in plain text.
        fields: of ``JobRequest``, which have the value; none: hooks/slurmctld.py decides alone what it means.
            A rule of the site's policy that has a key ``default_FIELD`` may set it for jobs without it.
        limit: of the policy; None: rules do not limit it.
        plan: help of this option of `vhpc plan`, if a plan depends on it.
        reported: `vhpc report` shows it.
    """

    name: str
    grammar: Grammar
    shape: str
    usage: str
    detail: str
    fields: tuple[str, ...] = ()
    limit: Limit | None = None
    plan: str = ""
    reported: bool = False

    @property
    def variable(self) -> str:
        """The variable of the environment that sets it."""
        return f"VHPC_{self.name.upper().replace('-', '_')}"

    @property
    def field(self) -> str:
        """The first field of ``JobRequest``; other tables name the option by it."""
        return self.fields[0]

    def values(self, text: str) -> dict[str, Any]:
        """The fields of ``JobRequest`` for a value.

        Raises:
            ValueRefusedError: the text is not correct.
        """
        value = self.grammar.parse(text)
        return dict(zip(self.fields, value if len(self.fields) > 1 else (value,), strict=False))

    def text(self, values: Mapping[str, Any]) -> str:
        """How a user writes a value; the inverse of ``values``."""
        first, *more = (values.get(field) for field in self.fields)
        return ":".join([f"{first}{self.unit}", *(str(one) for one in more if one)])

    @property
    def unit(self) -> str:
        """Suffix of numbers of the first field."""
        return "M" if self.field.endswith("_mib") else ""
