# SPDX-License-Identifier: LGPL-3.0-or-later
"""Dovetail inside a Flux instance.

`module.py` keeps the state, in `instance/`, and submits the slices; each slice is a Flux job
that runs `slice_agent.py`. `command.py` is what a user types. Only the module and what Flux
loads, in `plugins/`, import flux: all else speaks through `plugins/cli/dovetail_cli.py`, as a
child process.
"""
