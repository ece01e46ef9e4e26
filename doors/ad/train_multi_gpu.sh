#!/usr/bin/env bash
# Train on four GPUs with accelerate: ./train_multi_gpu.sh [flags of train.py]; others: CUDA_VISIBLE_DEVICES=0,1
set -euo pipefail
here="$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
source "$here/python.sh"
case " $* " in *" --help "* | *" -h "*) exec "$PYTHON" "$here/train.py" --help ;; esac
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0,1,2,3}"
commas="${CUDA_VISIBLE_DEVICES//[^,]/}"
several=(--num_processes "$((${#commas} + 1))")
if [[ -n "$commas" ]]; then
    several+=(--multi_gpu --main_process_port 0)
fi
exec "$PYTHON" -m accelerate.commands.launch "${several[@]}" "$here/train.py" "$@"
