#!/bin/bash
# One machine, all its GPUs (or NPROC processes): train_distributed.sh CONFIG [KEY=VALUE …]
exec "${PYTHON:-python}" -m lockstep train "$@" --nproc-per-node "${NPROC:-auto}"
