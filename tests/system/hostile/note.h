/* Notes with what rights something of an agent's view was run. */
#ifndef NOTE_H
#define NOTE_H

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* One line in /log/ran, or in /desk/ran: NAME, then the lines of /proc/self/status. */
static void note_rights(const char *name)
{
	static const char *const wanted[] = {"Uid:", "Gid:", "CapPrm:", "CapEff:", "NoNewPrivs:"};
	char text[4096] = "", line[512];
	int fd = open("/proc/self/status", O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
	size_t used;

	if (fd >= 0)
		close(fd);
	text[n > 0 ? n : 0] = 0;
	used = (size_t)snprintf(line, sizeof line, "%s", name);
	/* Without /proc, which only something outside of a cell would lack: by system call. */
	used += (size_t)snprintf(line + used, sizeof line - used, " euid:%u", geteuid());
	for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
		char word[64] = "", *found = strstr(text, wanted[i]);

		if (found)
			sscanf(found + strlen(wanted[i]), "%63s", word);
		used += (size_t)snprintf(line + used, sizeof line - used, " %s%s", wanted[i], word);
	}
	line[used++] = '\n';
	fd = open("/log/ran", O_WRONLY | O_APPEND | O_CLOEXEC);
	if (fd < 0)
		fd = open("/desk/ran", O_WRONLY | O_APPEND | O_CLOEXEC);
	if (fd >= 0) {
		(void)!write(fd, line, used);
		close(fd);
	}
}

#endif
