#!/usr/bin/env bash
# All ranks on this machine, one for each GPU (without GPUs, one for each core).
#
#   launch/torchrun_single.sh                               launch/train.py
#   launch/torchrun_single.sh my/program.py --its --options
#   RANKS_PER_NODE=4 launch/torchrun_single.sh -m fastload load /checkpoints/llama --digest
set -euo pipefail

(($#)) || set -- launch/train.py
# Where programs keep recent steps in memory, besides (launch/train.py --memory): auto, or a directory on each
# machine; empty for nowhere. See docs/memory.md.
export MEMORY=${MEMORY-auto}
# Seconds that the ranks have to save when torchrun is told to end (TERM, or Ctrl-C); its default is 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}
# Each time the ranks start, they meet in a new store, at rank 0. The one that the launcher would share by
# default keeps the addresses of ranks that are gone.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun \
    --standalone \
    --nproc-per-node="${RANKS_PER_NODE:-auto}" \
    --max-restarts="${MAX_RESTARTS:-3}" \
    ${NUMA_BINDING:+--numa-binding="$NUMA_BINDING"} \
    "$@"
