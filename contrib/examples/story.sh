#!/bin/sh
# sh story.sh [DIRECTORY]: an agent has three others review the files of a directory, by default of
# this one. orchestrator.py is the agent, reviewer.py are the others. This script is the operator:
# it needs a running ctxd, and removes all that it made.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
directory=$(realpath "${1:-$here}")
root=${CTX_ROOT:-/ctx}
agent=story-$$

clean_up() {
	trap '' INT TERM
	if [ -d "$root/agent/$agent.d" ]; then
		[ "$(cat "$root/agent/$agent.d/status")" = dead ] || ctx kill --wait "$agent" || true
		ctx rm "$agent" # with its children, if it still has any
	fi
	# histories outlive agents; nobody will use these names again
	for session in "$root/home/$(id -u)/agent/$agent"*/session/*; do
		[ ! -d "$session" ] || rmdir "$session"
	done
}
trap clean_up EXIT
trap 'exit 130' INT TERM

# all that it may do; its children get the same, but may create nothing
policy="allow ${agent}_t agent:$agent-* create"
for tool in SpawnAgent AgentGet SendMessage AgentStop AgentRemove Report ResultWrite; do
	policy="$policy
allow ${agent}_t tool:$tool execute"
done

echo "The agent $agent has three others review $directory."
echo "Review the files in your working directory." |
	ctx spawn "$agent" --handoff - --mode turn --mount "$here:/examples" --mount "$directory:/files" \
		--cwd /files --set policy="$policy" ${GATE:+--env "GATE=$GATE"} \
		-- python3 /examples/orchestrator.py >/dev/null
ctx wait --timeout 5m "$agent" >/dev/null # it ends when it has the results
if [ ! -s "$root/agent/$agent.d/result.md" ]; then
	ctx log "$agent" # says why
	exit 1
fi
echo
echo "What it did in each of its runs:"
ctx log --out "$agent"
echo
echo "Its result:"
ctx result "$agent"
