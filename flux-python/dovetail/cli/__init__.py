# SPDX-License-Identifier: LGPL-3.0-or-later
"""One module for each `dovetail` subcommand; see `dovetail.cli.main` for what it must offer."""
