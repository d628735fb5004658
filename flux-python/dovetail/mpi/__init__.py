# SPDX-License-Identifier: LGPL-3.0-or-later
"""Starts ranks and reads their pages. The standard library only."""
