#!/usr/bin/env bash
# Two machines made of network namespaces: runs COMMAND once on each, at the same time, in the
# folders node0/ and node1/ of the current one, with NNODES, NODE_RANK and RDZV_ENDPOINT set.
# Afterwards node0/sent and node1/sent hold the bytes that each sent to the other.
#
#     unshare --net --mount --uts [--user --map-root-user] two_nodes.sh COMMAND...
#
# The namespaces that unshare makes are the first machine; they end with this script.
set -euo pipefail

# A cable of its own, and names that resolve, as machines of a cluster have.
printf '%s\n' '127.0.0.1 localhost' '10.77.0.1 node0' '10.77.0.2 node1' >hosts
mount --bind hosts /etc/hosts
hostname node0
unshare --net --uts sleep infinity &
second=$!
trap 'kill "$second"' EXIT
until [[ $(readlink "/proc/$second/ns/uts") != "$(readlink /proc/self/ns/uts)" ]]; do sleep 0.1; done

on() {
    local node=$1
    shift
    if ((node == 0)); then "$@"; else nsenter --target "$second" --net --uts "$@"; fi
}

ip link add eth0 type veth peer name eth0 netns "$second"
for node in 0 1; do
    mkdir -p "node$node"
    on "$node" hostname "node$node"
    on "$node" ip address add "10.77.0.$((node + 1))/24" dev eth0
    on "$node" ip link set lo up
    on "$node" ip link set eth0 up
done

export NNODES=2 RDZV_ENDPOINT=node0:29500
nodes=()
for node in 0 1; do
    (cd "node$node" && NODE_RANK=$node on "$node" "$@" >log 2>&1) &
    nodes+=($!)
done
status=0
for node in "${nodes[@]}"; do wait "$node" || status=$?; done
for node in 0 1; do
    on "$node" ip -json -statistics link show eth0 >"node$node/sent"
done
exit "$status"
