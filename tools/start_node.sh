#!/usr/bin/env bash
# Start one node of a run on several: first check the way to the other nodes, then start torchrun. From the repository's
# folder, once on each node:
#
#     NNODES=2 NODE_RANK=0 NPROC_PER_NODE=8 RDZV_ENDPOINT=node-0:29500 LOCAL_ADDR=node-0 bash tools/start_node.sh FLAGS
#
# slurm/ and k8s/ start it. Node 0 is the host of RDZV_ENDPOINT.
# Exit status: 0 finished; 75 stopped on request, with a checkpoint to go on from; 2 refused; another one failed.
set -u

: "${NNODES:?}" "${NODE_RANK:?}" "${NPROC_PER_NODE:?}" "${RDZV_ENDPOINT:?}" "${LOCAL_ADDR:?}"
export PYTHONUNBUFFERED=1  # what ranks print reaches the log at once

run=$(python -m tools.launch --to folder -- "$@") || exit  # refuses flags before any node waits for another
python -m tools.doctor --nnodes "$NNODES" --node_rank "$NODE_RANK" --rdzv_endpoint "$RDZV_ENDPOINT" \
    --local_addr "$LOCAL_ADDR" --wait_seconds "${WAIT_SECONDS:-600}" -- "$@" || exit

is_host=false
[ "$NODE_RANK" = 0 ] && is_host=true
options=(--nnodes "$NNODES" --nproc_per_node "$NPROC_PER_NODE" --max_restarts "${MAX_RESTARTS:-0}"
    --rdzv_backend c10d --rdzv_id "${RUN_ID:-finetuning}" --rdzv_endpoint "$RDZV_ENDPOINT"
    --rdzv_conf "is_host=$is_host" --local_addr "$LOCAL_ADDR")
[ -n "${LOG_DIR:-}" ] && options+=(--log_dir "$LOG_DIR" --tee 3)

# With a store that torchrun shares with its ranks, a node that comes back waits for an address that the others published
# when the run began, and they wait for it (torch 2.13, DynamicRendezvousHandler.next_rendezvous).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}  # or each second that a rank waits for another is a warning

last_event() { tail -n 1 "$run/metrics.jsonl" 2> /dev/null; }
before=$(last_event)
has_stopped() {  # whether the run that this node takes part in ended on request
    local last
    last=$(last_event)
    [ "$last" != "$before" ] && grep -q '"status": "stopped"' <<< "$last"
}

# torchrun would start refused ranks MAX_RESTARTS times again. A rank that is refused makes this file
# (supervision/exit_status.py).
folder=$(mktemp -d) || exit
trap 'rm -rf "$folder"' EXIT
export FINETUNING_REFUSAL_FILE=$folder/refused
is_refused() { [ -e "$FINETUNING_REFUSAL_FILE" ]; }

asked=
# A deleted pod signals its first process alone, Slurm each one of a job. torchrun must not get the signal twice.
trap 'asked=1; [ $$ = 1 ] && kill -TERM "$launcher"' TERM
torchrun "${options[@]}" finetuning.py "$@" &
launcher=$!
(
    until has_stopped || is_refused; do sleep 1; done
    if is_refused; then
        sleep 1  # for the end of the ranks' output
        kill -KILL "$launcher" $(cat "/proc/$launcher/task/"*/children)  # with its ranks
    else
        # Ranks have ended by then. torchrun would wait for five minutes more, and hear no signal, if that of another
        # node was signalled itself and has gone.
        sleep 15
        kill -KILL "$launcher"
    fi
) > /dev/null 2>&1 &
watcher=$!
wait "$launcher"
status=$?
if [ -n "$asked" ]; then  # the trap ended the first wait
    wait "$launcher"
    status=$?
fi
kill "$watcher" 2> /dev/null
# Ranks that were asked to stop end with 0, on every node, and torchrun with 1 if it was asked itself. Whoever starts
# nodes has to tell this from a run that has finished, and from one that has failed.
is_refused && exit 2
has_stopped && exit 75
[ "$status" = 0 ] && [ "${STAY:-}" = finished ] && exec sleep infinity
exit "$status"
