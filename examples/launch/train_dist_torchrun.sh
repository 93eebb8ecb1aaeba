#!/bin/bash
# One machine through torchrun: train_dist_torchrun.sh [--num_gpus N] --config CONFIG [KEY=VALUE …]
# Without --num_gpus: a rank for each GPU; where there is none, for each core.
[ $# -ge 1 ] || { echo "usage: $0 [--num_gpus N] --config CONFIG [KEY=VALUE …]" >&2; exit 2; }
[ "$1" = --num_gpus ] || set -- --num_gpus auto "$@"
exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node "$2" -m lockstep train "${@:3}"
