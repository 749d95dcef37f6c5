# SPDX-License-Identifier: Apache-2.0
"""The table [checkpoint]: off by default; the folder has an absolute path."""

from __future__ import annotations

import msgspec
import pytest

from vhpc_slurm.config import Config


def test_checkpoints_are_off_by_default() -> None:
    assert msgspec.convert({}, Config).checkpoint.folder == ""
    assert msgspec.convert({"checkpoint": {"folder": "/c"}}, Config).checkpoint.hold_timeout_s == 60


@pytest.mark.parametrize("wrong", [{"folder": "c"}, {"folder": "/c\0"}, {"hold_timeout_s": 0}, {"every": 1}])
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError, match="checkpoint"):
        msgspec.convert({"checkpoint": wrong}, Config)
