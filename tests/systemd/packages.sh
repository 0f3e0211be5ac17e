#!/bin/sh
# Checks for packages that only these tests need: each argument is FILE:PACKAGE, FILE a path or the
# name of a command. Installs the missing ones as root, else names them.
set -eu

missing=
for pair; do
	file=${pair%%:*}
	case $file in
	/*) test -e "$file" ;;
	*) command -v "$file" >/dev/null 2>&1 ;;
	esac || missing="$missing ${pair#*:}"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	echo "installing:$missing"
	export DEBIAN_FRONTEND=noninteractive
	# shellcheck disable=SC2086
	apt-get install -y -qq --no-install-recommends $missing >/dev/null 2>&1 || {
		apt-get update -qq
		apt-get install -y -qq --no-install-recommends $missing >/dev/null
	}
else
	echo "missing packages:$missing" >&2
	echo "install them as root: apt-get install$missing" >&2
	exit 1
fi
