#!/usr/bin/env bash
# Three hosts on one machine, for a real `ray up`: h0, h1 and h2 at 10.77.0.10 to .12, and "ops", the operator's seat.
#
# Each has its own network, PID, mount and UTS namespaces, and its own /root, /tmp/ray, /dev/shm and /etc/hosts; h0 to
# h2 have sshd. They hang on a bridge without an uplink: nothing can leave. Everything that runs on a host ends with it.
#
#   HOSTS_DIR=DIR VENV=PATH tests/hosts.sh up     PATH: the environment that hosts find as ~/slipstream-venv
#   HOSTS_DIR=DIR tests/hosts.sh on h1 COMMAND    run a command on a host, in a login shell
#   HOSTS_DIR=DIR tests/hosts.sh left h1          what runs on a host besides its sshd
#   HOSTS_DIR=DIR tests/hosts.sh kill h1          the host is gone at once, as by a power cut
#   HOSTS_DIR=DIR tests/hosts.sh cable h1 down    its network cable; up again
#   HOSTS_DIR=DIR tests/hosts.sh down             ends all hosts and removes their networks
#
# Needs root, openssh-server, rsync, iproute2 and util-linux. DIR is an empty one outside /root, seen by all hosts.
set -euo pipefail

DIR=${HOSTS_DIR:?set HOSTS_DIR to a scratch directory}
HOSTS=(h0 h1 h2)
TAG=$(basename "$DIR")
namespace() { echo "slip-$TAG-$1"; }
in_ops() { ip -n "$(namespace ops)" "$@"; }

make_networks() {
  local host address=10
  ip netns add "$(namespace ops)"
  in_ops link set lo up
  in_ops link add br0 type bridge
  in_ops addr add 10.77.0.1/24 dev br0
  in_ops link set br0 up
  for host in "${HOSTS[@]}"; do
    ip netns add "$(namespace "$host")"
    ip -n "$(namespace "$host")" link set lo up
    in_ops link add "to-$host" type veth peer name eth0 netns "$(namespace "$host")"
    in_ops link set "to-$host" master br0 up
    ip -n "$(namespace "$host")" addr add "10.77.0.$address/24" dev eth0
    ip -n "$(namespace "$host")" link set eth0 up
    # As on real machines, so that programs find their own address; ops forwards nothing.
    ip -n "$(namespace "$host")" route add default via 10.77.0.1
    address=$((address + 1))
  done
}

# What a host's shell does first: everything that is not its own is mounted away.
write_init() {
  local host=$1 root=$DIR/$1 kept
  echo 'mount --make-rprivate /'
  # What Slipstream runs from may lie in /root, too.
  for kept in "$(dirname "$("$VENV/bin/python" -c 'import sys; print(sys.base_prefix)')")" "$VENV" "$PWD"; do
    case $kept in
      /root/*) printf 'mkdir -p %q && mount --bind %q %q\n' "$root$kept" "$kept" "$root$kept" ;;
    esac
  done
  cat <<INIT
mount --rbind '$root/root' /root
mkdir -p /tmp/ray /run/sshd
mount --bind '$root/ray' /tmp/ray
mount -t tmpfs -o size=512m tmpfs /dev/shm
mount --bind '$DIR/hosts' /etc/hosts
mount --bind /dev/null /etc/resolv.conf
hostname '$host'
cd /root
exec /usr/sbin/sshd -D -e -f '$root/sshd_config'
INIT
}

start_host() {
  local host=$1 root=$DIR/$1
  mkdir -p "$root/root/.ssh" "$root/ray"
  chmod 700 "$root/root" "$root/root/.ssh"
  cp "$DIR/key.pub" "$root/root/.ssh/authorized_keys"
  ln -s "$VENV" "$root/root/slipstream-venv"
  if [ "$host" = ops ]; then
    install -m 600 "$DIR/key" "$root/root/.ssh/id_ed25519"
    echo "10.77.0.*,h? $(cat "$DIR/host_key.pub")" > "$root/root/.ssh/known_hosts"
  fi
  cat > "$root/sshd_config" <<CONFIG
Port 22
HostKey $DIR/host_key
AuthorizedKeysFile .ssh/authorized_keys
PasswordAuthentication no
PermitRootLogin prohibit-password
UsePAM no
PidFile none
CONFIG
  write_init "$host" > "$root/init.sh"
  setsid ip netns exec "$(namespace "$host")" \
    unshare --pid --fork --kill-child --mount-proc --mount --uts bash "$root/init.sh" \
    > "$root/log" 2>&1 < /dev/null &
  echo $! > "$root/pid"
}

# The host's first process, as seen from outside.
first_process() {
  local outer
  outer=$(cat "$DIR/$1/pid")
  tr -d ' ' < "/proc/$outer/task/$outer/children"
}

# ip and unshare replace each other by exec: the recorded id is unshare's, and --kill-child takes the host along.
kill_host() {
  local pid
  [ -f "$DIR/$1/pid" ] || return 0
  pid=$(cat "$DIR/$1/pid")
  rm "$DIR/$1/pid"
  kill -9 "$pid" 2>/dev/null || return 0
  while [ -d "/proc/$pid" ] && ! grep -q '^State:.Z' "/proc/$pid/status" 2>/dev/null; do sleep 0.05; done
}

case ${1:?up, on, left, kill, cable or down} in
  up)
    : "${VENV:?set VENV to the environment with slipstream}"
    mkdir -p "$DIR"
    ssh-keygen -q -t ed25519 -N '' -f "$DIR/key"
    ssh-keygen -q -t ed25519 -N '' -f "$DIR/host_key"
    printf '%s\n' '127.0.0.1 localhost' '10.77.0.1 ops' '10.77.0.10 h0' '10.77.0.11 h1' '10.77.0.12 h2' > "$DIR/hosts"
    make_networks
    for host in ops "${HOSTS[@]}"; do start_host "$host"; done
    for host in "${HOSTS[@]}"; do
      for _ in $(seq 100); do
        grep -q 'Server listening' "$DIR/$host/log" && break
        sleep 0.1
      done
      grep -q 'Server listening' "$DIR/$host/log" || { echo "$host did not start:" >&2; cat "$DIR/$host/log" >&2; exit 1; }
    done ;;
  on)
    pid=$(first_process "$2")
    exec nsenter --target "$pid" --mount --uts --net --pid --wd=/root \
      env --ignore-environment HOME=/root USER=root TERM=dumb LANG=C.UTF-8 \
      PATH=/root/slipstream-venv/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin bash -c "${*:3}" ;;
  left)
    pid=$(first_process "$2")
    nsenter --target "$pid" --mount --pid ps -e -o pid=,stat=,args= \
      | grep -v -e ' Z' -e 'sshd' -e ' ps -e ' || true ;;
  kill) kill_host "$2" ;;
  cable) in_ops link set "to-$2" "$3" ;;
  down)
    for host in ops "${HOSTS[@]}"; do kill_host "$host"; done
    for host in ops "${HOSTS[@]}"; do ip netns del "$(namespace "$host")" 2>/dev/null || true; done ;;
  *) sed -n '2,14p' "$0" >&2; exit 2 ;;
esac
