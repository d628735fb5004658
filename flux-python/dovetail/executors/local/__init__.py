# SPDX-License-Identifier: LGPL-3.0-or-later
"""Simulations as processes of this machine."""
