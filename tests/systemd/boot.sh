#!/bin/sh
# boot.sh NAME CGROUP HIERARCHY CHECKOUT VENV [BIND...]: systemd as PID 1 on an overlay of this
# machine's root, booted again as long as it asks for that.
#
# Runs as PID 1 of a pid namespace, in a mount namespace of its own: what ends it takes every
# process and mount along.
set -eu

name=$1 cgroup=$2 hierarchy=$3 checkout=$4 venv=$5
shift 5

echo 0 >"$cgroup/cgroup.procs"
# v2 alone, so that nothing is made in the hierarchies of a hybrid machine
[ "$hierarchy" = /sys/fs/cgroup ] || mount --bind "$hierarchy" /sys/fs/cgroup
mount -t tmpfs -o mode=755 "$name" /run
tree=/run/tree root=/run/root
mkdir "$tree" "$tree/upper" "$tree/work" "$root"
mount -t overlay -o "lowerdir=/,upperdir=$tree/upper,workdir=$tree/work" "$name" "$root"

# nothing starts but what these tests start
units=$root/etc/systemd/system
rm -rf "$units"/*.wants
ln -sf /lib/systemd/system/multi-user.target "$units/default.target"
for unit in getty.target console-getty.service systemd-logind.service systemd-resolved.service \
	sys-kernel-debug.mount sys-kernel-tracing.mount systemd-sysctl.service \
	systemd-modules-load.service; do
	ln -sf /dev/null "$units/$unit"
done
echo "$name" >"$root/etc/hostname"
systemd-id128 new >"$root/etc/machine-id"

# the checkout as it is now, whatever is changed in it meanwhile
rm -rf "$units"/ctxd*
mkdir -p "$root/opt/ctxfs/.venv"
for part in client ctxfs runtime contrib tests pyproject.toml; do
	cp -a "$checkout/$part" "$root/opt/ctxfs/"
done
cp "$checkout"/build/ctxfs_*.deb "$root/opt/ctxfs/"
cp "$checkout"/contrib/systemd/*.service "$units/"
mkdir -p "$root/usr/local/bin"
rm -f "$root"/usr/local/bin/ctx*
while read -r program words; do
	cat >"$root/usr/local/bin/$program" <<X
#!/bin/sh
PYTHONPATH=/opt/ctxfs exec /opt/ctxfs/.venv/bin/python $words "\$@"
X
	chmod 755 "$root/usr/local/bin/$program"
done <<X
ctxd -m ctxfs.daemon
ctxfs-meter -c 'from runtime.metering.main import main; exit(main())'
X

set -- "$venv:/opt/ctxfs/.venv" "$@"
for bind; do
	set -- "$@" "--bind-ro=$bind"
	shift
done
status=133	# asked to boot again
while [ $status = 133 ]; do
	status=0
	systemd-nspawn --quiet --directory="$root" --boot --machine="$name" \
		--register=no --keep-unit --notify-ready=yes --private-network --bind=/dev/fuse "$@" \
		--console=read-only --link-journal=no --resolv-conf=off --timezone=off \
		-- systemd.log_target=journal || status=$?
done
exit $status
