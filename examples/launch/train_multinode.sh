#!/bin/bash
# On every machine, in any order: train_multinode.sh NODES NODE_RANK FIRST_MACHINE CONFIG [KEY=VALUE …]
# All ports between the machines must be open: NCCL and gloo take any, not only the one where ranks meet.
[ $# -ge 4 ] || { echo "usage: $0 NODES NODE_RANK FIRST_MACHINE CONFIG [KEY=VALUE …]" >&2; exit 2; }
exec "${PYTHON:-python}" -m lockstep train "${@:4}" --nproc-per-node "${NPROC:-auto}" \
  --nnodes "$1" --node-rank "$2" --master-addr "$3" --master-port "${MASTER_PORT:-29500}"
