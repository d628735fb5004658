#!/bin/bash
# SPDX-License-Identifier: LGPL-3.0-or-later
# A hybrid batch job, see dovetail-flux(7): `flux batch examples/hybrid.sh [PLAN.yaml]`, from the
# folder that has examples/.
#
# Half of four nodes run user-space Kubernetes, with the plan's simulations, packed, and a model
# server. LAMMPS runs on bare metal on the other half, and the model learns from each of its jobs
# what one costs. Then it predicts jobs that it has not seen.
# Output: hybrid-out/ with every log, predicted.csv and predicted.svg; the reports of both.
#flux: -N4 --dovetail=nodes=2,cores=all
set -euo pipefail
plan=${1:-examples/pitzdaily.yaml}
out=$PWD/hybrid-out
rm -rf "$out"
mkdir "$out"
(umask 077 && head -c 24 /dev/urandom | base64 >"$out/token") # others may share the machines

flux dovetail submit --wait-up --output "$out/simulations" "$plan"
flux dovetail kubectl create secret generic model --from-file=token="$out/token"
flux dovetail kubectl apply -f examples/model-server.yaml
flux dovetail kubectl wait --for=condition=Available --timeout=120s deployment/model
url=$(flux dovetail url model)

# Several of these nodes may be one machine, so no rank is bound to a core, and one that waits yields.
export OMPI_MCA_mpi_yield_when_idle=1
lammps() { # X Y Z LOG: on bare metal
  flux run -N2 -o cpu-affinity=off lmp -in examples/in.lj -screen none \
    -var x "$1" -var y "$2" -var z "$3" -log "$4"
}
client() { flux run -n1 python3 examples/model_client.py --token "$out/token" "$url" "$@"; }

mkdir "$out/learned" "$out/unseen"
for x in 8 12 16; do
  for y in 8 12 16; do
    for z in 8 12 16; do
      if [ $z -ne 12 ]; then
        lammps $x $y $z "$out/learned/$x-$y-$z.log"
        client learn "$out/learned/$x-$y-$z.log"
      else
        lammps $x $y $z "$out/unseen/$x-$y-$z.log"
      fi
    done
  done
done
client predict --output "$out/predicted" "$out"/unseen/*.log

flux dovetail wait --all
flux dovetail report
