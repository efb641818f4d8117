#!/usr/bin/env bash
# What each pod of a training runs: its ranks, by torchrun_multi.sh.
#
#   launch/kubernetes/pod.sh [PROGRAM ARGS...]
#
# HOST is the name of the pod with index 0, NODES the number of pods, JOB_COMPLETION_INDEX the index of this
# one, which an Indexed Job sets. If the program fails, what MEMORY has is written to CHECKPOINTS.
#
# It ends with 0 once the program has finished, and with 75 if it was told to stop and has saved everything:
# Kubernetes takes 0 for finished, and would not start the pods again. A program that stops before it has
# finished creates the file STOPPED, since only some of its pods may have been told.
set -euo pipefail
cd "$(dirname "$0")/../.."

port=${PORT:-29400}
export MEMORY=${MEMORY-auto}
export STOPPED=${STOPPED:-/tmp/stopped-$JOB_COMPLETION_INDEX}
rm -f "$STOPPED"
# The launchers meet at the first pod, whose name this pod may not know yet.
export PET_RDZV_CONF=is_host=$((JOB_COMPLETION_INDEX == 0))

# Kubernetes sends TERM to this shell alone. Told itself, torchrun would exit with 1 although all is saved, so it
# ignores TERM, and its ranks get it: again and again, because a program that still starts does not listen yet.
stopped='' launcher=''
stop() {
    stopped=yes
    [[ -z $launcher ]] || while xargs kill -TERM <"/proc/$launcher/task/$launcher/children"; do sleep 5; done 2>/dev/null &
}
trap stop TERM
(
    trap '' TERM
    export PET_SIGNALS_TO_HANDLE=SIGINT
    exec launch/torchrun_multi.sh "$HOST" "$port" "$NODES" "$@"
) &
launcher=$!
[[ -z $stopped ]] || stop # it came before there was a launcher

while :; do
    status=0
    wait "$launcher" || status=$?
    kill -0 "$launcher" 2>/dev/null || break # else a signal has ended the wait, not the launcher
done
if ((status == 0)) && [[ $stopped || -e $STOPPED ]]; then
    echo "stopped, with everything saved"
    exit 75
fi
if ((status)) && [[ -z $stopped && ${CHECKPOINTS:-} && $MEMORY ]]; then
    RANKS_PER_NODE=1 MAX_RESTARTS=0 RUN_ID=flush launch/torchrun_multi.sh "$HOST" $((port + 1)) "$NODES" \
        -m fastload flush "$CHECKPOINTS" --memory "$MEMORY" || :
fi
exit "$status"
