# SPDX-License-Identifier: Apache-2.0
"""Grammars of option values: a user's text becomes a value, or is refused.

The plugin has a parser for each of them in C (in ``spank_plugin/options.c``, with the name of the class),
with the same declared limits. It checks values at submission; this module checks them again on the
controller, because users may have changed them. ``tests/unit/rules/test_shared_options.py`` gives both the
same texts.
"""
# Decision: Options of sbatch are declared in Python and parsed twice

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import combinations
from typing import Any, NamedTuple

from vhpc_slurm.options.mountpoint import MOUNTS_MAX, mount_point_refusal, mounts_refusal

_SHIFTS = {"K": 10, "M": 20, "G": 30, "T": 40}
EVERY = "every:"
_MINUTES = {"m": 1, "h": 60}
_VARIABLE = re.compile(
    r"(?!(HOME|LOGNAME|OLDPWD|PWD|USER)(=|\Z)|PMI|SLURM|VHPC_)[A-Za-z_][A-Za-z0-9_]*(=|\Z)", re.ASCII
)
CHECKPOINT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z", re.ASCII)
CLUSTER_NAME = r"([a-z0-9][a-z0-9._-]{0,63}/)?[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
"""A regular expression for names of clusters; one of an account begins with it, as Slurm writes it."""
KEEP = ":keep"
_CLUSTER = re.compile(rf"{CLUSTER_NAME}({KEEP})?\Z", re.ASCII)
_BREAKS = "\u2028\u2029"


class ValueRefusedError(ValueError):
    """A text is not a value of its option; the message says what is expected."""


class Grammar:
    """Values of an option.

    Attributes:
        expected: a correct value, in words.
        in_files: types of values in an environment file.
    """

    expected: str
    in_files: tuple[type, ...] = (str,)

    def parse(self, text: str) -> Any:
        """The value of a text.

        Raises:
            ValueRefusedError: the text is not correct.
        """
        raise NotImplementedError


class Count(Grammar):
    """A whole number."""

    in_files = (str, int)

    def __init__(self, least: int, most: int, of: str = "") -> None:
        self.least, self.most = least, most
        what = f"a whole number of {of}" if of else "a whole number"
        self.expected = f"{what} from {least} to {most} is expected"

    def parse(self, text: str) -> int:
        """The number."""
        number = _number(text)
        if number is None or not self.least <= number <= self.most:
            raise ValueRefusedError(self.expected)
        return number


class Size(Grammar):
    """A size in MiB, written as Slurm's --mem: a number with the suffix K, M, G or T, without suffix MiB."""

    in_files = (str, int)

    def __init__(self, least: int, most: int, example: str) -> None:
        self.least, self.most = least, most
        self.expected = (
            f"a size from {least}M to {most >> 20}T is expected: a whole number with the suffix K, M, G or T "
            f"(without suffix: M), as in {example}"
        )

    def parse(self, text: str) -> Any:
        """The size in MiB; parts of a MiB count as one."""
        suffix = text[-1:].upper() if text.isascii() else ""
        shift = _SHIFTS.get(suffix, 20)
        number = _number(text[:-1] if suffix in _SHIFTS else text)
        if number is None or not self.least <= (mib := -(-(number << shift) >> 20)) <= self.most:
            raise ValueRefusedError(self.expected)
        return mib


class Disk(Size):
    """A size, and a colon and a directory of the guest if a disk is mounted there."""

    def parse(self, text: str) -> tuple[int, str]:
        """The size in MiB and the directory; it is empty for a disk that takes the changes to the root."""
        size, colon, mount = text.partition(":")
        mib = super().parse(size)
        if colon and (why := mount_point_refusal(mount)):
            raise ValueRefusedError(why)
        return mib, mount


class Choice(Grammar):
    """One of a few words."""

    def __init__(self, of: type[StrEnum]) -> None:
        self._of, self.words = of, tuple(one.value for one in of)
        self.expected = " or ".join(f"'{word}'" for word in self.words) + " is expected"

    def parse(self, text: str) -> StrEnum:
        """The member of the enumeration."""
        if text not in self.words:
            raise ValueRefusedError(self.expected)
        return self._of(text)


class Together(NamedTuple):
    """Words that a list may not have together: all of ``present``, and none of ``absent``."""

    present: tuple[str, ...]
    absent: tuple[str, ...]
    why: str

    def refuses(self, words: Sequence[str]) -> bool:
        """Whether a list is refused."""
        return all(one in words for one in self.present) and not any(one in words for one in self.absent)


class Words(Grammar):
    """The word none, or a list of words with commas between them; the value has them in their order here."""

    in_files = (str, list)

    def __init__(self, words: tuple[str, ...], refused: tuple[Together, ...], example: str) -> None:
        self.words, self.refused = words, refused
        *others, last = (f"'{word}'" for word in words)
        listed = f"{', '.join(others)} and {last}"
        self.expected = f"'none' or a list of {listed} is expected, such as '{example}'"

    def parse(self, text: str) -> str:
        """The canonical list."""
        asked = text.split(",")
        if asked == ["none"]:
            return text
        if len(set(asked)) < len(asked) or not set(asked) <= set(self.words):
            raise ValueRefusedError(self.expected)
        for rule in self.refused:
            if rule.refuses(asked):
                raise ValueRefusedError(rule.why)
        return ",".join(word for word in self.words if word in asked)

    def values(self) -> Iterator[str]:
        """All values."""
        yield "none"
        for count in range(len(self.words)):
            for words in combinations(self.words, count + 1):
                if not any(rule.refuses(words) for rule in self.refused):
                    yield ",".join(words)


class Moments(Words):
    """A list of words, of which one may be an interval: every:N in minutes, or with the suffix h in hours."""

    def __init__(self, words: tuple[str, ...], most: int) -> None:
        """``most`` is the longest interval in minutes."""
        super().__init__(words, (), "")
        self.least, self.most = 1, most
        listed = ", ".join(f"'{word}'" for word in words)
        self.expected = (
            f"'none' or a list of {listed} and 'every:N' is expected, N from 1 to {most} minutes (30m) or "
            f"in hours (2h), such as '{words[0]},every:30m'"
        )

    def parse(self, text: str) -> str:
        """The canonical list, with the interval in minutes at its end."""
        items = text.split(",")
        every = [item.removeprefix(EVERY) for item in items if item.startswith(EVERY)]
        words = [item for item in items if not item.startswith(EVERY)]
        known = super().parse(",".join(words)) if words else ""
        if not every:
            return known
        unit = every[0][-1:]
        minutes = _number(every[0][:-1] if unit in _MINUTES else every[0])
        if minutes is not None:
            minutes *= _MINUTES.get(unit, 1)
        if len(every) > 1 or known == "none" or minutes is None or not self.least <= minutes <= self.most:
            raise ValueRefusedError(self.expected)
        return ",".join([known, f"{EVERY}{minutes}m"] if known else [f"{EVERY}{minutes}m"])


class File(Grammar):
    """The path of a file."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.expected = (
            f"the path of a file is expected, at most {most} bytes of UTF-8 without control characters"
        )

    def parse(self, text: str) -> str:
        """The path."""
        if not _is_plain(text, self.most) or text.endswith("/"):
            raise ValueRefusedError(self.expected)
        return text


class Directory(Grammar):
    """A directory of guests."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.expected = (
            f"an absolute path is expected, at most {most} bytes of UTF-8 without control characters"
        )

    def parse(self, text: str) -> str:
        """The path."""
        if not _is_plain(text, self.most) or text[0] != "/":
            raise ValueRefusedError(self.expected)
        return text


class Mounts(Grammar):
    """Folders of shares that guests have at second places, with commas between them."""

    in_files = (str, list)

    def __init__(self, most: int) -> None:
        self.most = most
        self.expected = (
            f"SRC:DST or SRC:DST:ro is expected, or up to {MOUNTS_MAX} of them with commas between them and "
            f"at most {most} bytes: absolute paths without '.' or '..' as a part, such as "
            "/scratch/data:/data:ro"
        )

    def parse(self, text: str) -> str:
        """The text itself, for ``parse_mounts``."""
        why = mounts_refusal(text) if _is_plain(text, self.most) else ""
        if why is not None:
            raise ValueRefusedError(why or self.expected)
        return text


class Variables(Grammar):
    """Variables of the environment, with commas between them."""

    in_files = (str, dict, list)

    def __init__(self, most: int) -> None:
        self.most = most
        self.expected = (
            f"NAME=VALUE or NAME is expected, or several with commas between them and at most {most} bytes "
            "without control characters: names of letters, digits and '_', each once, but not HOME, LOGNAME, "
            "OLDPWD, PWD, USER, PMI*, SLURM* or VHPC_*"
        )

    def parse(self, text: str) -> str:
        """The text itself; each part at a comma is a variable."""
        items = text.split(",")
        names = [item.partition("=")[0] for item in items]
        correct = all(map(_VARIABLE.match, items)) and len(set(names)) == len(names)
        if not correct or not _is_plain(text, self.most):
            raise ValueRefusedError(self.expected)
        return text


class Image(Grammar):
    """The name of an image, which ``ImageRef`` parses."""

    expected = (
        "[own/]NAME[:TAG][@sha256:DIGEST] is expected: a name of lower case letters, digits, '.', '_' and "
        "'-' that starts with a letter or digit, at most 64 characters, and 64 hexadecimal digits (see: "
        "vhpc image ls); or a source such as docker://NAME or oci-archive:/PATH"
    )

    def parse(self, text: str) -> str:
        """The text itself."""
        return text


class CheckpointName(Grammar):
    """The name of a checkpoint."""

    expected = (
        "the name of a checkpoint is expected: letters, digits, '.', '_' and '-', at most 64, which begin "
        "with a letter or digit (see: vhpc checkpoint ls)"
    )

    def parse(self, text: str) -> str:
        """The text itself."""
        if not CHECKPOINT_NAME.match(text):
            raise ValueRefusedError(self.expected)
        return text


class ClusterName(Grammar):
    """The name of a cluster, of the user or of an account, and whether it is kept."""

    expected = (
        "[ACCOUNT/]NAME[:keep] is expected: letters, digits, '_' and '-', at most 64, which begin with a "
        "letter or digit; before it an account in lower case, as sacctmgr shows it"
    )

    def parse(self, text: str) -> str:
        """The text itself."""
        if not _CLUSTER.match(text):
            raise ValueRefusedError(self.expected)
        return text


def parse_cluster(value: str) -> tuple[str, bool]:
    """The name in a value of --vhpc-cluster, and whether the cluster is kept."""
    return value.removesuffix(KEEP), value.endswith(KEEP)


def cluster_account(name: str) -> str:
    """The account that a cluster belongs to, by its name; empty if it is a user's."""
    return name.rpartition("/")[0]


def is_cluster_name(text: str) -> bool:
    """Whether a text is the name of a cluster, without :keep."""
    return ":" not in text and _CLUSTER.match(text) is not None


class OwnImage(Image):
    """The name of an image that the user may change."""

    expected = "own/NAME[:TAG] is expected, a name in your own catalogue of images"


def _is_plain(text: str, most: int) -> bool:
    """Whether a text is UTF-8 without control characters, of 1 to ``most`` bytes."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:  # bytes that are not UTF-8
        return False
    plain = not any(char < " " or "\x7f" <= char <= "\x9f" or char in _BREAKS for char in text)
    return 0 < size <= most and plain


def _number(text: str) -> int | None:
    """A decimal number without sign or blanks, of at most 20 digits; None if the text is not one."""
    digits = text.lstrip("0")
    return int(text) if text.isascii() and text.isdigit() and len(digits) <= 20 and len(text) < 4096 else None
