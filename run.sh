#!/usr/bin/env bash
# The main door: sets up .venv on a fresh machine, then trains. Every argument goes to the trainer (see --help).
set -euo pipefail
root="$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
source "$root/setup/environment.sh"
prepare_environment "$root" requirements.lock
exec "$PYTHON" -m lockstep.compat run.sh "$@"
