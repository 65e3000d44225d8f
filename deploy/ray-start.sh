#!/usr/bin/env bash
# A Ray cluster for Slipstream without `ray up`: run this on each machine, the head first.
#
#   deploy/ray-start.sh head               on the machine that serves
#   deploy/ray-start.sh worker HEAD_IP     on each machine that runs workers
#   deploy/ray-start.sh stop               on each: ends EVERY Ray process of the machine
#
# Variables: VENV            where slipstream is installed            (~/slipstream-venv)
#            NODE_IP         this machine's address for the others    (Ray's choice)
#            RAY_PORT        of the head                              (6379)
#            WORKERS         workers this machine may run             (its GPUs, at least 1)
#            OBJECT_STORE    bytes of shared memory for Ray           (200000000)
# The same token must lie in ~/.ray/auth_token on every machine: make it once with
# `ray get-auth-token --generate > /dev/null` and copy the file, mode 600.
set -euo pipefail

VENV=${VENV:-$HOME/slipstream-venv}
RAY_PORT=${RAY_PORT:-6379}
export PATH="$VENV/bin:$PATH" RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0

usage() { sed -n '2,16s/^# \{0,1\}//p' "$0" >&2; exit 2; }

common=(--object-store-memory="${OBJECT_STORE:-200000000}" --disable-usage-stats)
[ -z "${NODE_IP:-}" ] || common+=(--node-ip-address="$NODE_IP")

check_token() {
  [ -s "$HOME/.ray/auth_token" ] || { echo "no token in ~/.ray/auth_token: see the head of $0" >&2; exit 1; }
}

num_workers() {
  local gpus
  gpus=$(nvidia-smi -L 2>/dev/null | grep -c GPU) || gpus=1
  echo "${WORKERS:-$gpus}"
}

case ${1:-} in
  head)
    check_token
    # No CPUs for others' tasks: the scheduler and the front ends need none to be placed.
    ray start --head --port="$RAY_PORT" --num-cpus=0 --dashboard-host=127.0.0.1 "${common[@]}" ;;
  worker)
    [ $# -eq 2 ] || usage
    check_token
    ray start --address="$2:$RAY_PORT" --resources="{\"slipstream\": $(num_workers)}" "${common[@]}" ;;
  stop) ray stop ;;
  *) usage ;;
esac
