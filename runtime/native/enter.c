/*
 * enter: goes from the host into an agent's cell, with the agent's ids.
 *
 *     enter PIDFD UID GID GROUPS NETWORK -- PROGRAM ARGUMENT...
 *
 * PIDFD refers to the cell's keeper, so that all its namespaces are joined at
 * once and a reused pid cannot lead elsewhere (setns(2)). GROUPS are separated
 * by commas, "-" for none; nsenter(1) would drop them. NETWORK is "cell", or
 * "host" to stay in the host's network namespace. PROGRAM is found in the
 * cell's view and runs with nothing but what the agent there has.
 *
 * Without root the ids are the caller's own, and GROUPS is "=": as they are. The
 * keeper is not dumpable, so that its agent cannot trace it; the caller may join
 * all the same, because whoever owns a user namespace has every capability in it,
 * as long as it is not inside (user_namespaces(7)). The agent is inside. That
 * capability also keeps the agent from tracing this program until PROGRAM runs.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static void die(const char *what)
{
	fprintf(stderr, "ctxfs: entering the parent's cell: %s: %s\n", what, strerror(errno));
	exit(125);
}

int main(int argc, char **argv)
{
	int flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNET |
		    CLONE_NEWUTS;
	gid_t groups[1024], gid;
	int count = 0, status, pidfd;
	bool keep_groups;
	char *state = NULL;
	uid_t uid;
	pid_t child;

	if (argc < 8 || strcmp(argv[6], "--")) {
		fputs("usage: enter PIDFD UID GID GROUPS NETWORK -- PROGRAM ARGUMENT...\n", stderr);
		return 2;
	}
	if (!strcmp(argv[5], "host"))
		flags &= ~CLONE_NEWNET;
	pidfd = atoi(argv[1]);
	uid = (uid_t)atol(argv[2]);
	gid = (gid_t)atol(argv[3]);
	keep_groups = !strcmp(argv[4], "=");
	for (char *word = strtok_r(argv[4], ",", &state);
	     word && *word != '-' && !keep_groups && count < 1024;
	     word = strtok_r(NULL, ",", &state))
		groups[count++] = (gid_t)atol(word);
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		die("no_new_privs");
	/* before entering: a user namespace may forbid setgroups(2) */
	if (!keep_groups && setgroups(count, groups) < 0)
		die("setgroups");
	if (setns(pidfd, flags) < 0)
		die("setns");
	close(pidfd);
	/* a process never changes its own pid namespace, only its children's */
	child = fork();
	if (child < 0)
		die("fork");
	if (child == 0) {
		/* Leaving root's uid does not clear capabilities in a namespace where
		 * root is not mapped; the exec of an ordinary user's program does. */
		if (setresgid(gid, gid, gid) < 0 || setresuid(uid, uid, uid) < 0)
			die("setresuid");
		execvp(argv[7], argv + 7);
		die(argv[7]);
	}
	while (waitpid(child, &status, 0) < 0 && errno == EINTR)
		;
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
