# SPDX-License-Identifier: LGPL-3.0-or-later
"""Lets `python -m dovetail` do what `dovetail` does."""

from dovetail.cli.main import entry

entry()
