# SPDX-License-Identifier: LGPL-3.0-or-later
"""Explains a run from its log: it reads what was decided, and never decides again."""
