#!/usr/bin/env bash
# All ranks on this machine, one for each GPU (without GPUs, one for each core).
#
#   launch/torchrun_single.sh                               launch/train.py
#   launch/torchrun_single.sh my/program.py --its --options
#   RANKS_PER_NODE=4 launch/torchrun_single.sh -m fastload load /checkpoints/llama --digest
set -euo pipefail

(($#)) || set -- launch/train.py
# Seconds that the ranks have to save when torchrun is told to end (TERM, or Ctrl-C); its default is 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}
exec torchrun \
    --standalone \
    --nproc-per-node="${RANKS_PER_NODE:-auto}" \
    --max-restarts="${MAX_RESTARTS:-3}" \
    "$@"
