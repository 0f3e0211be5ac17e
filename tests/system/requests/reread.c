/*
 * reread: what an open descriptor goes on showing.
 *
 *     reread FILE
 *
 * Opens FILE once, and prints what is read at its beginning whenever that is
 * something else than before: the first line, or the errno's name.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	char before[256] = "", now[256];
	ssize_t length;
	int fd;

	if (argc != 2 || (fd = open(argv[1], O_RDONLY)) < 0)
		return 2;
	for (;;) {
		length = pread(fd, now, sizeof now - 1, 0);
		if (length < 0)
			snprintf(now, sizeof now, "%s", strerrorname_np(errno));
		else
			now[strcspn(now, "\n")] = 0;
		if (strcmp(before, now)) {
			puts(now);
			fflush(stdout);
			strcpy(before, now);
		}
		usleep(10000);
	}
}
