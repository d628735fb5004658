#!/bin/bash
# SPDX-License-Identifier: LGPL-3.0-or-later
# A hybrid batch job, see dovetail-flux(7): `flux batch examples/hybrid.sh [PLAN.yaml]`, from the
# folder that has examples/.
#
# Half of four nodes run user-space Kubernetes, with the plan's simulations, packed, and a model
# server. LAMMPS runs on bare metal on the other half, and the model learns from each of its jobs
# what one costs. Then it predicts jobs that it has not seen.
# HYBRID_JOBS=LEARNED,UNSEEN is how many of each, 18,9 unless set, and 1331 at most in all.
# HYBRID_RESUME=1 keeps what an earlier job left in hybrid-out/: those with a log are not run again.
# Output: hybrid-out/ with every log, predicted.csv and predicted.svg; the reports of both.
#flux: -N4 --dovetail=nodes=2,cores=all
set -euo pipefail
plan=${1:-examples/pitzdaily.yaml}
jobs=${HYBRID_JOBS:-18,9}
if ! [[ $jobs =~ ^[1-9][0-9]{0,3},[1-9][0-9]{0,3}$ ]] ||
  ((few = ${jobs#*,}, all = ${jobs/,/+}, few < 2 || all > 1331)); then
  echo "hybrid.sh: HYBRID_JOBS=$jobs: give LEARNED,UNSEEN, the latter 2 or more, both 1331 at most" >&2
  exit 2
fi
out=$PWD/hybrid-out
rm -rf "$out/simulations"
[ -n "${HYBRID_RESUME:-}" ] || rm -rf "$out"
mkdir -p "$out/learned" "$out/unseen"
(umask 077 && head -c 24 /dev/urandom | base64 >"$out/token") # others may share the machines

flux dovetail submit --wait-up --output "$out/simulations" "$plan"
flux dovetail kubectl create secret generic model --from-file=token="$out/token"
flux dovetail kubectl apply -f examples/model-server.yaml
flux dovetail kubectl wait --for=condition=Available --timeout=120s deployment/model
url=$(flux dovetail url model)

# Several of these nodes may be one machine, so no rank is bound to a core, and one that waits yields.
export OMPI_MCA_mpi_yield_when_idle=1
lammps() { # LOG: on bare metal, of the size that its name says
  IFS=-. read -r x y z _ <<<"${1##*/}"
  flux run -N2 -o cpu-affinity=off lmp -in examples/in.lj -screen none \
    -var x "$x" -var y "$y" -var z "$z" -log "$1.part"
  mv "$1.part" "$1"
}
client() { flux run -n1 python3 examples/model_client.py --token "$out/token" "$url" "$@"; }

# All sizes of 6 to 16 cells in each direction, in an order that is random, and always the same.
mapfile -t sizes < <({
  RANDOM=1
  for size in {6..16}-{6..16}-{6..16}.log; do echo "$RANDOM $size"; done
} | sort -n | cut -d' ' -f2)
kept=() left=() unseen=()
for ((job = 0; job < all; job++)); do
  log=$out/learned/${sizes[job]}
  if ((job * few / all < (job + 1) * few / all)); then # among the others, since cores get free later
    log=$out/unseen/${sizes[job]}
    unseen+=("$log")
  elif [ -e "$log" ]; then
    kept+=("$log")
  fi
  [ -e "$log" ] || left+=("$log")
done
[ ${#kept[@]} -eq 0 ] || client learn "${kept[@]}"
for log in "${left[@]}"; do
  lammps "$log"
  [ "${log%/*}" != "$out/learned" ] || client learn "$log"
done
client predict --output "$out/predicted" "${unseen[@]}"

flux dovetail wait --all
flux dovetail report
