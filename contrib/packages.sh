#!/bin/sh
# Checks for the Debian packages that ctxfs needs; installs the missing ones as root, else names them.
set -eu

# requirement | package | reason
needed="
command:bwrap            bubblewrap        tests, and a reference for benchmarks
command:setpriv          util-linux        tests
command:fusermount3      fuse3             mounting and unmounting
command:cc               gcc               the C programs and pyfuse3
command:musl-gcc         musl-tools        the C programs
file:/usr/include/stdlib.h libc6-dev       pyfuse3
file:/usr/include/linux/mount.h linux-libc-dev the C programs
command:pkg-config       pkg-config        pyfuse3
pkgconfig:fuse3          libfuse3-dev      pyfuse3
python:venv              python3-venv      the virtual environment
python:include           python3-dev       pyfuse3
command:git              git               the demo
command:mandoc           mandoc            the man page lint
command:tmux             tmux              the tests of ctx top
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

missing=$(printf '%s\n' "$needed" | while read -r what package reason; do
	[ -n "$what" ] || continue
	has "$what" || printf '%s ' "$package"
done)
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	echo "installing: $missing"
	export DEBIAN_FRONTEND=noninteractive
	# shellcheck disable=SC2086
	apt-get install -y -qq --no-install-recommends $missing >/dev/null 2>&1 || {
		apt-get update -qq
		apt-get install -y -qq --no-install-recommends $missing >/dev/null
	}
else
	echo "missing packages: $missing" >&2
	echo "install them as root: apt-get install $missing" >&2
	exit 1
fi
