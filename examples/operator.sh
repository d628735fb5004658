#!/bin/bash
# SPDX-License-Identifier: LGPL-3.0-or-later
# Simulations as MiniClusters of the Flux Operator, see dovetail-flux(7):
# `FLUX_OPERATOR=/a/checkout flux batch examples/operator.sh [PLAN.yaml]`, from the folder that has
# examples/. The checkout is the operator's, in which `go build -o bin/manager .` was typed.
#
# The operator's manager is a Flux job on the node that Kubernetes leaves free. It ends with the
# batch job, and so does the folder with its credential.
#flux: -N2 --dovetail=nodes=1,cores=all
set -euo pipefail
plan=${1:-examples/pitzdaily.yaml}

flux dovetail up
flux dovetail kubectl apply --server-side -f "$FLUX_OPERATOR/config/crd/bases"
# A definition that is quite new has no conditions yet, which kubectl takes for an error.
timeout 60 sh -c 'until flux dovetail kubectl wait --for=condition=Established --all crd
                  do sleep 0.2; done'
# shellcheck disable=SC2016 # the job's own variables
flux submit --output=operator.log sh -c 'umask 077
  export KUBECONFIG="$FLUX_JOB_TMPDIR/kubeconfig"
  flux dovetail kubectl config view --raw >"$KUBECONFIG"
  exec "$FLUX_OPERATOR/bin/manager" --metrics-bind-address 0 --health-probe-bind-address 0'

flux dovetail submit "$plan"
flux dovetail wait --all
flux dovetail report
