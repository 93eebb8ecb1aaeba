#!/bin/bash
# BDH learns a text of yours on two ranks, and writes: own_text.sh FILE_OR_FOLDER [PROMPT]
[ $# -ge 1 ] || { echo "usage: $0 FILE_OR_FOLDER [PROMPT]" >&2; exit 2; }
here=$(dirname "$0") lockstep="${PYTHON:-python} -m lockstep"
$lockstep train "$here/own_text.yaml" "data.args.path=$1" --nproc-per-node 2 --output-dir runs/own_text || exit
for seed in 0 1 2; do
  echo "--- sample $seed"
  $lockstep sample runs/own_text --prompt "${2:-The }" --tokens 200 --seed $seed
done
