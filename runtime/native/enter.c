/*
 * enter: goes from the host into an agent's cell, with the agent's ids.
 *
 *     enter PIDFD PROGRAM_FD UID GID GROUPS NETWORK ARGUMENTS      (orders.h)
 *
 * PIDFD refers to the cell's keeper, so that setns(2) joins all its namespaces at
 * once and a reused pid cannot lead elsewhere. The process keeps exactly GROUPS;
 * nsenter(1) would drop them. NETWORK is "cell", or "host" to stay in the host's
 * network namespace. PROGRAM_FD was opened outside, because the agent chooses what
 * is at a path in the cell's view. It is executed with ARGUMENTS from the zeroth on
 * and an empty environment, and has no more rights than the agent there.
 *
 * Without root, the ids are the caller's own, and GROUPS is "=": unchanged. The
 * keeper is not dumpable, so that its agent cannot trace it. The caller may still
 * join: the owner of a user namespace has every capability in it while it is outside
 * (user_namespaces(7)), and the agent is inside. The agent cannot trace this program,
 * which is not dumpable either. It cannot trace PROGRAM, because no agent may read
 * that file, and such a process is not dumpable from its first instruction on.
 */
#define _GNU_SOURCE
#include <sched.h>

#include "common.h"
#include "orders.h"

int main(int argc, char **argv)
{
	int flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNET |
		    CLONE_NEWUTS;
	struct orders orders = orders_of_arguments(argc, argv);
	int keeper = take_descriptor(&orders), program = take_descriptor(&orders);
	struct ids ids = take_ids(&orders);
	const char *network = take_word(&orders);
	struct list arguments = take_list(&orders);
	pid_t child;

	if (!all_taken(&orders) || !arguments.count) {
		fputs("usage: enter PIDFD PROGRAM_FD UID GID GROUPS NETWORK ARGUMENTS\n", stderr);
		return 2;
	}
	if (!strcmp(network, "host"))
		flags &= ~CLONE_NEWNET;
	if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0 || forbid_new_privileges() < 0)
		die("entering the parent's cell: prctl: %m");
	if (become_groups(&ids) < 0)
		die("entering the parent's cell: setgroups: %m");
	if (setns(keeper, flags) < 0)
		die("entering the parent's cell: setns: %m");
	close(keeper);
	/* setns(2) changes the pid namespace of children only */
	child = fork();
	if (child < 0)
		die("entering the parent's cell: fork: %m");
	if (child == 0) {
		/* Leaving root's uid does not clear capabilities in a namespace where root is
		 * not mapped, and the entering process has them all there. */
		if (become(&ids) < 0)
			die("entering the parent's cell: the agent's ids: %m");
		execute(program, arguments.items);
		die("entering the parent's cell: %s: %m", arguments.items[0]);
	}
	/* or it could not end while somebody holds a pipe of the program */
	close_from(0, 0);
	return await_child(child);
}
