/*
 * enter: goes from the host into an agent's cell, with the agent's ids.
 *
 *     enter PIDFD PROGRAM_FD UID GID GROUPS NETWORK ARGUMENTS      (orders.h)
 *
 * PIDFD refers to the cell's keeper, so that all its namespaces are joined at
 * once and a reused pid cannot lead elsewhere (setns(2)). GROUPS are all that it
 * keeps; nsenter(1) would drop them. NETWORK is "cell", or
 * "host" to stay in the host's network namespace. PROGRAM_FD was opened outside,
 * because what the cell's view has at a path is its agent's choice; it is
 * executed with ARGUMENTS from the zeroth on, an empty environment, and nothing
 * but what the agent there has.
 *
 * Without root the ids are the caller's own, and GROUPS is "=": as they are. The
 * keeper is not dumpable, so that its agent cannot trace it; the caller may join
 * all the same, because whoever owns a user namespace has every capability in it,
 * as long as it is not inside (user_namespaces(7)). The agent is inside. Nor can
 * it trace this program, which is not dumpable either, nor PROGRAM, which no
 * agent may read: what is so executed is not dumpable from its first instruction.
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
	/* a process never changes its own pid namespace, only its children's */
	child = fork();
	if (child < 0)
		die("entering the parent's cell: fork: %m");
	if (child == 0) {
		/* Leaving root's uid does not clear capabilities in a namespace where root is
		 * not mapped, and whoever enters has them all there. */
		if (become(&ids) < 0)
			die("entering the parent's cell: the agent's ids: %m");
		execute(program, arguments.items);
		die("entering the parent's cell: %s: %m", arguments.items[0]);
	}
	return await_child(child);
}
