#!/usr/bin/env bash
# Train on several GPUs: ./launch_multi_gpu.sh [GPUs or all, default 2] [config file] [flags of train.py]
set -euo pipefail
here="$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
source "$here/python.sh"
case " $* " in *" --help "* | *" -h "*) exec "$PYTHON" "$here/train.py" --help ;; esac
case "${1:-}" in
    "" | all | [1-9] | [1-9][0-9]) ;;
    *)
        echo "launch_multi_gpu.sh: got '$1', expected a number of GPUs or all first" >&2
        exit 2
        ;;
esac
config=(--config "${2:-config/model/ad_dr_compressed.yaml}")
log="logs/multi_gpu_$(date +%Y%m%d_%H%M%S)/training.log"
exec "$PYTHON" "$here/train.py" --launch accelerate --gpus "${1:-2}" "${config[@]}" --log-file "$log" "${@:3}"
