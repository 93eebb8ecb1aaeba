#!/bin/bash
# On every machine, in any order: train_multinode.sh NODES NODE_RANK FIRST_MACHINE CONFIG [KEY=VALUE …], or by names:
# train_multinode.sh --num_nodes N --node_rank K --num_gpus G --master_addr FIRST_MACHINE --config CONFIG [KEY=VALUE …]
# All ports between the machines must be open: NCCL and gloo take any, not only the one where ranks meet.
[ $# -ge 4 ] || { echo "usage: $0 NODES NODE_RANK FIRST_MACHINE CONFIG [KEY=VALUE …]" >&2; exit 2; }
[[ $1 = --* ]] || set -- --num_nodes "$1" --node_rank "$2" --master_addr "$3" --num_gpus "${NPROC:-auto}" "${@:4}"
words=("${@/#--num_nodes/--nnodes}")
exec "${PYTHON:-python}" -m lockstep train --master-port "${MASTER_PORT:-29500}" "${words[@]/#--num_gpus/--nproc-per-node}"
