#!/usr/bin/env bash
# Prepare the data, then train; every argument goes to the trainer. Lines look like `[GPU0] Step ...`.
set -euo pipefail
here="$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
source "$here/python.sh"
exec "$PYTHON" -m lockstep.compat run.sh "$@"
