#!/bin/sh
# sh worktree.sh [DIRECTORY]: an operator tells an agent to make the tests of a small repository
# pass. The agent creates a work item, runs the tests as a task, has a forked child fix the code in
# a worktree, and merges the fix. worktree-agent.sh is the agent. This script is the operator: it
# needs a running ctxd and uses only files.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
repository=$(realpath "${1:-$(mktemp -d)}")
agent=${CTX_ROOT:-/ctx}/agent/coder.d

git init --quiet --initial-branch=main "$repository"
cd "$repository"
echo 'echo "Helo, world"' >greet.sh
cat >test.sh <<'TEST'
said=$(sh greet.sh)
if [ "$said" != "Hello, world" ]; then
	echo "said: $said"
	echo "wanted: Hello, world"
	exit 1
fi
TEST
git add greet.sh test.sh
git -c user.name=you -c user.email=you@localhost commit --quiet --message "Greet the world"

mkdir "$agent"
echo turn >"$agent/mode"
echo "explicit_root:$repository" >"$agent/workspace"
echo "$here /examples ro" >"$agent/mount"
echo "sh /examples/worktree-agent.sh" >"$agent/exec"
# see worktree-agent.sh
[ -z "${GATE:-}" ] || echo "GATE=$GATE" >"$agent/env"
# agents of root run as an unprivileged user, who must own the files
chown -R "$(cat "$agent/uid"):$(cat "$agent/gid")" "$repository"
echo start >"$agent/ctl"
echo "Make the tests pass." >"$agent/inbox"

# also waits for a daemon that restarts meanwhile
value() { cat "$agent/$1" 2>/dev/null || true; }
until [ "$(value work/tests/status)" = done ] && [ "$(value status)" = idle ]; do sleep 0.1; done

echo "What the agent did:"
until cat "$agent/out" 2>/dev/null; do sleep 0.1; done
echo "The repository now, $repository:"
git -c safe.directory="$repository" log --oneline --decorate --graph
sh test.sh && echo "the tests pass"
