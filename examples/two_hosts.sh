#!/bin/bash
# Two machines, tried out on one (needs root and iproute2): two_hosts.sh CONFIG [KEY=VALUE …]
# Each machine is a network namespace with an address of its own. On real ones, run the last two commands, one on each,
# in any order, with the first machine's name for 10.98.0.1; the run directory is to be on storage that both share.
[ $# -ge 1 ] || { echo "usage: $0 CONFIG [KEY=VALUE …]" >&2; exit 2; }
a=lockstep-a-$$ b=lockstep-b-$$
trap 'ip netns del $a; ip netns del $b' EXIT
set -e
ip netns add $a && ip netns add $b
ip link add eth0 netns $a type veth peer name eth0 netns $b
for host in "$a 10.98.0.1" "$b 10.98.0.2"; do
  set -- $host -- "$@"
  ip -n "$1" addr add "$2/24" dev eth0 && ip -n "$1" link set eth0 up && ip -n "$1" link set lo up
  shift 3
done
export GLOO_SOCKET_IFNAME=eth0
train="${PYTHON:-python} -m lockstep train --nnodes 2 --master-addr 10.98.0.1 --nproc-per-node ${NPROC:-1}"
ip netns exec $b $train "$@" --node-rank 1 &
ip netns exec $a $train "$@" --node-rank 0
wait $!
