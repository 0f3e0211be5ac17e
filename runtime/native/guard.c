/*
 * guard: frees everybody who waits for the filesystem when the daemon dies.
 *
 *     guard MOUNT_POINT PID ABORT
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
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	sigset_t told;
	int number, connection;

	if (argc != 4)
		return 2;
	sigemptyset(&told);
	sigaddset(&told, SIGUSR1);
	sigprocmask(SIG_BLOCK, &told, NULL);
	prctl(PR_SET_NAME, "ctx-guard");
	setsid();	/* a terminal's Ctrl-C is the daemon's to take */
	prctl(PR_SET_PDEATHSIG, SIGUSR1);
	/* it may have died before it was watched */
	if (getppid() == atoi(argv[2]))
		sigwait(&told, &number);
	/* fails with EBUSY where something is mounted or open; the abort comes first */
	if (umount2(argv[1], MNT_FORCE | UMOUNT_NOFOLLOW) == 0 || errno != EPERM)
		return 0;
	connection = open(argv[3], O_WRONLY | O_CLOEXEC);
	if (connection >= 0 && write(connection, "1", 1) == 1)
		return 0;
	execlp("fusermount3", "fusermount3", "-u", "-z", "--", argv[1], (char *)NULL);
	return 1;
}
