# SPDX-License-Identifier: LGPL-3.0-or-later
"""The control node: certificates, the API, who may join, who is lost, volumes, metrics."""
