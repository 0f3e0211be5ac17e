/*
 * launcher: starts processes for the daemon, each in its own cgroup from birth.
 *
 *     launcher SOCKET_FD CGROUP
 *
 * A process started by fork(2) begins in the cgroup of its parent, and moving it
 * waits for an RCU grace period. Python has no CLONE_INTO_CGROUP of clone3(2), and
 * no other process may be in the daemon's cgroup, even briefly. So this program
 * moves to CGROUP and then starts the processes. They are children of the daemon,
 * not of this program.
 *
 * Each message on SOCKET_FD (SOCK_SEQPACKET) is orders (orders.h): the directory of a
 * cgroup; the environment, a list; the program and its arguments, a list. The message
 * carries descriptors (SCM_RIGHTS), which the program has from 0 on, in this order, and
 * no others. The answer is "PID 0", or "0 ERRNO" on failure. If the program cannot be
 * executed, the process exits with 127.
 * Ends with the daemon.
 */
#define _GNU_SOURCE
#include <signal.h>

#include "common.h"
#include "orders.h"

/* One request, taken apart. */
struct order {
	const char *cgroup;
	struct list environment, words;
};

/* Runs in the new process. */
static void become_program(const struct order *order, int *fds, int count)
{
	sigset_t none;

	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	/* first to numbers that do not collide; dup2(2) clears close-on-exec */
	for (int i = 0; i < count; i++)
		fds[i] = fcntl(fds[i], F_DUPFD_CLOEXEC, DESCRIPTORS_MAX + 3);
	for (int i = 0; i < count; i++)
		if (fds[i] < 0 || dup2(fds[i], i) < 0)
			_exit(127);
	close_from((unsigned)count, 0);
	execve(order->words.items[0], order->words.items, order->environment.items);
	dprintf(2, "%s: %m\n", order->words.items[0]);
	_exit(127);
}

/* Returns the pid of the new process; -1 with errno. */
static pid_t obey(struct orders *orders, int *fds, size_t count)
{
	struct order order = {.cgroup = take_word(orders)};
	pid_t pid;

	order.environment = take_list(orders);
	order.words = take_list(orders);
	if (!all_taken(orders) || !order.words.count) {
		errno = EBADMSG;
		return -1;
	}
	/* the daemon's child, as this program is */
	pid = fork_into(order.cgroup, CLONE_PARENT, 0);
	if (pid == 0)
		become_program(&order, fds, (int)count);
	return pid;
}

int main(int argc, char **argv)
{
	struct orders orders = orders_of_arguments(argc, argv);
	int channel = take_descriptor(&orders);
	const char *home = take_word(&orders);
	static char data[1 << 18];
	char path[4096];

	if (!all_taken(&orders))
		return 2;
	fcntl(channel, F_SETFD, FD_CLOEXEC);
	stand_beside("ctx-launcher");
	snprintf(path, sizeof path, "%s/cgroup.procs", home);
	if (write_file(AT_FDCWD, path, "0") < 0) {
		perror(home);
		return 1;
	}
	/* reports the move: nothing may be started before */
	if (send(channel, "0 0", 3, MSG_NOSIGNAL) < 0)
		return 1;
	for (;;) {
		int fds[DESCRIPTORS_MAX], size;
		struct orders asked = {0};
		char answer[64];
		pid_t pid = -1;
		size_t count;
		ssize_t n = receive_message(channel, data, sizeof data, fds, &count);

		if (n == 0 || (n < 0 && errno != E2BIG))
			return 0;
		if (n > 0) {
			asked = split_message(data, (size_t)n);
			pid = obey(&asked, fds, count);
		}
		size = snprintf(answer, sizeof answer, "%d %d", pid < 0 ? 0 : pid, pid < 0 ? errno : 0);
		for (size_t i = 0; i < count; i++)
			close(fds[i]);
		free(asked.strings);
		if (send(channel, answer, (size_t)size, MSG_NOSIGNAL) < 0)
			return 0;
	}
}
