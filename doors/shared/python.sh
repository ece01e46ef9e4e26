# Sourced by the scripts beside it: sets PYTHON to an interpreter that has lockstep, or says how to get one.
known="$(cat "$here/.lockstep-python" 2>/dev/null || true)" # written by `lockstep init`
for PYTHON in python3 python "$known" "$here/../../.venv/bin/python"; do
    if [[ -n "$PYTHON" ]] && "$PYTHON" -c 'import lockstep' >/dev/null 2>&1; then
        return 0
    fi
done
python3 "$here/install_hint.py"
exit 1
