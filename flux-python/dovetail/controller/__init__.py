# SPDX-License-Identifier: LGPL-3.0-or-later
"""Decides: events in, actions out; no I/O, no clock."""
