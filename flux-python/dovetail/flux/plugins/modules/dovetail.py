# SPDX-License-Identifier: LGPL-3.0-or-later
"""The broker module, in a folder and by the name where Flux looks for it."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[4]))

from dovetail.flux.module import Dovetail as Dovetail
