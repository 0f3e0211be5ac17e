/*
 * launcher: starts processes for the daemon, each born where it belongs.
 *
 *     launcher SOCKET_FD CGROUP
 *
 * A process that is started by fork(2) begins in the cgroup of whoever started it,
 * and moving it waits for an RCU grace period. The daemon's language cannot say
 * where it is to be born (CLONE_INTO_CGROUP of clone3(2)), and nothing but the
 * daemon is to be in its cgroup, however short: so this program, which moves to
 * CGROUP first, does it. What it starts is the daemon's child, not its own.
 *
 * Each message on SOCKET_FD (SOCK_SEQPACKET) holds strings, each ended by a NUL:
 * the directory of a cgroup; the number of environment entries, the entries; the
 * program and its arguments. With it come descriptors (SCM_RIGHTS), which the
 * program finds from 0 on, in this order, and no others. The answer is "PID 0",
 * or "0 ERRNO" of what failed; a program that cannot be executed ends with 127.
 * Ends with the daemon.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define DESCRIPTORS_MAX 64
#define WORDS_MAX 1024

/* One request, taken apart. */
struct order {
	char *cgroup;
	char **environment;
	char **words;
};

static bool take_apart(char *data, size_t length, struct order *order)
{
	static char *items[WORDS_MAX];
	static char *environment[WORDS_MAX + 1];
	size_t count = 0, entries;

	if (!length || data[length - 1])
		return false;
	for (char *p = data; p < data + length; p += strlen(p) + 1) {
		if (count == WORDS_MAX - 1)
			return false;
		items[count++] = p;
	}
	items[count] = NULL;
	if (count < 3)
		return false;
	entries = strtoul(items[1], NULL, 10);
	if (entries > count - 3)
		return false;
	memcpy(environment, items + 2, entries * sizeof *environment);
	environment[entries] = NULL;
	*order = (struct order){items[0], environment, items + 2 + entries};
	return true;
}

/* In the new process. */
static void become(const struct order *order, int *fds, int count)
{
	sigset_t none;

	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	/* out of the way of each other first; a duplicate is not closed on exec */
	for (int i = 0; i < count; i++)
		fds[i] = fcntl(fds[i], F_DUPFD_CLOEXEC, DESCRIPTORS_MAX + 3);
	for (int i = 0; i < count; i++)
		if (fds[i] < 0 || dup2(fds[i], i) < 0)
			_exit(127);
	syscall(SYS_close_range, (unsigned)count, ~0U, 0U);
	execve(order->words[0], order->words, order->environment);
	dprintf(2, "%s: %s\n", order->words[0], strerror(errno));
	_exit(127);
}

static pid_t launch(const struct order *order, int *fds, int count)
{
	int cgroup = open(order->cgroup, O_PATH | O_DIRECTORY | O_CLOEXEC);
	struct clone_args args = {
		.flags = CLONE_INTO_CGROUP | CLONE_PARENT,
		.cgroup = (uint64_t)cgroup,
	};
	pid_t pid;
	int error;

	if (cgroup < 0)
		return -1;
	pid = (pid_t)syscall(SYS_clone3, &args, sizeof args);
	if (pid == 0)
		become(order, fds, count);
	error = errno;
	close(cgroup);
	errno = error;
	return pid;
}

static int take_descriptors(struct msghdr *message, int *fds)
{
	int count = 0;

	for (struct cmsghdr *h = CMSG_FIRSTHDR(message); h; h = CMSG_NXTHDR(message, h)) {
		size_t size = h->cmsg_len - CMSG_LEN(0);

		if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
			continue;
		memcpy(fds, CMSG_DATA(h), size);
		count = (int)(size / sizeof *fds);
	}
	return count;
}

static int move_to(const char *cgroup)
{
	char path[4096];
	int fd;

	snprintf(path, sizeof path, "%s/cgroup.procs", cgroup);
	fd = open(path, O_WRONLY | O_CLOEXEC);
	return fd >= 0 && write(fd, "0", 1) == 1 && close(fd) == 0 ? 0 : -1;
}

int main(int argc, char **argv)
{
	static char data[1 << 18];
	union {
		char space[CMSG_SPACE(DESCRIPTORS_MAX * sizeof(int))];
		struct cmsghdr align;
	} control;
	int channel;

	if (argc != 3)
		return 2;
	channel = atoi(argv[1]);
	fcntl(channel, F_SETFD, FD_CLOEXEC);
	prctl(PR_SET_NAME, "ctx-launcher");
	setsid();	/* a terminal's Ctrl-C is the daemon's to take */
	if (move_to(argv[2]) < 0) {
		perror(argv[2]);
		return 1;
	}
	/* that it has moved: until then nothing is to be started */
	if (send(channel, "0 0", 3, MSG_NOSIGNAL) < 0)
		return 1;
	for (;;) {
		struct iovec part = {data, sizeof data};
		struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1,
					 .msg_control = &control, .msg_controllen = sizeof control};
		int fds[DESCRIPTORS_MAX], count, size;
		struct order order;
		char answer[64];
		pid_t pid = -1;
		ssize_t n = recvmsg(channel, &message, MSG_CMSG_CLOEXEC);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return 0;
		count = take_descriptors(&message, fds);
		errno = E2BIG;
		if (!(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) && take_apart(data, (size_t)n, &order))
			pid = launch(&order, fds, count);
		size = snprintf(answer, sizeof answer, "%d %d", pid < 0 ? 0 : pid, pid < 0 ? errno : 0);
		for (int i = 0; i < count; i++)
			close(fds[i]);
		if (send(channel, answer, (size_t)size, MSG_NOSIGNAL) < 0)
			return 0;
	}
}
