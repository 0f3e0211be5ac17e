/*
 * guard: frees all processes that wait for the filesystem when the daemon dies or
 * stops answering.
 *
 *     guard MOUNT_POINT PID ABORT SECONDS CGROUP
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
 * guard writes an empty line to standard output, so that a thread of the daemon logs what
 * waits for what, and then aborts the connection. A daemon that still runs
 * mounts again. The guard kills a daemon that does not notice, so that its service
 * manager restarts it.
 *
 * Another child asks for a name in "agent" that is not there, which takes the lock of the
 * directory. Whoever may list a directory, of any filesystem, can hold its lock: by
 * listing it into a page that never comes. The daemon can do nothing about it, and a
 * new one could not either. So the guard has a line for each such process logged.
 *
 * A child that waits for such a lock cannot be killed. So the children are in CGROUP: nobody
 * waits for them who waits for the end of all in the daemon's own.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/statfs.h>

#include "common.h"
#include "orders.h"

/* Some C libraries have a struct statx as well, and others have none. */
#define statx kernel_statx
#define statx_timestamp kernel_statx_timestamp
#include <linux/stat.h>
#undef statx
#undef statx_timestamp

/* time to log what waits for what; to notice that the connection is gone */
#define TELL_SECONDS 1
#define NOTICE_SECONDS 5

/* how often at most, how long, and of how many it is told who holds the lock */
#define HELD_MS (60 * 1000)
#define LOOK_SECONDS 10
#define HOLDERS_MAX 8

struct asker {
	char path[4096];
	pid_t pid;
	int answers;
};

/* A child that ends with its parent; 0 in it. */
static pid_t fork_helper(void)
{
	/* the directory that it is in is CGROUP: to open that by a path would take locks */
	pid_t guard = getpid(), pid = fork_into(".", 0, SIGCHLD);

	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		/* the parent may have ended before the signal was set */
		if (getppid() != guard)
			exit(0);
	}
	return pid;
}

/* Writes a byte for each answer, until killed; if it hangs, it dies when the abort frees it. */
static void ask(struct asker *asker, int seconds)
{
	struct timespec pause = {seconds / 4, seconds % 4 * 250000000L};
	struct statfs fs;
	int ends[2];

	if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0)
		exit(1);
	asker->answers = ends[0];
	asker->pid = fork_helper();
	if (asker->pid != 0) {
		close(ends[1]);
		return;
	}
	close(STDOUT_FILENO);	/* whose end the daemon waits for */
	for (;;) {
		statfs(asker->path, &fs);	/* an error is an answer */
		if (write(ends[1], "", 1) < 0 && errno != EAGAIN)
			exit(0);
		nanosleep(&pause, NULL);
	}
}

/* Whether it has answered since this was asked for, or could not: only the child is gone then. */
static bool has_answered(struct asker *asker, int seconds)
{
	char bytes[64];
	bool some = false;

	while (read(asker->answers, bytes, sizeof bytes) > 0)
		some = true;
	if (some || (asker->pid > 0 && waitpid(asker->pid, NULL, WNOHANG) == 0))
		return some;
	close(asker->answers);
	ask(asker, seconds);
	return true;
}

/* From what the kernel knows: no daemon is asked for anything, this one or another. */
static int identify(const char *path, struct kernel_statx *told)
{
	return (int)syscall(SYS_statx, AT_FDCWD, path, AT_STATX_DONT_SYNC, STATX_INO | STATX_UID,
			    told);
}

/* Whether a thread lists this directory, and does not wait for the lock itself. */
static bool holds(const char *task, const struct kernel_statx *directory)
{
	char path[128], text[4096] = "";
	struct kernel_statx listed;
	long call = -1;
	unsigned fd = 0;
	FILE *file;

	snprintf(path, sizeof path, "%s/syscall", task);
	file = fopen(path, "re");
	if (file && fscanf(file, "%ld %x", &call, &fd) != 2)
		call = -1;
	if (file)
		fclose(file);
	if (call != SYS_getdents64)
		return false;
	snprintf(path, sizeof path, "%s/fd/%u", task, fd);
	if (identify(path, &listed) != 0 ||
	    listed.stx_dev_major != directory->stx_dev_major ||
	    listed.stx_dev_minor != directory->stx_dev_minor ||
	    listed.stx_ino != directory->stx_ino)
		return false;
	snprintf(path, sizeof path, "%s/stack", task);
	file = fopen(path, "re");	/* root alone may */
	if (file && fread(text, 1, sizeof text - 1, file) > 0 && strstr(text, "rwsem"))
		call = -1;
	if (file)
		fclose(file);
	return call == SYS_getdents64;
}

/* Tells of each process that holds the lock of a directory, by a child: procfs may wait, too. */
__attribute__((noreturn)) static void tell_holders(const char *path)
{
	struct kernel_statx directory, process;
	char task[64], name[32];
	struct dirent *of, *thread;
	int found = 0;
	DIR *all, *threads;
	FILE *file;

	alarm(LOOK_SECONDS);
	all = opendir("/proc");
	if (!all || identify(path, &directory) != 0)
		exit(1);
	while (found < HOLDERS_MAX && (of = readdir(all))) {
		snprintf(task, sizeof task, "/proc/%.16s/task", of->d_name);
		threads = isdigit(of->d_name[0]) ? opendir(task) : NULL;
		while (threads && (thread = readdir(threads))) {
			snprintf(task, sizeof task, "/proc/%.16s/task/%.16s", of->d_name,
				 thread->d_name);
			if (!isdigit(thread->d_name[0]) || !holds(task, &directory) ||
			    identify(task, &process) != 0)
				continue;
			strncat(task, "/comm", sizeof task - strlen(task) - 1);
			file = fopen(task, "re");
			if (!file || !fgets(name, sizeof name, file))
				*name = 0;
			dprintf(STDOUT_FILENO, "%.16s, uid %u, %s\n", of->d_name,
				process.stx_uid, strtok(name, "\n") ? name : "?");
			found++;
			break;
		}
		if (threads)
			closedir(threads);
	}
	if (!found)
		dprintf(STDOUT_FILENO, "unknown\n");
	exit(0);
}

/* Returns true if the daemon died, false if no answer came in time. */
static int watch(const sigset_t *told, const char *point, int seconds)
{
	struct timespec patience = {seconds, 0};
	struct asker mount, names;
	char directory[4096];
	long long last = -HELD_MS;
	pid_t looker = 0;
	int number;

	if (seconds <= 0) {
		sigwait(told, &number);
		return 1;
	}
	snprintf(directory, sizeof directory, "%s/agent", point);
	snprintf(mount.path, sizeof mount.path, "%s", point);
	/* no name of an agent begins so */
	snprintf(names.path, sizeof names.path, "%s/agent/.guard", point);
	ask(&mount, seconds);
	ask(&names, seconds);
	for (;;) {
		if (sigtimedwait(told, NULL, &patience) >= 0)
			return 1;
		if (errno != EAGAIN)
			continue;
		if (!has_answered(&mount, seconds))
			return 0;
		if (looker > 0 && waitpid(looker, NULL, WNOHANG) != 0)
			looker = 0;
		if (!has_answered(&names, seconds) && !looker && now_ms() - last >= HELD_MS) {
			last = now_ms();
			looker = fork_helper();
			if (looker == 0)
				tell_holders(directory);
		}
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
	const char *cgroup = take_word(&orders);
	sigset_t told;

	if (!all_taken(&orders))
		return 2;
	if (chdir(cgroup) < 0)
		die("%s: %m", cgroup);
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
	if (write(STDOUT_FILENO, "\n", 1) != 1)
		errno = 0;	/* without a reader, continue */
	sigtimedwait(&told, NULL, &tell);
	abort_connection(point, file);
	if (sigtimedwait(&told, NULL, &notice) < 0 && getppid() == daemon)
		kill(daemon, SIGKILL);
	return 0;
}
