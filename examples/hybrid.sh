#!/bin/bash
# SPDX-License-Identifier: LGPL-3.0-or-later
# A hybrid batch job, see dovetail-flux(7): `flux batch hybrid.sh PLAN.yaml`.
#
# Half of four nodes run user-space Kubernetes with the plan's simulations as pods, packed; bare-metal
# jobs run on the rest at the same time. Output: the report of the simulations.
#flux: -N4 --dovetail=nodes=2,cores=all
set -euo pipefail
plan=$(realpath "${1:?a plan, see dovetail-plan(5)}")

flux dovetail submit --wait-up "$plan"
flux run -N2 hostname # bare metal, next to it
flux dovetail wait --all
flux dovetail report
