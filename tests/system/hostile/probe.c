/*
 * probe: what a bystander sees of others' attacks.
 *
 *     probe CTX NAME LOG
 *
 * Makes two agents, NAME-a and NAME-b, and then, until it is killed: reads the status of
 * NAME-a, writes its meta.json, and stops NAME-b and starts it again. Appends to LOG, for each
 * request, "KIND BEGAN TOOK ERROR": nanoseconds of CLOCK_MONOTONIC, and an errno's name or "ok".
 * "stop" is the write to ctl, "end" how long after it the agent was dead.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define PACE_MS 20
#define STOP_PACE_MS 100
#define BUSY_MS 60000

static int out;

static long long now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void note(const char *kind, long long began, long result, int error)
{
	const char *said = result >= 0 ? "ok" : strerrorname_np(error);
	char line[128];
	int n = snprintf(line, sizeof line, "%s %lld %lld %s\n", kind, began, now() - began,
			 said ? said : "unknown");

	(void)!write(out, line, (size_t)n);
}

static int read_file(const char *path, char *text, size_t size)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC), error;
	ssize_t n;

	if (fd < 0)
		return -1;
	n = read(fd, text, size - 1);
	error = errno;
	close(fd);
	errno = error;
	text[n < 0 ? 0 : n] = 0;
	return n < 0 ? -1 : 0;
}

static int write_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_TRUNC | O_CLOEXEC), error;

	if (fd < 0)
		return -1;
	if (write(fd, text, strlen(text)) < 0) {
		error = errno;
		close(fd);
		errno = error;
		return -1;
	}
	return close(fd);
}

/* A path below the agent's directory; in one of two buffers. */
static const char *in(const char *root, const char *name, char which, const char *file)
{
	static char paths[2][512];
	static int turn;

	turn = !turn;
	snprintf(paths[turn], sizeof *paths, "%s/agent/%s-%c.d%s%s", root, name, which,
		 *file ? "/" : "", file);
	return paths[turn];
}

static void make(const char *root, const char *name, char which)
{
	if (mkdir(in(root, name, which, ""), 0755) ||
	    write_file(in(root, name, which, "exec"), "sleep 100000\n")) {
		note("make", now(), -1, errno);
		exit(1);
	}
}

static void files(const char *root, const char *name)
{
	char text[64];

	make(root, name, 'a');
	for (unsigned round = 0;; round++) {
		long long began = now();
		long result = read_file(in(root, name, 'a', "status"), text, sizeof text);

		note("read", began, result, errno);
		snprintf(text, sizeof text, "{\"round\":%u}\n", round);
		began = now();
		result = write_file(in(root, name, 'a', "meta.json"), text);
		note("write", began, result, errno);
		usleep(PACE_MS * 1000);
	}
}

/* True once the status is this one. */
static int becomes(int fd, const char *wanted)
{
	struct pollfd waited = {.fd = fd, .events = POLLPRI};
	long long until = now() + BUSY_MS * 1000000LL;
	char text[64] = "";

	while (now() < until) {
		ssize_t n = pread(fd, text, sizeof text - 1, 0);

		text[n < 0 ? 0 : n] = 0;
		if (!strncmp(text, wanted, strlen(wanted)))
			return 1;
		poll(&waited, 1, 100);
	}
	return 0;
}

static void stops(const char *root, const char *name)
{
	int status;

	make(root, name, 'b');
	status = open(in(root, name, 'b', "status"), O_RDONLY | O_CLOEXEC);
	if (status < 0) {
		note("open", now(), -1, errno);
		exit(1);
	}
	for (;;) {
		long long began = now();
		long result = write_file(in(root, name, 'b', "ctl"), "start\n");

		note("start", began, result, errno);
		began = now();
		result = becomes(status, "busy") - 1;
		note("busy", began, result, ETIMEDOUT);
		if (!result) {
			began = now();
			result = write_file(in(root, name, 'b', "ctl"), "stop\n");
			note("stop", began, result, errno);
			result = becomes(status, "dead") - 1;
			note("end", began, result, ETIMEDOUT);
		}
		began = now();
		result = write_file(in(root, name, 'b', "ctl"), "reset\n");
		note("reset", began, result, errno);
		close(status);
		status = open(in(root, name, 'b', "status"), O_RDONLY | O_CLOEXEC);
		usleep(STOP_PACE_MS * 1000);
	}
}

int main(int argc, char **argv)
{
	if (argc != 4) {
		fprintf(stderr, "usage: probe CTX NAME LOG\n");
		return 2;
	}
	out = open(argv[3], O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
	if (out < 0) {
		perror(argv[3]);
		return 1;
	}
	if (fork() == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		stops(argv[1], argv[2]);
	}
	files(argv[1], argv[2]);
}
