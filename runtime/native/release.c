/*
 * release: lets go whoever waits at the FIFOs in a directory, and removes them.
 *
 *     release DIRECTORY KEPT_MS
 *
 * The kernel blocks a process that opens a FIFO for reading until somebody opens it for writing.
 * The daemon does not do that: others have the FIFO open. It gives a FIFO whose end has come a
 * name in DIRECTORY. This program opens it again and again for KEPT_MS, because a reader may
 * have looked up the earlier name and open it late. It obeys what comes meanwhile at once, and
 * ends when the directory is empty, or after LIFE_MS: then it is started again.
 *
 * Nobody may write to the FIFOs, or any stranger would release them. For an ordinary user, whose
 * modes count for the daemon too, it does so in a user namespace of its own.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <poll.h>
#include <sys/inotify.h>

#include "common.h"
#include "orders.h"
#include "ordinary.h"

#define AGAIN_MS 100
#define LIFE_MS 10000

static void nudge(int directory, const char *name)
{
	/* ENXIO: nobody reads */
	close_quietly(openat(directory, name, O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW));
}

/* Nudges all, and removes those that have been there long enough; returns the number left. */
static size_t pass(DIR *listing, long long kept_ms)
{
	int directory = dirfd(listing);
	struct dirent *entry;
	size_t left = 0;

	rewinddir(listing);
	while ((entry = readdir(listing))) {
		struct timespec now;
		struct stat found;
		long long age;

		if (entry->d_name[0] == '.' ||
		    fstatat(directory, entry->d_name, &found, AT_SYMLINK_NOFOLLOW) < 0)
			continue;
		nudge(directory, entry->d_name);
		clock_gettime(CLOCK_REALTIME_COARSE, &now);	/* as the kernel notes changes */
		age = (now.tv_sec - found.st_ctim.tv_sec) * 1000LL +
		      (now.tv_nsec - found.st_ctim.tv_nsec) / 1000000;
		/* the name was its last change; before it only if the clock was set */
		if (age >= kept_ms || age < 0)
			unlinkat(directory, entry->d_name, 0);
		else
			left++;
	}
	return left;
}

/* Nudges what has come until a time; returns early only on an error. */
static void obey(int told, int directory, long long until)
{
	_Alignas(struct inotify_event) char data[4096];
	struct pollfd ready = {.fd = told, .events = POLLIN};
	long long left;

	while ((left = until - now_ms()) > 0 && poll(&ready, 1, (int)left) > 0) {
		ssize_t n = read(told, data, sizeof data);

		if (n <= 0)
			return;
		for (ssize_t at = 0; at < n;) {
			const struct inotify_event *event = (const void *)(data + at);

			nudge(directory, event->len ? event->name : ".");
			at += (ssize_t)(sizeof *event + event->len);
		}
	}
}

int main(int argc, char **argv)
{
	struct orders orders = orders_of_arguments(argc, argv);
	const char *directory = take_word(&orders);
	long long kept_ms = (long long)take_number(&orders, INT_MAX), end = now_ms() + LIFE_MS;
	DIR *listing;
	int told;

	if (!all_taken(&orders))
		die("usage: release DIRECTORY KEPT_MS");
	if (geteuid())
		enter_user_namespace();
	listing = opendir(directory);
	told = inotify_init1(IN_CLOEXEC);
	if (!listing || told < 0 || inotify_add_watch(told, directory, IN_CREATE | IN_MOVED_TO) < 0)
		die("%s: %m", directory);
	while (pass(listing, kept_ms) && now_ms() < end)
		obey(told, dirfd(listing), now_ms() + AGAIN_MS);
	return 0;
}
