#!/bin/sh
# A child's task: the files that changed most often, by git history.
set -eu

project= count=8 keep=no
while IFS=': ' read -r key value; do
	case $key in
	Project) project=$value ;;
	Count) count=$value ;;
	Keep) keep=$value ;;
	esac
done

survey() {
	# The repository belongs to another user; this script only reads it.
	if ! commits=$(git -c safe.directory='*' -C "$project" rev-list --count HEAD); then
		echo "## The checkout has no git history"
		return
	fi
	echo "## Files changed most often in $commits commits"
	echo
	git -c safe.directory='*' -C "$project" log --name-only --format= |
		sort | uniq -c | sort -rn | head -n "$count" | sed 's/^ */- /; s/ / times  /2'
}

while :; do
	survey >"$CTX_SELF/result.md"
	[ "$keep" = yes ] || exit 0
	sleep 0.2
done
