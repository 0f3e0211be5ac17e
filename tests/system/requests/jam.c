/*
 * jam: many requests at once, and how long the slowest of each kind took.
 *
 *     jam SECONDS WRITERS LOOKUPS MAKERS CONTROL TEXT DIRECTORY PREFIX
 *
 * WRITERS threads open CONTROL, write TEXT and a newline, and close it; a "#" in
 * it is the number of the thread, and its directory is made first; LOOKUPS ask for
 * names in DIRECTORY; MAKERS make and remove directories in it, whose names
 * begin with PREFIX. After so many seconds one line is printed for each kind:
 * its name, how many requests were made, the longest in microseconds. With 0
 * seconds it never ends.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { WRITE, LOOKUP, MAKE, KINDS };

static const char *names[KINDS] = {"write", "lookup", "make"};
static const char *control, *text, *directory, *prefix;
static atomic_long longest[KINDS], made[KINDS];
static atomic_bool over;
static atomic_int number;

static long now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000L + t.tv_nsec / 1000;
}

static void note(int kind, long begun)
{
	long took = now() - begun, before = atomic_load(&longest[kind]);

	while (took > before && !atomic_compare_exchange_weak(&longest[kind], &before, took))
		;
	atomic_fetch_add(&made[kind], 1);
}

static void own_control(char *path, size_t size, int own)
{
	const char *mark = strchr(control, '#');
	char *end;

	if (!mark) {
		snprintf(path, size, "%s", control);
		return;
	}
	snprintf(path, size, "%.*s%d%s", (int)(mark - control), control, own, mark + 1);
	end = strrchr(path, '/');
	*end = 0;
	mkdir(path, 0755);
	*end = '/';
}

static void *run(void *argument)
{
	int kind = (int)(long)argument, own = atomic_fetch_add(&number, 1), fd;
	char path[4096], written[4096], line[4096];
	size_t length = (size_t)snprintf(line, sizeof line, "%s\n", text);
	struct stat st;
	long begun;

	if (kind == WRITE)
		own_control(written, sizeof written, own);
	for (long i = 0; !atomic_load(&over); i++) {
		if (kind == WRITE) {
			begun = now();
			fd = open(written, O_WRONLY | O_TRUNC);
			note(kind, begun);
			if (fd < 0)
				continue;
			begun = now();
			if (write(fd, line, length) < 0)
				errno = 0;
			note(kind, begun);
			begun = now();
			close(fd);
			note(kind, begun);
		} else if (kind == LOOKUP) {
			snprintf(path, sizeof path, "%s/none-%d-%ld", directory, own, i % 7);
			begun = now();
			stat(path, &st);
			note(kind, begun);
		} else {
			snprintf(path, sizeof path, "%s/%s%d.d", directory, prefix, own);
			begun = now();
			mkdir(path, 0755);
			note(kind, begun);
			begun = now();
			rmdir(path);
			note(kind, begun);
		}
	}
	return NULL;
}

int main(int argc, char **argv)
{
	pthread_attr_t small;
	pthread_t thread;

	if (argc != 9)
		return 2;
	control = argv[5];
	text = argv[6];
	directory = argv[7];
	prefix = argv[8];
	pthread_attr_init(&small);
	pthread_attr_setstacksize(&small, 65536);
	for (int kind = 0; kind < KINDS; kind++)
		for (int i = 0; i < atoi(argv[2 + kind]); i++)
			if (pthread_create(&thread, &small, run, (void *)(long)kind))
				return 3;
	puts("jammed");
	fflush(stdout);
	if (!atoi(argv[1]))
		for (;;)
			pause();
	sleep((unsigned)atoi(argv[1]));
	atomic_store(&over, true);
	for (int kind = 0; kind < KINDS; kind++)
		printf("%s %ld %ld\n", names[kind], made[kind], longest[kind]);
	fflush(stdout);
	_exit(0);
}
