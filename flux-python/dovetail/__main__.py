# SPDX-License-Identifier: LGPL-3.0-or-later
"""Lets `python -m dovetail` do what `dovetail` does."""

import sys

from dovetail.cli.main import main

sys.exit(main())
