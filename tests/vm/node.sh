#!/bin/sh
# One of two machines with a link between them (tests/vm/nodes.py): has an address, sshd and ctxd,
# and does what it is told by the second serial line: a number, and a script in base64. It answers
# with "@@", the number, the status, and what was printed in base64. $CTXFS_VM is its name.
set -u

stty raw -echo </dev/ttyS1
exec </dev/ttyS1
hostname "$CTXFS_VM"
case $CTXFS_VM in one) last=1 ;; *) last=2 ;; esac
modprobe virtio_net
ip link set lo up
ip address add "10.79.0.$last/24" dev eth0
ip link set eth0 up
id ctxfs-link >/dev/null 2>&1 || useradd --system ctxfs-link
mkdir -p /run/sshd
/usr/sbin/sshd -o UsePAM=no
cat >/usr/local/bin/ctxd <<'X'
#!/bin/sh
PYTHONPATH=/opt/ctxfs:/opt/ctxfs/site exec /usr/bin/python3 -m ctxfs.daemon "$@"
X
cat >/usr/local/bin/ctx <<'X'
#!/usr/bin/python3
import sys
sys.path.insert(0, "/usr/local/lib/ctxfs")
from client.start import main
main()
X
# agents do not see what is mounted below /opt
mkdir -p /usr/local/lib/ctxfs && cp -r /opt/ctxfs/client /usr/local/lib/ctxfs
chmod 755 /usr/local/bin/ctxd /usr/local/bin/ctx
cp /opt/ctxfs/contrib/systemd/*.service /etc/systemd/system/
# whatever else the machine does on which this one is emulated
mkdir -p /etc/ctxfs /etc/systemd/system/ctxd.service.d
printf '[Service]\nTimeoutStartSec=900\nWatchdogSec=0\n' >/etc/systemd/system/ctxd.service.d/slow.conf
test -e /etc/ctxfs/config.yaml || echo 'watchdog: 0s' >/etc/ctxfs/config.yaml
systemctl daemon-reload
/usr/bin/python3 -IS /opt/ctxfs/tests/vm/relay.py 7979 /ctx/ctxd.sock &
if systemctl start ctxd; then echo "@@ up"; else
	journalctl -u ctxd -n 20
	systemctl --no-block poweroff
fi
while read -r number script; do
	said=$(echo "$script" | base64 -d | sh 2>&1)
	echo "@@ $number $? $(echo "$said" | base64 -w0)"
done
