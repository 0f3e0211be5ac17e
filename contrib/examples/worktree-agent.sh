#!/bin/sh
# The agent of worktree.sh. It is a turn agent: each message starts a run of this program, which
# remembers nothing from earlier runs. The message and the files below $CTX_SELF tell it what to
# do; a model would read the same.
set -eu

# Calls to $CTX_ROOT fail while the daemon restarts. So each command is tried several times, and
# must succeed again if an earlier try had succeeded.
try() {
	for _ in 1 2 3 4 5; do
		"$@" && return
		until cat "$CTX_SELF/status" >/dev/null 2>&1; do sleep 0.1; done
	done
	"$@"
}
# prints all of a file or nothing: cat may fail after printing a part
get() { text=$(cat "$1") && echo "$text"; }
is() { [ "$(cat "$1")" = "$2" ]; }
make() { [ -d "$1" ] || mkdir "$1"; }
# echo reports errors of write(2), but not of close(2): check the value by reading it
put() { is "$1" "$2" || { echo "$2" >"$1" && is "$1" "$2"; }; }
begin() { echo start >"$1/ctl" || grep -q EBUSY "$CTX_ROOT/error"; }
# The reply lists the steps. GATE is a FIFO that lets tests stop the program after each step.
step() {
	echo "$*"
	cat "${GATE:-/dev/null}"
}

work=$CTX_SELF/work/tests
check=$CTX_SELF/task/check
checked=$CTX_SELF/waiting/checked
child=$CTX_SELF/../mender.d
mended=$CTX_SELF/waiting/mended

take_up() { # MESSAGE
	try make "$work"
	try put "$work/objective" "$1"
	step "$CTX_RUN: made a work item"
	try put "$CTX_SELF/work/current" tests
	step "$CTX_RUN: made it the current work item"
	try make "$check"
	try put "$check/cmd" "sh test.sh"
	try put "$check/work" tests
	try begin "$check"
	step "$CTX_RUN: started the tests"
	try make "$checked"
	try put "$checked/work" tests
	try put "$checked/on" "task check"
	step "$CTX_RUN: waits for the tests"
}

delegate() {
	try put "$work/plan.md" "Mend what the tests complain about:
$(try get "$check/preview")"
	step "$CTX_RUN: saw that the status of the tests is $(try get "$check/status"), and made a plan"
	try make "$child"
	try put "$child/context" fork
	try put "$child/workspace" worktree
	try put "$child/exec" "sh /examples/worktree-agent.sh mend"
	try put "$child/handoff.md" "Do what the plan says, and commit it."
	step "$CTX_RUN: made a child with a worktree"
	try begin "$child"
	step "$CTX_RUN: started the child"
	try make "$mended"
	try put "$mended/work" tests
	try put "$mended/on" "child mender"
	step "$CTX_RUN: waits for the child"
}

mend() { # the child, in its worktree: its task is in the inherited context
	wanted=$(sed -n '/wanted: /{s/^.*wanted: //p;q;}')
	echo "echo \"$wanted\"" >greet.sh
	sh test.sh
	git -c user.name=mender -c user.email=mender@localhost commit --quiet --all \
		--message "Greet the world as the tests want it"
	try put "$CTX_SELF/result.md" "$(git log --format='%s on %D' --max-count=1)"
}

finish() {
	result=$(try get "$CTX_SELF/child/mender/result.md")
	step "$CTX_RUN: read the result: $result"
	git merge --quiet --ff-only ctx/mender
	step "$CTX_RUN: merged it"
	try put "$work/status" "done"
	step "$CTX_RUN: the work is done"
}

if [ $# -gt 0 ]; then
	"$@"
	exit
fi
message=$(cat)
case $message in
'{"wait":"checked",'*) delegate ;;
'{"wait":"mended",'*) finish ;;
'{"task":'*) ;; # the end of a task or child; the waits report it, too
*) take_up "$message" ;;
esac
