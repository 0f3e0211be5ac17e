#!/bin/sh
# A parent agent: reads its handoff, gives each of three private children a task, waits, and merges
# their results. It uses only plain files below $CTX_ROOT.
set -eu

project= keep=no
while IFS=': ' read -r key value; do
	case $key in
	Project) project=$value ;;
	Keep) keep=$value ;;
	esac
done
tools=$project/contrib/demo
cd "$CTX_ROOT/agent"

delegate() { # NAME PROGRAM TITLE
	mkdir "$1.d"
	printf '%s\n' "$2" >"$1.d/exec"
	printf 'Task: %s\n\nProject: %s\nCount: 8\nKeep: %s\n' "$3" "$project" "$keep" >"$1.d/handoff.md"
	echo start >"$1.d/ctl"
}

delegate functions "python3 -I $tools/largest_functions.py" 'Find the largest functions, by syntax tree.'
delegate churn "sh $tools/churn.sh" 'Find the files that changed most often, by git history.'
delegate imports "python3 -I $tools/unresolved_imports.py" 'Find compile errors and unresolved imports.'

{
	echo "# Survey of $project"
	for child in functions churn imports; do
		cat "$child.d/wait"
		echo
		if [ "$(cat "$child.d/outcome")" = done ]; then
			cat "$child.d/result.md"
		else
			echo "## $child: $(cat "$child.d/outcome") ($(cat "$child.d/reason"))"
		fi
	done
} >"$CTX_SELF/result.md"
