#!/usr/bin/env bash
# Train on every GPU: ./run_multi_gpu_training.sh [dataset] [batch per GPU] [epochs] [lr] [streaming] [max samples]
set -euo pipefail
here="$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
source "$here/python.sh"
exec "$PYTHON" -m lockstep.compat run_multi_gpu_training.sh "$@"
