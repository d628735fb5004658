# SPDX-License-Identifier: LGPL-3.0-or-later
"""A plan, a controller and an executor joined into a run, and its log."""
