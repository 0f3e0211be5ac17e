/* What the hostile programs have in common; see hostile.c. */
#ifndef HOSTILE_H
#define HOSTILE_H

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* One way to try something. LEAST is how many arguments it needs. */
struct way {
	const char *name;
	int least;
	void (*run)(int argc, char **argv);
};

extern const struct way FILE_WAYS[], PROCESS_WAYS[], NAMESPACE_WAYS[], SOCKET_WAYS[],
	AGENT_WAYS[], FLOOD_WAYS[], CALL_WAYS[];

/* Adds to the one line of the result, without blanks in between. */
void tell(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Tells "ok" for a result that is not negative, else the name of the errno. */
long tell_result(long result);

/* The same after "WHAT=", with a blank before it if something was told already. */
long tell_step(const char *what, long result);

/* Runs the way that argv[0] names: some ways only change who or where they run. */
void run(int argc, char **argv);

const char *error_name(int error);

/* The descriptors that this program was started with, as it found them. */
extern char inherited[256];

/* A connection to a socket on the filesystem, -1 and errno. */
int connect_to(const char *path);

/* Listens at an abstract address and at a port of 127.0.0.1, and answers nobody. */
void listen_everywhere(const char *name, const char *port);

/* Writes all of a text with one open, write and close; -1 and errno of what failed first. */
int put(const char *path, int flags, const char *text);

#endif
