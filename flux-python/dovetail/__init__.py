# SPDX-License-Identifier: LGPL-3.0-or-later
"""Dovetail: packs MPI simulations into the CPU time that their ranks leave idle."""

__version__ = "0.1.0"
