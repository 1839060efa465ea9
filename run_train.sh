#!/usr/bin/env bash
# Train. Installs what is missing, checks the configuration, then starts the ranks with torchrun.
set -euo pipefail

usage() {
    cat <<'EOF'
usage: ./run_train.sh [--module MODULE] [--config CONFIG] [--plan FILE] [--section.key value ...]

In the environment (a flag wins over it):
  NGPU           ranks on this machine: the number of GPUs; where there is none, as many as the
                 parallelism degrees multiply to, or 2 where they leave it open
  MODULE         the model's module: graph_trainer.llama3
  CONFIG         a name under configs/ or a path to a TOML file: debugmodel
  LOG_RANK       the ranks whose output is shown, separated by commas: 0
  NNODES         machines: 1
  NODE_RANK      which of them this one is, from 0; rank 0 hosts the rendezvous
  RDZV_ENDPOINT  where the machines meet, host:port; needed when there are several
  MAX_RESTARTS   how often all ranks are started anew after one has failed, going on from the last
                 checkpoint; needs checkpoint.enable: 0
  PYTHON         the Python to make .venv with

EOF
}

here=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
# shellcheck source=scripts/environment.sh
source "$here/scripts/environment.sh"

# has_flag NAME ARGUMENT...: is --NAME given, in either of its two spellings?
has_flag() {
    local name=--$1 argument
    shift
    for argument in "$@"; do
        if [[ $argument == "$name" || $argument == "$name="* ]]; then return 0; fi
    done
    return 1
}

# is_number TEXT LEAST: a whole number, without leading zeros, which bash would read as octal.
is_number() { [[ $1 =~ ^(0|[1-9][0-9]{0,6})$ ]] && (($1 >= $2)); }

# Asks the driver, not torch, which takes seconds to import.
count_gpus() {
    if ! command -v nvidia-smi >/dev/null; then
        echo 0
    elif [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -cv -e '^-1$' -e '^$' || true
    else
        { nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU ' || true
    fi
}

gpus=$(count_gpus)
if ((gpus > 0)); then
    NGPU=${NGPU:-$gpus}
    # Less fragmentation; torchtitan's own default.
    export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
fi
NNODES=${NNODES:-1}
is_number "$NNODES" 1 || fail "NNODES=$NNODES: the number of machines, 1 or more"
if ((NNODES > 1)); then NGPU=${NGPU:-2}; fi
[[ -z ${NGPU:-} ]] || is_number "$NGPU" 1 ||
    fail "NGPU=$NGPU: the number of ranks on this machine, 1 or more"
export MAX_RESTARTS=${MAX_RESTARTS:-0}
is_number "$MAX_RESTARTS" 0 ||
    fail "MAX_RESTARTS=$MAX_RESTARTS: how often the ranks may be started anew, 0 or more"
# The agent's own store keeps the addresses of the ranks that are gone, and new ranks connect to
# those (torch 2.13; pytorch issue 167288). Without it every start makes a store of its own.
if ((MAX_RESTARTS > 0)); then export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; fi
if ! is_number "${NODE_RANK:-0}" 0 || ((${NODE_RANK:-0} >= NNODES)); then
    fail "NODE_RANK=$NODE_RANK: which of the $NNODES machines this one is, 0 to $((NNODES - 1))"
fi
if ((NNODES > 1)) && [[ -z ${RDZV_ENDPOINT:-} ]]; then
    fail "NNODES=$NNODES needs RDZV_ENDPOINT=host:port, the same on every machine"
fi

use_environment train graph_trainer torch torchtitan

# Named only where someone names them: a resolved file knows its own module.
[[ -z ${CONFIG:-} ]] || has_flag config "$@" || set -- --config "$CONFIG" "$@"
[[ -z ${MODULE:-} ]] || has_flag module "$@" || set -- --module "$MODULE" "$@"

for argument in "$@"; do
    if [[ $argument == -h || $argument == --help ]]; then
        usage
        exec "$python" -m graph_trainer.train "$@"
    fi
done

# One look at the whole configuration before any rank starts: a mistake is then one message, not
# one traceback a rank. The answer is the number of ranks that the configuration asks for.
if [[ -n ${NGPU:-} ]]; then
    WORLD_SIZE=$((NGPU * NNODES)) "$python" -m graph_trainer.train --validate-only "$@" >/dev/null
else
    NGPU=$("$python" -m graph_trainer.train --validate-only "$@")
    is_number "$NGPU" 1 || fail "the check of the configuration answered '$NGPU' instead of a number"
fi

# Ranks that share a machine share its cores; each would otherwise start a thread for every core.
if ((NGPU > 1)) && [[ -z ${OMP_NUM_THREADS:-} ]]; then
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    export OMP_NUM_THREADS=$((cores > NGPU ? cores / NGPU : 1))
fi

# Port 0 lets every run find a free one. With several machines the first one hosts the rendezvous,
# said outright where NODE_RANK is given: torchrun's guess by host name fails behind aliases.
set -- -m graph_trainer.train "$@"
if ((NNODES > 1)) && [[ -n ${NODE_RANK:-} ]]; then
    set -- --rdzv_conf "is_host=$((NODE_RANK == 0))" "$@"
fi
# exec: a signal reaches torchrun itself, which ends every rank.
exec "$python" -m torch.distributed.run --nproc_per_node "$NGPU" --nnodes "$NNODES" \
    --node_rank "${NODE_RANK:-0}" --rdzv_backend c10d \
    --rdzv_endpoint "${RDZV_ENDPOINT:-localhost:0}" --max_restarts "$MAX_RESTARTS" \
    --local-ranks-filter "${LOG_RANK:-0}" --role rank --tee 3 "$@"
