# Sourced by run.sh and test.sh. Sets PYTHON to an interpreter that has what the given requirement files ask for.

prepare_environment() {
    local root="$1" base="" candidate
    shift
    for candidate in python3.13 python3.12 python3.11 python3 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            base="$candidate"
            break
        fi
    done
    if [[ -z "$base" ]]; then
        echo "lockstep needs Python 3.11 or newer, and there is none on PATH (found: $(python3 --version 2>&1 || true))." >&2
        echo "Install one, for example: sudo apt-get install python3 python3-venv" >&2
        exit 1
    fi
    PYTHON="$("$base" "$root/setup/environment.py" "$@")"
    if [[ "$PYTHON" != "$root/.venv/bin/python" ]]; then # the user's own environment: nothing is installed into it
        export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
    fi
}
