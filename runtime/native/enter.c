/*
 * enter: goes from the host into an agent's cell, with the agent's ids.
 *
 *     enter PIDFD PROGRAM_FD UID GID GROUPS NETWORK -- ARGUMENT...
 *
 * PIDFD refers to the cell's keeper, so that all its namespaces are joined at
 * once and a reused pid cannot lead elsewhere (setns(2)). GROUPS are separated
 * by commas, "-" for none; nsenter(1) would drop them. NETWORK is "cell", or
 * "host" to stay in the host's network namespace. PROGRAM_FD was opened outside,
 * because what the cell's view has at a path is its agent's choice; it is
 * executed with ARGUMENTs from the zeroth on, an empty environment, and nothing
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
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>

#include "common.h"

static void die(const char *what)
{
	fprintf(stderr, "ctxfs: entering the parent's cell: %s: %s\n", what, strerror(errno));
	exit(125);
}

int main(int argc, char **argv)
{
	int flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNET |
		    CLONE_NEWUTS;
	char *const environment[] = {NULL};
	int status, pidfd, program;
	uid_t uid;
	gid_t gid;
	pid_t child;

	if (argc < 9 || strcmp(argv[7], "--")) {
		fputs("usage: enter PIDFD PROGRAM_FD UID GID GROUPS NETWORK -- ARGUMENT...\n", stderr);
		return 2;
	}
	if (!strcmp(argv[6], "host"))
		flags &= ~CLONE_NEWNET;
	pidfd = atoi(argv[1]);
	program = atoi(argv[2]);
	uid = (uid_t)strtoul(argv[3], NULL, 10);
	gid = (gid_t)strtoul(argv[4], NULL, 10);
	if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		die("prctl");
	/* before entering: a user namespace may forbid setgroups(2) */
	if (take_groups(argv[5]) < 0)
		die("setgroups");
	if (setns(pidfd, flags) < 0)
		die("setns");
	close(pidfd);
	/* a process never changes its own pid namespace, only its children's */
	child = fork();
	if (child < 0)
		die("fork");
	if (child == 0) {
		/* Leaving root's uid does not clear capabilities in a namespace where root is
		 * not mapped, and whoever enters has them all there. */
		if (take_ids(uid, gid) < 0)
			die("the agent's ids");
		execute(program, argv + 8, (char **)environment);
		die(argv[8]);
	}
	while (waitpid(child, &status, 0) < 0 && errno == EINTR)
		;
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
