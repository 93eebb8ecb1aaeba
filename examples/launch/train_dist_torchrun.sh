#!/bin/bash
# One machine through torchrun: train_dist_torchrun.sh --num_gpus N --config CONFIG [KEY=VALUE …]
[ "$1" = --num_gpus ] && [ $# -ge 2 ] || { echo "usage: $0 --num_gpus N --config CONFIG [KEY=VALUE …]" >&2; exit 2; }
exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node "$2" -m lockstep train "${@:3}"
