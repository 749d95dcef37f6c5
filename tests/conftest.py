"""For all tests: processes that they start import the checkout's package too."""

from __future__ import annotations

import os
from pathlib import Path

os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1] / "python")
