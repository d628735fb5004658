# SPDX-License-Identifier: LGPL-3.0-or-later
"""Comparisons and their figures; `dovetail bench` runs them."""
