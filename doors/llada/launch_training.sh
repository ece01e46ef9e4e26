#!/usr/bin/env bash
# Train on several GPUs: ./launch_training.sh [GPUs, default 2] [folder, default shakespeare_processed] [flags]
set -euo pipefail
here="$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
source "$here/python.sh"
exec "$PYTHON" -m lockstep.compat launch_training.sh "$@"
