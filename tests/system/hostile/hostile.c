/*
 * hostile: tries one forbidden thing, and says what came of it.
 *
 *     hostile NAME WAY ARGUMENT...
 *
 * Prints "?", NAME before it tries and "=", NAME, RESULT after, with TABs between
 * them, so that a reader can tell what was refused from what was never tried. Each attempt is made by
 * a process of its own: one that is killed is told as "killed:SIGNAL".
 *
 * Called as something that makes cells is, it notes with what rights it was run,
 * and is then what it is called; or what a file /log/forge asks for (forge).
 */
#include "hostile.h"
#include "note.h"

#include <dirent.h>
#include <stdarg.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define SECONDS 30

char inherited[256];
static char result[8192];
static size_t length;

void tell(const char *format, ...)
{
	va_list args;
	int n;

	va_start(args, format);
	n = vsnprintf(result + length, sizeof result - length, format, args);
	va_end(args);
	if (n > 0)
		length += (size_t)n;
	if (length >= sizeof result)
		length = sizeof result - 1;
}

const char *error_name(int error)
{
	const char *name = strerrorname_np(error);

	return name ? name : "unknown";
}

long tell_result(long value)
{
	int error = errno;

	if (value < 0)
		tell("%s", error_name(error));
	else
		tell("ok");
	errno = error;
	return value;
}

long tell_step(const char *what, long value)
{
	int error = errno;

	tell("%s%s=", length ? " " : "", what);
	errno = error;
	return tell_result(value);
}

int put(const char *path, int flags, const char *text)
{
	int fd = open(path, flags | O_WRONLY | O_CLOEXEC, 0666), error;
	ssize_t n;

	if (fd < 0)
		return -1;
	for (size_t left = strlen(text); left; left -= (size_t)n, text += n) {
		n = write(fd, text, left);
		if (n <= 0) {
			error = n < 0 ? errno : EIO;
			close(fd);
			errno = error;
			return -1;
		}
	}
	return close(fd);
}

void run(int argc, char **argv)
{
	const struct way *all[] = {FILE_WAYS, PROCESS_WAYS, NAMESPACE_WAYS, SOCKET_WAYS,
				   AGENT_WAYS, FLOOD_WAYS, CALL_WAYS};

	for (size_t i = 0; argc && i < sizeof all / sizeof *all; i++) {
		for (const struct way *way = all[i]; way->name; way++) {
			if (strcmp(way->name, argv[0]))
				continue;
			if (argc - 1 < way->least)
				tell("usage:%s", way->name);
			else
				way->run(argc - 1, argv + 1);
			return;
		}
	}
	tell("unknown:%s", argc ? argv[0] : "");
}

/* In one write(2), so that lines of agents that share a pipe stay whole. */
static void say(const char *mark, const char *name, const char *text)
{
	static char line[sizeof result + 512];
	int n = snprintf(line, sizeof line, "%s\t%s\t%s\n", mark, name, text);

	(void)!write(1, line, (size_t)n);
}

static void find_inherited(void)
{
	DIR *fds = opendir("/proc/self/fd");
	struct dirent *entry;

	while (fds && (entry = readdir(fds))) {
		size_t used = strlen(inherited);

		if (entry->d_name[0] != '.' && atoi(entry->d_name) != dirfd(fds))
			snprintf(inherited + used, sizeof inherited - used, "%.9s,", entry->d_name);
	}
	if (fds)
		closedir(fds);
}

/*
 * In place of a helper that makes a child's cell: tells the runtime of an end
 * of a program that never began, and goes on.
 */
static void forge(void)
{
	static const char *const claims[] = {"hello", "start", "exit 0\nend 1"};
	char what[32] = "";
	int fd = open("/log/forge", O_RDONLY | O_CLOEXEC);

	if (fd < 0 || read(fd, what, sizeof what - 1) <= 0)
		return;
	close(fd);
	for (size_t i = 0; i < sizeof claims / sizeof *claims; i++)
		(void)!send(3, claims[i], strlen(claims[i]), MSG_NOSIGNAL);
	if (fork() == 0) {
		setsid();
		prctl(PR_SET_NAME, "claimed-dead");
		signal(SIGTERM, SIG_IGN);
		for (;;)
			pause();
	}
	exit(0);
}

static void pretend(const char *name, char **argv)
{
	char path[64];

	note_rights(name);
	forge();
	snprintf(path, sizeof path, "/host/bin/%.20s", name);
	execv(path, argv);
	perror(path);
	exit(127);
}

int main(int argc, char **argv)
{
	static const char *const helpers[] = {"bwrap", "setpriv", "test", "enter", "view", "keeper"};
	const char *name = strrchr(argv[0], '/');
	int ends[2], status = 0;
	ssize_t n;
	pid_t child;

	name = name ? name + 1 : argv[0];
	for (size_t i = 0; i < sizeof helpers / sizeof *helpers; i++)
		if (!strcmp(name, helpers[i]))
			pretend(name, argv);
	find_inherited();
	if (argc < 3) {
		fputs("usage: hostile NAME WAY ARGUMENT...\n", stderr);
		return 2;
	}
	say("?", argv[1], "");
	if (pipe2(ends, O_CLOEXEC) < 0 || (child = fork()) < 0) {
		perror("hostile");
		return 1;
	}
	if (child == 0) {
		alarm(SECONDS);
		signal(SIGPIPE, SIG_IGN);	/* EPIPE tells as much */
		run(argc - 2, argv + 2);
		(void)!write(ends[1], result, length);
		_exit(0);
	}
	close(ends[1]);
	signal(SIGTERM, SIG_IGN);	/* what was tried is still to be told */
	while (waitpid(child, &status, 0) < 0 && errno == EINTR)
		;
	/* what it left running may have the other end open still */
	fcntl(ends[0], F_SETFL, O_NONBLOCK);
	n = read(ends[0], result, sizeof result - 32);
	length = n > 0 ? (size_t)n : 0;
	if (WIFSIGNALED(status))
		tell("killed:%s", sigabbrev_np(WTERMSIG(status)));
	result[length] = 0;
	for (size_t i = 0; i < length; i++)
		if (result[i] == '\n')
			result[i] = '|';
	say("=", argv[1], result);
	return 0;
}
