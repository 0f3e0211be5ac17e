#!/bin/sh
# packages.sh [build]: checks for the Debian packages that ctxfs needs, or only for those that are
# needed to build and run it. Installs the missing ones as root, else names them.
set -eu

# requirement | package | for | reason
needed="
command:fusermount3      fuse3             build  mounting and unmounting
command:cc               gcc               build  the C programs and pyfuse3
command:musl-gcc         musl-tools        build  the C programs
file:/usr/include/stdlib.h libc6-dev       build  pyfuse3
file:/usr/include/linux/mount.h linux-libc-dev build the C programs
command:pkg-config       pkg-config        build  pyfuse3
pkgconfig:fuse3          libfuse3-dev      build  pyfuse3
python:venv              python3-venv      build  the virtual environment
python:include           python3-dev       build  pyfuse3
command:git              git               tests  and the demo
command:bwrap            bubblewrap        tests  and a reference for benchmarks
command:setpriv          util-linux        tests
command:ps               procps            tests  and the examples of man pages
command:mandoc           mandoc            tests  the man page lint
command:shellcheck       shellcheck        tests  the lint of scripts
command:tmux             tmux              tests  ctx top
command:jq               jq                tests  the notices of ctx(1)
"

has() {
	case $1 in
	command:*) command -v "${1#command:}" >/dev/null 2>&1 ;;
	file:*) test -e "${1#file:}" ;;
	pkgconfig:*) pkg-config --exists "${1#pkgconfig:}" 2>/dev/null ;;
	python:venv) python3 -c 'import ensurepip, venv' 2>/dev/null ;;
	python:include)
		python3 -c 'import os, sysconfig, sys
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' 2>/dev/null ;;
	esac
}

only=${1:-}
missing=$(printf '%s\n' "$needed" | while read -r what package for reason; do
	[ -n "$what" ] && [ "${only:-$for}" = "$for" ] || continue
	has "$what" || printf '%s ' "$package"
done)
# fusermount3 unmounts nothing without it; a Debian without systemd may lack it
mtab=
[ -e /etc/mtab ] || [ -n "$only" ] || mtab='ln -s ../proc/self/mounts /etc/mtab'
[ -n "$missing$mtab" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	if [ -n "$missing" ]; then
		echo "installing: $missing"
		export DEBIAN_FRONTEND=noninteractive
		# shellcheck disable=SC2086
		apt-get install -y -qq --no-install-recommends $missing >/dev/null 2>&1 || {
			apt-get update -qq
			apt-get install -y -qq --no-install-recommends $missing >/dev/null
		}
	fi
	if [ -n "$mtab" ]; then
		echo "making: /etc/mtab"
		$mtab
	fi
else
	[ -z "$missing" ] || echo "missing packages: $missing" >&2
	echo "as root:${missing:+ apt-get install $missing}${missing:+${mtab:+&&}}${mtab:+ $mtab}" >&2
	exit 1
fi
