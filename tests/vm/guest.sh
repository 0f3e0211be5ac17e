#!/bin/sh
# In the machine, once for each boot: installs what is on the second disk, runs the tests of this
# boot, and then cuts the power, or switches it off. "@@" begins what the host looks for.
set -u

read -r up _ </proc/uptime
echo "@@ booted in $up s: Linux $(uname -r)"
case $CTXFS_VM in one | two) exec sh /opt/ctxfs/tests/vm/node.sh ;; esac
# Nothing is written back by itself: what was not synced is lost in a power cut.
echo 0 >/proc/sys/vm/dirty_writeback_centisecs
mount -o commit=600 /dev/nvme0n3 /var/lib/ctxfs
cp /opt/ctxfs/contrib/systemd/*.service /etc/systemd/system/
cat >/usr/local/bin/ctxd <<'X'
#!/bin/sh
exec /usr/bin/python3 -m ctxfs.daemon "$@"
X
chmod 755 /usr/local/bin/ctxd
systemctl set-environment PYTHONPATH=/opt/ctxfs:/opt/ctxfs/site
export PYTHONPATH=/opt/ctxfs:/opt/ctxfs/site LANG=C.UTF-8 PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
systemctl daemon-reload

cd /opt/ctxfs || exit
# what ctxd does where the kernel cannot refuse descriptors (before Linux 6.16) is tried there, too
python3 -m pytest -p no:cacheprovider --color=no -v tests/vm tests/unit/runtime/kernel/test_linux.py
echo "@@ pytest $?"
if [ -e "tests/vm/cut$CTXFS_VM.py" ]; then
	python3 -m "tests.vm.cut$CTXFS_VM"
	echo "@@ not cut"
fi
systemctl --no-block poweroff
