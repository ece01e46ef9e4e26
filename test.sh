#!/usr/bin/env bash
# Sets up .venv with the development tools, then runs every check (see --help). .ci/run calls exactly this.
set -euo pipefail
root="$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
source "$root/setup/environment.sh"
prepare_environment "$root" requirements.lock requirements-dev.lock
exec "$PYTHON" "$root/setup/checks.py" "$@"
