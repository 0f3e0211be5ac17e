/*
 * guard: frees everybody who waits for the filesystem when the daemon dies, or
 * answers nobody any more.
 *
 *     guard MOUNT_POINT PID ABORT SECONDS
 *
 * The kernel ends a FUSE connection when its last descriptor is closed. A
 * thread of a killed daemon can be inside a notification to the kernel just
 * then, waiting for a lock that a request holds which nobody will answer any
 * more: the thread never ends, the descriptor is never closed, the mount hangs
 * for everybody. A forced umount(2) aborts the connection and breaks the knot.
 * Where that is not allowed, ABORT does the same: the file of the connection in
 * fusectl, which belongs to whoever mounted it. Without either (fusectl is not
 * mounted) what is left is to take the mount away, for those who come later.
 *
 * PID is the daemon's main thread, whose death is told by a signal
 * (PR_SET_PDEATHSIG), because pidfds and sockets wait for its other threads.
 *
 * A process of the guard's own asks the filesystem again and again, since nobody
 * can be saved who waits for an answer himself. When no answer came within so
 * many SECONDS (0: it is not asked) the guard writes a byte to standard output
 * and sends SIGRTMIN, so that the daemon says what waits for what, and aborts the
 * connection. A daemon that still runs mounts anew; one that does not notice is
 * killed, for whoever supervises it to start it again.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* to say what waits for what; to notice that the connection is gone */
#define TELL_SECONDS 1
#define NOTICE_SECONDS 5

static pid_t asker;
static int answers;

/* Writes a byte for each answer, until it is killed: where it hangs, once the abort frees it. */
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
	/* it may have ended before its end was to be told */
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

/* Whether the daemon has died (else no answer came in time). */
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
		close(answers);		/* it is the asker that is gone */
		ask(point, seconds);
	}
}

static void abort_connection(const char *point, const char *file)
{
	int connection;

	/* fails with EBUSY where something is mounted or open; the abort comes first */
	if (umount2(point, MNT_FORCE | UMOUNT_NOFOLLOW) == 0 || errno != EPERM)
		return;
	connection = open(file, O_WRONLY | O_CLOEXEC);
	if (connection >= 0 && write(connection, "1", 1) == 1)
		return;
	if (fork() == 0) {
		execlp("fusermount3", "fusermount3", "-u", "-z", "--", point, (char *)NULL);
		_exit(1);
	}
}

int main(int argc, char **argv)
{
	struct timespec tell = {TELL_SECONDS, 0}, notice = {NOTICE_SECONDS, 0};
	sigset_t told;
	pid_t daemon;

	if (argc != 5)
		return 2;
	daemon = atoi(argv[2]);
	sigemptyset(&told);
	sigaddset(&told, SIGUSR1);
	sigprocmask(SIG_BLOCK, &told, NULL);
	prctl(PR_SET_NAME, "ctx-guard");
	setsid();	/* a terminal's Ctrl-C is the daemon's to take */
	prctl(PR_SET_PDEATHSIG, SIGUSR1);
	/* it may have died before it was watched */
	if (getppid() != daemon || watch(&told, argv[1], atoi(argv[4]))) {
		abort_connection(argv[1], argv[3]);
		return 0;
	}
	if (write(STDOUT_FILENO, "", 1) != 1)
		errno = 0;	/* nobody is there to say anything */
	kill(daemon, SIGRTMIN);
	sigtimedwait(&told, NULL, &tell);
	abort_connection(argv[1], argv[3]);
	if (sigtimedwait(&told, NULL, &notice) < 0 && getppid() == daemon)
		kill(daemon, SIGKILL);
	return 0;
}
