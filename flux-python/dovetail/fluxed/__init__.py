# SPDX-License-Identifier: LGPL-3.0-or-later
"""Dovetail inside a Flux instance (steps 1 to 3 and 8).

`dovetail.broker_module` keeps the state, in `instance.py`, and submits the slices; each slice
is a Flux job that runs `slice.py`. `command.py` is what a user types. Only the broker module
and `cli/dovetail_cli.py` import flux: all else speaks through the latter, as a child process.
"""
