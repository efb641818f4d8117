#!/usr/bin/env bash
# Several machines without a scheduler: the same line on each of them, within a few minutes.
#
#   launch/torchrun_multi.sh HOST PORT NODES [PROGRAM ARGS...]
#
# HOST and PORT are where the launchers meet: one of the machines, and a port there that is free and that
# no firewall closes. NODES is how many machines take part: 4, or 2:4 for what can go on with 2 of them.
# When a rank or a machine is lost, the launchers meet again and start all ranks anew, MAX_RESTARTS times;
# the program then resumes from its last commit. The job ends when HOST itself is lost.
set -euo pipefail

if (($# < 3)); then
    echo "usage: ${0##*/} HOST PORT NODES [PROGRAM ARGS...]" >&2
    exit 2
fi
host=$1 port=$2 nodes=$3
shift 3
(($#)) || set -- launch/train.py

# What your site must edit. INTERFACE carries the job's traffic: "ip -brief address" lists them. LOCAL_ADDR
# is this machine's name or address on it, for machines whose own name the others cannot resolve.
if [[ ${INTERFACE:-} ]]; then
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
fi

# Where programs keep recent steps in memory, besides (launch/train.py --memory): auto, or a directory on each
# machine; empty for nowhere. See docs/memory.md.
export MEMORY=${MEMORY-auto}

# Seconds that the ranks have to save when torchrun is told to end (TERM, or Ctrl-C); its default is 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}
# Each time the ranks start, they meet in a new store, at rank 0. The one that the launchers would share by
# default keeps the addresses of ranks that are gone, and a new launcher does not find it.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun \
    --nnodes="$nodes" \
    --nproc-per-node="${RANKS_PER_NODE:-auto}" \
    --max-restarts="${MAX_RESTARTS:-3}" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$host:$port" \
    --rdzv-id="${RUN_ID:-train}" \
    ${LOCAL_ADDR:+--local-addr="$LOCAL_ADDR"} \
    ${NUMA_BINDING:+--numa-binding="$NUMA_BINDING"} \
    "$@"
