# Sourced by the scripts beside it: sets PYTHON to an interpreter that has lockstep, or says how to get one.
# PYTHONPATH gives lockstep to every interpreter, but not what it needs; importing torch would take seconds.
needed='import sys, importlib.util, lockstep, pydantic; sys.exit(not importlib.util.find_spec("torch"))'
known="$(cat "$here/.lockstep-python" 2>/dev/null || true)" # written by `lockstep init`
for PYTHON in python3 python "$known" "$here/../../.venv/bin/python"; do
    if [[ -n "$PYTHON" ]] && "$PYTHON" -c "$needed" >/dev/null 2>&1; then
        return 0
    fi
done
python3 "$here/install_hint.py"
exit 1
