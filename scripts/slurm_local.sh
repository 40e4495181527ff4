#!/usr/bin/env bash
# A SLURM cluster of one node for tests: munge, slurmctld and slurmd with all of their files in DIR.
# Jobs of the default partition `low` are preempted by `high`: they get a signal and are requeued.
# Nothing outside of DIR is read or written, so it cannot disturb a cluster this machine belongs to.
#   eval "$(scripts/slurm_local.sh start DIR)"    start, and set SLURM_CONF to the new cluster
#   scripts/slurm_local.sh stop DIR               stop and remove DIR
#   scripts/slurm_local.sh install                install Debian's packages (needs root and apt)
set -euo pipefail

usage() { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
say() { echo "slurm_local: $*" >&2; }

install() {
  have slurmctld slurmd munged sbatch && return
  if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    say "SLURM is not installed, and installing it needs root and apt-get; its tests are skipped."
    return 1
  fi
  local packages=(slurm-wlm munge) apt_options=(-o Acquire::http::Timeout=20 -o Acquire::Retries=1)
  { apt-get update -qq "${apt_options[@]}" && DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -qq --no-install-recommends "${apt_options[@]}" "${packages[@]}"; } > /dev/null 2>&1 \
    || { say "apt-get could not install ${packages[*]}; the tests of SLURM are skipped."; return 1; }
}

have() {
  local name
  for name in "$@"; do command -v "$name" > /dev/null || return 1; done
}

start() {
  have slurmctld slurmd munged sbatch || { say "SLURM is not installed; run 'scripts/slurm_local.sh install'."; exit 1; }
  local dir cpus=6 host port
  mkdir -p "$1"/{munge,state,spool,log}
  dir=$(cd "$1" && pwd)
  host=$(hostname -s)
  port=$((20000 + RANDOM % 20000))
  chmod 755 "$dir" "$dir/munge"
  dd if=/dev/urandom of="$dir/munge/key" bs=128 count=1 2> /dev/null
  chmod 400 "$dir/munge/key"
  munged --force --key-file="$dir/munge/key" --socket="$dir/munge/socket" \
    --pid-file="$dir/munge/pid" --log-file="$dir/log/munged" --seed-file="$dir/munge/seed" \
    > "$dir/log/munged.start" 2>&1
  cat > "$dir/slurm.conf" << CONF
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldLogFile=$dir/log/slurmctld
SlurmdLogFile=$dir/log/slurmd
SlurmctldPort=$port
SlurmdPort=$((port + 1))
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=1
JobRequeue=1
KillWait=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cpus State=UNKNOWN
PartitionName=low Nodes=$host Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=5
PartitionName=high Nodes=$host MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
CONF
  export SLURM_CONF=$dir/slurm.conf
  slurmctld > "$dir/log/slurmctld.start" 2>&1
  slurmd > "$dir/log/slurmd.start" 2>&1
  for _ in $(seq 100); do
    if sinfo --noheader --format=%t 2> /dev/null | grep -q idle; then
      echo "export SLURM_CONF=$SLURM_CONF"
      return
    fi
    sleep 0.2
  done
  say "the cluster did not start; its logs are in $dir/log"
  exit 1
}

stop() {
  local file pid pids=()
  [ -f "$1/slurm.conf" ] || { say "there is no cluster in $1; name the folder given to start"; exit 1; }
  SLURM_CONF=$1/slurm.conf timeout 10 scancel --user="$(id -un)" 2> /dev/null || true
  for file in "$1"/slurmd.pid "$1"/slurmctld.pid "$1"/munge/pid; do
    pid=$(cat "$file" 2> /dev/null) && kill "$pid" 2> /dev/null && pids+=("$pid")
  done
  for pid in "${pids[@]}"; do
    for _ in $(seq 50); do kill -0 "$pid" 2> /dev/null || break; sleep 0.1; done
  done
  rm -rf "$1"
}

case "${1:-}" in
  install) install ;;
  start | stop) [ $# = 2 ] || usage; "$1" "$2" ;;
  *) usage ;;
esac
