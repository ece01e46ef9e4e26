#!/usr/bin/env bash
# Train on the GPU that nvidia-smi calls least busy: ./train_auto_gpu.sh [flags of pretrain_main.py]
set -euo pipefail
here="$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
source "$here/python.sh"
if [[ " $* " != *" --help "* && " $* " != *" -h "* ]]; then
    gpu="$("$PYTHON" -m lockstep.compat idlest_gpu)"
    echo "Using GPU $gpu (lowest utilization)"
    export CUDA_VISIBLE_DEVICES="$gpu" GPU_RANK="$gpu" CUDA_DEVICE_ORDER=PCI_BUS_ID
fi
exec "$PYTHON" "$here/pretrain_main.py" "$@"
