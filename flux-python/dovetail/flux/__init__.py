# SPDX-License-Identifier: LGPL-3.0-or-later
"""Dovetail inside a Flux instance.

`module.py` keeps the state, in `instance/`, and submits the slices; each slice is a Flux job
that runs `slice_agent.py`. `command.py` is what a user types. Only `module.py`, `relay.py` and what
Flux loads, in `plugins/`, import Flux's bindings: all else speaks through the relay, a child
process.
"""
