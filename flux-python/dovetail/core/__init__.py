# SPDX-License-Identifier: LGPL-3.0-or-later
"""Values and arithmetic that all share: protocol, event log, errors, requests, weights, units."""
