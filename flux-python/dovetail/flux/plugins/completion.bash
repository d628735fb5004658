# SPDX-License-Identifier: LGPL-3.0-or-later
# Completes `flux dovetail` in bash; `dovetail env` has it read by interactive shells.
# In front of Flux's own completion, which knows its own commands only.
_flux_dovetail() {
  local cur=${COMP_WORDS[COMP_CWORD]} words
  if [ "${COMP_WORDS[1]}" != dovetail ] || [ "$COMP_CWORD" -lt 2 ]; then
    if declare -F _flux_core >/dev/null; then _flux_core "$@"; else compopt -o default; fi
    return
  fi
  if [ "$COMP_CWORD" -eq 2 ]; then
    words="up submit status top wait cancel resize kubectl url logs report down doctor --help"
  else
    case ${COMP_WORDS[2]} in
      up) words="--dovetail --json --help" ;;
      submit) words="--output --wait-up --metrics --json --help" ;;
      wait | cancel | report) words="--all --json --help" ;;
      logs) words="--slice --json --help" ;;
      kubectl) words='' && compopt -o default ;;
      *) words="--json --help" ;;
    esac
  fi
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
  if [ "$COMP_CWORD" -gt 2 ] && [ "${COMP_WORDS[2]}" = submit ] && [[ $cur != -* ]]; then
    compopt -o filenames # of these alone: a folder `report` makes no path of the command
    mapfile -t COMPREPLY < <(compgen -f -- "$cur")
  fi
}

if ! declare -F _flux_core >/dev/null; then
  _dovetail_flux=$(command -v flux) || _dovetail_flux=
  _dovetail_flux=${_dovetail_flux%/bin/flux}/share/bash-completion/completions/flux
  # shellcheck disable=SC1090 # Flux's own, where it is
  if [ -r "$_dovetail_flux" ]; then . "$_dovetail_flux"; fi
  unset _dovetail_flux
fi
complete -F _flux_dovetail flux
