# SPDX-License-Identifier: LGPL-3.0-or-later
"""The places where ranks run; each module has one implementation of `protocol.Executor`."""
