#!/bin/sh
# build.sh DIR: a Debian of this machine's release as a disk image, with its kernel for virtual
# machines: DIR/root.img, DIR/vmlinuz, DIR/python (the version of its python3). Needs the network.
set -eu

to=$1
work=$to.part
packages=systemd,systemd-sysv,dbus,kmod,python3,fuse3,libfuse3-3,bubblewrap,dmsetup,e2fsprogs,iproute2,openssh-server,openssh-client
. /etc/os-release
suite=$VERSION_CODENAME

rm -rf "$work"
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
mkdir -p "$work/kernel"
root=$work/root

echo "the kernel"
apt-get update -qq
kernel=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends:/ { print $2; exit }')
(cd "$work/kernel" && apt-get download -q "$kernel" >../log 2>&1) || { cat "$work/log"; exit 1; }
dpkg -x "$work/kernel/$kernel"_*.deb "$work/kernel"

echo "Debian $suite"
# from where this machine's apt takes it
mirror=$(apt-get indextargets --format '$(CREATED_BY) $(CODENAME) $(REPO_URI)' |
	awk -v suite="$suite" '$1 == "Packages" && $2 == suite { print $3; exit }')
# shellcheck disable=SC2086
debootstrap --variant=minbase --include="$packages" "$suite" "$root" $mirror >"$work/log" 2>&1 || {
	tail -20 "$work/log"
	exit 1
}
mkdir -p "$root/lib/modules" "$root/opt/ctxfs" "$root/var/lib/ctxfs"
cp -r "$work"/kernel/lib/modules/* "$root/lib/modules/"
chroot "$root" depmod "${kernel#linux-image-}"
chroot "$root" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' >"$work/python"

units=$root/etc/systemd/system
rm -rf "$units"/*.wants
ln -sf /lib/systemd/system/multi-user.target "$units/default.target"
for unit in getty.target serial-getty@ttyS0.service serial-getty@ttyS1.service apt-daily.timer \
	apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer fstrim.timer; do
	ln -sf /dev/null "$units/$unit"
done
echo ctxfs-vm >"$root/etc/hostname"
echo 0123456789abcdef0123456789abcdef >"$root/etc/machine-id"
# The second disk is what is tested, the third what survives from boot to boot.
cat >"$units/ctxfs-vm.service" <<'X'
[Unit]
After=basic.target dbus.service
[Service]
Type=exec
StandardOutput=tty
StandardError=inherit
TTYPath=/dev/ttyS1
ExecStartPre=/bin/mount /dev/nvme0n2 /opt/ctxfs
ExecStart=/bin/sh /opt/ctxfs/tests/vm/guest.sh
X
mkdir "$units/multi-user.target.wants"
ln -s ../ctxfs-vm.service "$units/multi-user.target.wants/"

echo "the disk image"
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
truncate -s 2G "$work/root.img"
mke2fs -q -t ext4 -d "$root" "$work/root.img"
mv "$work"/kernel/boot/vmlinuz-* "$work/vmlinuz"
rm -rf "$work/kernel" "$root" "$work/log"
mv "$work" "$to"
