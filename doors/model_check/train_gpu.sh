#!/usr/bin/env bash
# Train on one GPU: ./train_gpu.sh [NUMBER, default 0] [flags of pretrain_main.py]
set -euo pipefail
here="$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
gpu=0
if [[ $# -gt 0 && "$1" != -* ]]; then
    gpu="$1"
    shift
fi
if [[ ! "$gpu" =~ ^[0-9]+(,[0-9]+)*$ ]]; then
    echo "train_gpu.sh: got '$gpu', expected the number of a GPU first: ./train_gpu.sh 3 [flags]" >&2
    exit 2
fi
source "$here/python.sh"
export CUDA_VISIBLE_DEVICES="$gpu" GPU_RANK="$gpu" CUDA_DEVICE_ORDER=PCI_BUS_ID
exec "$PYTHON" "$here/pretrain_main.py" "$@"
