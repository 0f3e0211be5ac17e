#!/bin/bash
# A Slurm cluster of N nodes on one machine: a network and a UTS namespace each, one bridge, one munged. Root, no systemd.
#   slurm-lab.sh start N     controller (10.77.0.1, netns lab-c) and nodes n1..nN (10.77.0.1K, netns lab-nK)
#   slurm-lab.sh at K CMD…   run CMD as on node K (0: where the controller is)
#   slurm-lab.sh cut K | heal K
#   slurm-lab.sh stop
# needs: apt-get install -y --no-install-recommends slurmd slurmctld slurm-client munge
# Tried with Debian 12 (slurm 22.05.8). cgroups: with v1 beside v2 the plugin chooses v1 and its freezer, which works
# (v2 there: "fatal: Hybrid mode is not supported"); where only v2 is mounted, put IgnoreSystemd=yes into cgroup.conf if
# PID 1 is not systemd. More nodes than namespaces: without any, `slurmd -N nK` with Port= per node on 127.0.0.1 works, too.
set -eu
S=${LAB:-/run/slurm-lab} C=$S/slurm.conf
# not `ip netns exec`: it mounts another /sys, without cgroups
at() { local ns=lab-c h=ctl; [ "$1" = 0 ] || { ns=lab-n$1 h=n$1; }; shift
  nsenter --net=/run/netns/$ns unshare -u sh -c 'hostname "$0"; exec "$@"' $h env SLURM_CONF=$C "$@"; }
case ${1:-} in
start)
  N=$2; mkdir -p $S/spool $S/ctl /run/munge; chown munge: /run/munge; chmod 755 $S /run/munge
  cat >$C <<E
ClusterName=lab
SlurmctldHost=ctl(10.77.0.1)
SlurmUser=root
MpiDefault=none
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=5
JobRequeue=0
SlurmctldPidFile=$S/ctl.pid
SlurmdPidFile=$S/%n.pid
SlurmdSpoolDir=$S/spool/%n
StateSaveLocation=$S/ctl
SlurmctldLogFile=$S/ctl.log
SlurmdLogFile=$S/%n.log
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
E
  for k in $(seq $N); do echo "NodeName=n$k NodeAddr=10.77.0.1$k CPUs=2"; done >>$C
  echo "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES" >>$C
  printf 'CgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\n' >$S/cgroup.conf
  ip netns add lab-c; ip -n lab-c link set lo up
  ip -n lab-c link add br0 type bridge; ip -n lab-c addr add 10.77.0.1/24 dev br0; ip -n lab-c link set br0 up
  for k in $(seq $N); do
    ip netns add lab-n$k; ip -n lab-n$k link set lo up
    ip -n lab-c link add v$k type veth peer name eth0 netns lab-n$k; ip -n lab-c link set v$k master br0 up
    ip -n lab-n$k addr add 10.77.0.1$k/24 dev eth0; ip -n lab-n$k link set eth0 up
  done
  [ -e /etc/munge/munge.key ] || mungekey
  setpriv --reuid munge --regid munge --clear-groups munged --pid-file=/run/munge/lab.pid
  at 0 slurmctld -c -f $C
  for k in $(seq $N); do at $k slurmd -f $C; done
  for _ in $(seq 100); do [ "$(at 0 sinfo -h -N -t idle | wc -l)" = $N ] && exit 0; sleep 0.1; done; at 0 sinfo -N; exit 1 ;;
at) shift; at "$@" ;;
cut) ip -n lab-c link set v$2 down ;;
heal) ip -n lab-c link set v$2 up ;;
stop)
  [ -e $C ] && at 0 timeout 20 sh -c 'scancel -u root; while [ -n "$(squeue -h)" ]; do sleep 0.1; done' || true
  for f in $S/ctl.pid $S/n*.pid /run/munge/*.pid; do [ -e $f ] && kill "$(cat $f)" 2>/dev/null || true; done
  for _ in $(seq 100); do [ -e $S/ctl.pid ] || break; sleep 0.1; done
  for n in $(ip netns list | awk '/^lab-/{print $1}'); do ip netns del $n; done
  for _ in $(seq 100); do
    for d in /sys/fs/cgroup/freezer/slurm_n*; do [ ! -d $d ] || find $d -depth -type d -exec rmdir {} + 2>/dev/null || true; done
    ls -d /sys/fs/cgroup/freezer/slurm_n* >/dev/null 2>&1 || break; sleep 0.1
  done
  rm -rf $S ;;
*) sed -n 2,8p "$0"; exit 2 ;;
esac
