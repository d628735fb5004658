# SPDX-License-Identifier: LGPL-3.0-or-later
"""Has the broker module loaded when the instance starts (step 1); run by flux-modprobe(1)."""

from pathlib import Path
from typing import Any


def setup(context: Any) -> None:  # noqa: ANN401
    """Put the module, which lies beside this folder, on the list."""
    module = Path(__file__).resolve().parents[3] / "broker_module.py"
    context.modprobe.update_module("dovetail", {"module": str(module)})
    context.load_modules(["dovetail"])
