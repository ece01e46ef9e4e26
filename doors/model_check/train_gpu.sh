#!/usr/bin/env bash
# Train on one GPU: ./train_gpu.sh [NUMBER, default 0] [flags of pretrain_main.py]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
gpu=0
if [[ $# -gt 0 && "$1" != -* ]]; then
    gpu="$1"
    shift
fi
source "$here/python.sh"
export CUDA_VISIBLE_DEVICES="$gpu" GPU_RANK="$gpu" CUDA_DEVICE_ORDER=PCI_BUS_ID
exec "$PYTHON" "$here/pretrain_main.py" "$@"
