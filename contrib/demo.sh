#!/bin/sh
# make demo: a parent agent surveys this checkout with three private children. Then the demo kills
# a parent and shows that its children are gone. It uses its own mount.
set -eu

project=$(cd "$(dirname "$0")/.." && pwd)
if [ "$(id -u)" != 0 ]; then
	echo "make demo needs root: ctxd creates cgroups and changes to the agents' ids" >&2
	exit 1
fi

base=$(mktemp -d /tmp/ctxfs-demo.XXXXXX)
chmod 755 "$base"
name=$(basename "$base")
CTX_ROOT=$base/ctx
export CTX_ROOT
ctx() { "$project/.venv/bin/ctx" "$@"; }
if [ -t 1 ]; then bold=$(printf "\033[1m") plain=$(printf "\033[0m"); else bold= plain=; fi
say() { printf "\n%s%s%s\n" "$bold" "$*" "$plain"; }

daemon=
clean_up() {
	[ -z "$daemon" ] || { kill -TERM "$daemon" 2>/dev/null && wait "$daemon" || true; }
	rm -rf "$base"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

say "Starting ctxd with its own mount, state and cgroup"
mkfifo "$base/said"
"$project/.venv/bin/ctxd" --mount "$CTX_ROOT" --state "$base/state" --runtime "$base/run" \
	--cgroup "$name" --log-level warning 2>"$base/said" &
daemon=$!
exec 3<"$base/said"
line=
until [ "$line" = ready ]; do
	read -r line <&3 || exit 1 # it ended, and has said why
	echo "ctxd: ${line#ctxd: }"
done
ls "$CTX_ROOT"
cat "$CTX_ROOT/status"

start_parent() { # NAME KEEP
	printf 'Task: survey a project; delegate, wait, merge.\n\nProject: %s\nKeep: %s\n' \
		/project "$2" |
		ctx spawn "$1" --handoff - --mount "$project:/project:ro" -- sh /project/contrib/demo/parent.sh
}

watch_tree() { # NAME: prints the tree whenever it changes, until the agent is dead
	last=
	while :; do
		status=$(cat "$CTX_ROOT/agent/$1.d/status")
		tree=$(ctx tree "$1")
		if [ "$tree" != "$last" ]; then
			printf '%s\n\n' "$tree"
			last=$tree
		fi
		[ "$status" != dead ] || break
	done
}

say "Act one: an agent gets the checkout read-only, and gives each of three children a task"
start_parent surveyor no
watch_tree surveyor
cat "$CTX_ROOT/agent/surveyor.d/wait"

say "Its result, merged from the children's results (agent/surveyor.d/result.md)"
ctx result surveyor

say "What the parent keeps about a child (session/context/child/churn/)"
ls "$CTX_ROOT/agent/surveyor.d/session/context/child/churn/"

say "The events of the parent (session/events.jsonl)"
ctx events surveyor

say "Act two: kill -9 ends the parent while its children are working"
ctx rm surveyor
start_parent surveyor yes
children="functions churn imports"
for child in $children; do
	until [ -s "$CTX_ROOT/agent/$child.d/result.md" ]; do
		# the parent may not have created it yet
		if [ "$(cat "$CTX_ROOT/agent/$child.d/status" 2>/dev/null)" = dead ]; then
			echo "$child ended without a result:" >&2
			cat "$CTX_ROOT/agent/$child.d/log" >&2
			exit 1
		fi
		sleep 0.05
	done
done
ctx tree surveyor
pids=$(for child in $children; do cat "$CTX_ROOT/agent/$child.d/pid"; done)
echo
echo "kill -9 $(cat "$CTX_ROOT/agent/surveyor.d/pid")"
kill -9 "$(cat "$CTX_ROOT/agent/surveyor.d/pid")"
cat "$CTX_ROOT/agent/surveyor.d/wait"
ctx tree surveyor
for pid in $pids; do
	if kill -0 "$pid" 2>/dev/null; then
		echo "process $pid still exists" >&2
		exit 1
	fi
done
echo "The children's processes are gone; their results and histories remain:"
ctx events surveyor | grep child.cancel
head -n 3 "$CTX_ROOT/agent/churn.d/result.md"

say "Stopping ctxd with SIGTERM"
cgroup=$(sed -n 's/^cgroup=//p' "$CTX_ROOT/status")
kill -TERM "$daemon"
wait "$daemon"
daemon=
left=0
if [ -d "$cgroup" ]; then echo "a cgroup is left: $cgroup" >&2; left=1; fi
if grep -q "$base" /proc/self/mountinfo; then echo "a mount is left below $base" >&2; left=1; fi
for process in /proc/[0-9]*; do # not pgrep(1), which a small system may lack
	if { tr '\0' ' ' <"$process/cmdline"; } 2>/dev/null | grep -qF "$base/"; then
		echo "a process is left: ${process#/proc/}" >&2
		left=1
	fi
done
[ "$left" = 1 ] || echo "no process, mount or cgroup is left"
exit "$left"
