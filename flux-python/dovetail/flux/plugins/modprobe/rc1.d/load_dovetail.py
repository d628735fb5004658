# SPDX-License-Identifier: LGPL-3.0-or-later
"""Has the broker module loaded when the instance starts; run by flux-modprobe(1)."""

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[5]))

from dovetail.core.errors import BadInput
from dovetail.flux import option


def setup(context: Any) -> None:  # noqa: ANN401
    """Put the module on the list, unless what it is to read is wrong: the instance goes on then.

    Its folder is on FLUX_MODULE_PATH_PREPEND.
    """
    try:
        option.check_instance(context.conf_get("dovetail", {}))
    except BadInput as error:
        if context.rank == 0:
            print(f"Dovetail is not loaded: {error}", file=sys.stderr)
        return
    context.load_modules(["dovetail"])
