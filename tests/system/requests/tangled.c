/* A process that holds the lock of its own memory while it waits for pages of a file.
 *
 *   tangled PATH OTHERS
 *
 * One thread reads the file, which it maps, through /proc/self/mem: the kernel waits for each page
 * with the lock. Another one maps and unmaps: it waits for the lock, and who wants to look at the
 * memory waits behind it. OTHERS processes, which sleep, are listed before it in its cgroup.
 */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define STEP (1 << 20)	/* more than is read ahead */

static void *map(void *unused)
{
	(void)unused;
	for (;;) {
		void *page = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (page != MAP_FAILED)
			munmap(page, 4096);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	struct stat found;
	pthread_t mapper;
	char byte;

	if (argc != 3)
		errx(2, "usage: tangled PATH OTHERS");
	for (int left = atoi(argv[2]); left > 0; left--)
		if (fork() == 0)
			pause();
	if (fork() != 0)
		pause();
	int fd = open(argv[1], O_RDONLY), mem = open("/proc/self/mem", O_RDONLY);
	if (fd < 0 || mem < 0 || fstat(fd, &found) < 0)
		err(1, "%s", argv[1]);
	char *file = mmap(NULL, (size_t)found.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
	if (file == MAP_FAILED)
		err(1, "mmap");
	if (pthread_create(&mapper, NULL, map, NULL))
		errx(1, "pthread_create");
	puts("tangled");
	fflush(stdout);
	for (off_t at = 0; at < found.st_size; at += STEP)
		if (pread(mem, &byte, 1, (off_t)(file + at)) != 1)
			err(1, "/proc/self/mem");
	puts("read");
	fflush(stdout);
	pause();
}
