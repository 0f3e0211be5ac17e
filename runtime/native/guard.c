/*
 * guard: frees all processes that wait for the filesystem when the daemon dies or
 * stops answering.
 *
 *     guard MOUNT_POINT PID ABORT SECONDS
 *
 * The kernel ends a FUSE connection when its last descriptor is closed. But a
 * thread of a killed daemon can be inside a notification to the kernel, waiting
 * for a lock that a request holds, and nobody will answer this request: the thread
 * never ends, the descriptor is never closed, and the mount hangs for all users. A
 * forced umount(2) aborts the connection and so ends the deadlock. If that is not
 * permitted, ABORT does the same: the file of the connection in fusectl, which
 * belongs to the user who mounted it. If fusectl is not mounted either, the guard
 * only unmounts, for later callers.
 *
 * PID is the daemon's main thread. A signal reports its death (PR_SET_PDEATHSIG),
 * because pidfds and sockets report only after the death of all threads.
 *
 * A child of the guard asks the filesystem regularly, because the guard itself must
 * not wait for an answer. If no answer comes within SECONDS (0: never ask), the
 * guard writes a byte to standard output, so that a thread of the daemon logs what waits
 * for what, and then aborts the connection. A daemon that still runs
 * mounts again. The guard kills a daemon that does not notice, so that its service
 * manager restarts it.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/mount.h>
#include <sys/statfs.h>

#include "common.h"
#include "orders.h"

/* time to log what waits for what; to notice that the connection is gone */
#define TELL_SECONDS 1
#define NOTICE_SECONDS 5

static pid_t asker;
static int answers;

/* Writes a byte for each answer, until killed; if it hangs, it dies when the abort frees it. */
static void ask(const char *point, int seconds)
{
	struct timespec pause = {seconds / 4, seconds % 4 * 250000000L};
	pid_t guard = getpid();
	struct statfs fs;
	int ends[2];

	if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0)
		exit(1);
	answers = ends[0];
	asker = fork();
	if (asker != 0)
		return;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	/* the parent may have ended before the signal was set */
	if (getppid() != guard)
		exit(0);
	for (;;) {
		statfs(point, &fs);	/* an error is an answer */
		if (write(ends[1], "", 1) < 0 && errno != EAGAIN)
			exit(0);
		nanosleep(&pause, NULL);
	}
}

static int has_answered(void)
{
	char bytes[64];
	int some = 0;

	while (read(answers, bytes, sizeof bytes) > 0)
		some = 1;
	return some;
}

/* Returns true if the daemon died, false if no answer came in time. */
static int watch(const sigset_t *told, const char *point, int seconds)
{
	struct timespec patience = {seconds, 0};
	int number;

	if (seconds <= 0) {
		sigwait(told, &number);
		return 1;
	}
	ask(point, seconds);
	for (;;) {
		if (sigtimedwait(told, NULL, &patience) >= 0)
			return 1;
		if (errno != EAGAIN || has_answered())
			continue;
		if (asker > 0 && waitpid(asker, NULL, WNOHANG) == 0)
			return 0;
		close(answers);		/* only the asking child is gone */
		ask(point, seconds);
	}
}

static void abort_connection(const char *point, const char *file)
{
	/* fails with EBUSY if something is mounted or open in it; the abort comes first */
	if (umount2(point, MNT_FORCE | UMOUNT_NOFOLLOW) == 0 || errno != EPERM)
		return;
	if (write_file(AT_FDCWD, file, "1") == 0)
		return;
	if (fork() == 0) {
		execlp("fusermount3", "fusermount3", "-u", "-z", "--", point, (char *)NULL);
		_exit(1);
	}
}

int main(int argc, char **argv)
{
	struct timespec tell = {TELL_SECONDS, 0}, notice = {NOTICE_SECONDS, 0};
	struct orders orders = orders_of_arguments(argc, argv);
	const char *point = take_word(&orders);
	pid_t daemon = (pid_t)take_number(&orders, INT_MAX);
	const char *file = take_word(&orders);
	int seconds = (int)take_number(&orders, INT_MAX);
	sigset_t told;

	if (!all_taken(&orders))
		return 2;
	sigemptyset(&told);
	sigaddset(&told, SIGUSR1);
	sigprocmask(SIG_BLOCK, &told, NULL);
	stand_beside("ctx-guard");
	prctl(PR_SET_PDEATHSIG, SIGUSR1);
	/* the daemon may have died before the signal was set */
	if (getppid() != daemon || watch(&told, point, seconds)) {
		abort_connection(point, file);
		return 0;
	}
	if (write(STDOUT_FILENO, "", 1) != 1)
		errno = 0;	/* without a reader, continue */
	sigtimedwait(&told, NULL, &tell);
	abort_connection(point, file);
	if (sigtimedwait(&told, NULL, &notice) < 0 && getppid() == daemon)
		kill(daemon, SIGKILL);
	return 0;
}
