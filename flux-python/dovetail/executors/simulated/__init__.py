# SPDX-License-Identifier: LGPL-3.0-or-later
"""Simulations as numbers, under a virtual clock."""
