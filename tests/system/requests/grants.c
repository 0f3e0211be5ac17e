/*
 * grants: what the kernel grants on files, without asking whose they are.
 *
 *     grants hold|tell FILE...
 *
 * For each file one line: its path, and what came of a lease for reading, one
 * for writing, a mapping shared and one private, a lock. "hold" keeps all of
 * it, and heeds no signal that asks for a lease back.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

static const char *outcome(int failed)
{
	return failed ? strerrorname_np(errno) : "ok";
}

int main(int argc, char **argv)
{
	struct flock whole = {.l_type = F_RDLCK, .l_whence = SEEK_SET};

	signal(SIGIO, SIG_IGN);
	for (int i = 2; i < argc; i++) {
		int fd = open(argv[i], O_RDONLY);

		if (fd < 0) {
			printf("%s %s\n", argv[i], strerrorname_np(errno));
			continue;
		}
		printf("%s", argv[i]);
		printf(" %s", outcome(fcntl(fd, F_SETLEASE, F_RDLCK)));
		printf(" %s", outcome(fcntl(fd, F_SETLEASE, F_WRLCK)));
		printf(" %s", outcome(mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED));
		printf(" %s", outcome(mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, fd, 0) == MAP_FAILED));
		printf(" %s\n", outcome(flock(fd, LOCK_EX) || fcntl(fd, F_SETLK, &whole)));
	}
	fflush(stdout);
	if (!strcmp(argv[1], "hold"))
		for (;;)
			pause();
	return 0;
}
