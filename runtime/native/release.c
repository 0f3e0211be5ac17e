/*
 * release: lets go whoever waits at the FIFOs in a directory, and removes them.
 *
 *     release DIRECTORY KEPT_MS
 *
 * The kernel blocks a process that opens a FIFO for reading until somebody opens it for writing.
 * The daemon does not do that: others have the FIFO open. It gives a FIFO whose end has come a
 * name in DIRECTORY. This program opens it again and again for KEPT_MS, because a reader may
 * have looked up the earlier name and open it late. The second part of the name says since when,
 * by the clock of now_ms(), which nobody sets. It obeys what comes meanwhile at once, and
 * ends when the directory is empty, or after LIFE_MS: then it is started again.
 *
 * Others can also hold the lock of a FIFO (by a tee(2) that does not end), and an open sleeps for
 * as long, which no signal ends. So a worker opens them. If it sleeps at one for HELD_MS, it is
 * left there, to let the readers go when it can, and the next one goes on with the others. Locks
 * of a file (fcntl(2)), which a worker has until it is gone, tell where one sleeps, also to
 * programs that are started later: nobody sleeps where one does. The name of a FIFO begins with
 * the number of a family, of which SLEEPERS_MAX at most sleep at once: what it has beyond waits
 * for them, and holds up nobody else.
 *
 * Nobody may write to the FIFOs, or any stranger would release them. For an ordinary user, whose
 * modes count for the daemon too, it does so in a user namespace of its own.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/inotify.h>
#include <sys/mman.h>

#include "common.h"
#include "orders.h"
#include "ordinary.h"

#define AGAIN_MS 100
#define LIFE_MS 10000
#define HELD_MS 100
#define SLEEPERS_MAX 16
#define FAMILIES_MAX (1LL << 40)
#define LOCKS ".locks"	/* in the directory: bytes for the sleepers of each family, then for inodes */

struct work {
	const char *directory;
	long long kept_ms, end;
	int locks;
	atomic_uint *steps;	/* odd while the worker opens a FIFO */
};

static bool lock(int locks, short type, off_t at)
{
	struct flock wanted = {.l_type = type, .l_whence = SEEK_SET, .l_start = at, .l_len = 1};

	return fcntl(locks, F_SETLK, &wanted) == 0;
}

/* Where one of a family may sleep; -1 if as many do as may. */
static off_t take_place(int locks, const char *name)
{
	off_t first = (off_t)(strtoull(name, NULL, 10) % FAMILIES_MAX) * SLEEPERS_MAX;

	for (off_t at = first; at < first + SLEEPERS_MAX; at++)
		if (lock(locks, F_WRLCK, at))
			return at;
	return -1;
}

/* False if there is none, or a worker sleeps there, or too many of its family do. */
static bool nudge(const struct work *work, int directory, const char *name, struct stat *found)
{
	off_t at, place;

	if (name[0] == '.' || fstatat(directory, name, found, AT_SYMLINK_NOFOLLOW) < 0)
		return false;
	at = FAMILIES_MAX * SLEEPERS_MAX + (off_t)found->st_ino;
	if (!lock(work->locks, F_WRLCK, at))
		return false;
	place = take_place(work->locks, name);
	if (place < 0) {
		lock(work->locks, F_UNLCK, at);
		return false;
	}
	++*work->steps;
	/* ENXIO: nobody reads */
	close_quietly(openat(directory, name, O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW));
	++*work->steps;
	lock(work->locks, F_UNLCK, place);
	lock(work->locks, F_UNLCK, at);
	return true;
}

/* Nudges all, and removes those that have been there long enough; returns the number left. */
static size_t pass(const struct work *work, DIR *listing)
{
	int directory = dirfd(listing);
	struct dirent *entry;
	size_t left = 0;

	rewinddir(listing);
	while ((entry = readdir(listing))) {
		struct stat found;
		const char *since;
		long long age;

		if (entry->d_name[0] == '.')
			continue;
		left++;
		if (!nudge(work, directory, entry->d_name, &found))
			continue;
		/* an older version gave names without: no use of them is long ago or to come */
		since = strchr(entry->d_name, '.');
		age = now_ms() - (since ? strtoll(since + 1, NULL, 10) : 0);
		if ((age >= work->kept_ms || age < 0) && unlinkat(directory, entry->d_name, 0) == 0)
			left--;
	}
	return left;
}

/* Nudges what has come until a time; returns early only on an error. */
static void obey(const struct work *work, int told, int directory, long long until)
{
	_Alignas(struct inotify_event) char data[4096];
	struct pollfd ready = {.fd = told, .events = POLLIN};
	struct stat found;
	long long left;

	while ((left = until - now_ms()) > 0 && poll(&ready, 1, (int)left) > 0) {
		ssize_t n = read(told, data, sizeof data);

		if (n <= 0)
			return;
		for (ssize_t at = 0; at < n;) {
			const struct inotify_event *event = (const void *)(data + at);

			nudge(work, directory, event->len ? event->name : ".", &found);
			at += (ssize_t)(sizeof *event + event->len);
		}
	}
}

/* What a worker does until it sleeps somewhere. */
static int let_go(const struct work *work)
{
	DIR *listing = opendir(work->directory);
	int told = inotify_init1(IN_CLOEXEC);

	if (!listing || told < 0 ||
	    inotify_add_watch(told, work->directory, IN_CREATE | IN_MOVED_TO) < 0)
		die("%s: %m", work->directory);
	while (pass(work, listing) && now_ms() < work->end)
		obey(work, told, dirfd(listing), now_ms() + AGAIN_MS);
	return 0;
}

/* Has a worker do it; false if that sleeps somewhere. */
static bool is_done(const struct work *work)
{
	pid_t parent = getpid(), worker;
	struct pollfd ended = {.events = POLLIN};
	unsigned before;

	*work->steps = 0;
	worker = fork();
	if (worker == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		exit(getppid() == parent ? let_go(work) : 0);
	}
	ended.fd = worker < 0 ? -1 : (int)syscall(SYS_pidfd_open, worker, 0);
	if (ended.fd < 0)
		die("fork: %m");
	do {
		before = *work->steps;
		if (poll(&ended, 1, HELD_MS)) {
			if (await_child(worker))
				exit(EXIT_FAILED);
			return true;
		}
	} while (*work->steps != before || before % 2 == 0);
	/* its open comes first: that lets the readers go */
	kill(worker, SIGKILL);
	close(ended.fd);
	return false;
}

int main(int argc, char **argv)
{
	struct orders orders = orders_of_arguments(argc, argv);
	struct work work = {.directory = take_word(&orders), .end = now_ms() + LIFE_MS};
	char path[4096];

	work.kept_ms = (long long)take_number(&orders, INT_MAX);
	if (!all_taken(&orders))
		die("usage: release DIRECTORY KEPT_MS");
	if (geteuid())
		enter_user_namespace();
	/* the daemon listens until nobody has it */
	close(STDOUT_FILENO);
	snprintf(path, sizeof path, "%s/" LOCKS, work.directory);
	work.locks = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (work.locks < 0)
		die("%s: %m", path);
	work.steps = mmap(NULL, sizeof *work.steps, PROT_READ | PROT_WRITE,
			  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (work.steps == MAP_FAILED)
		die("mmap: %m");
	while (!is_done(&work) && now_ms() < work.end)
		;
	return 0;
}
