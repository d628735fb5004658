# SPDX-License-Identifier: LGPL-3.0-or-later
"""The user's YAML into specs, checked before anything starts."""
