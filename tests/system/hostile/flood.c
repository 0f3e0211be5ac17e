/* Too much of everything. What is told is the first round; they never stop. */
#include "hostile.h"

#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

/* How often each errno came, in the order in which they first came. */
static struct count {
	int error, times;
} counts[16];

static void count(int error)
{
	for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
		if (!counts[i].times)
			counts[i].error = error;
		if (counts[i].error == error) {
			counts[i].times++;
			return;
		}
	}
}

static void tell_counts(void)
{
	for (size_t i = 0; i < sizeof counts / sizeof *counts && counts[i].times; i++)
		tell("%s%s:%d", i ? " " : "", counts[i].error ? error_name(counts[i].error) : "ok",
		     counts[i].times);
}

/* Goes on in another process; true in that one. */
static bool goes_on(void)
{
	if (fork())
		return false;
	alarm(0);
	usleep(300000);	/* first what was told is printed */
	return true;
}

static void more_files(void)
{
	struct rlimit limit;

	getrlimit(RLIMIT_NOFILE, &limit);
	limit.rlim_cur = limit.rlim_max;
	setrlimit(RLIMIT_NOFILE, &limit);
}

/* PATH COUNT: opens it again and again */
static void do_opens(int argc, char **argv)
{
	(void)argc;
	more_files();
	for (int i = 0; i < atoi(argv[1]); i++)
		count(open(argv[0], O_RDONLY) < 0 ? errno : 0);
	tell_counts();
	if (goes_on())
		for (;;)
			(void)!open(argv[0], O_RDONLY);
}

/* PREFIX COUNT: agents */
static void do_mkdirs(int argc, char **argv)
{
	char path[4096];

	(void)argc;
	for (int i = 0; i < atoi(argv[1]); i++) {
		snprintf(path, sizeof path, "%s%d.d", argv[0], i);
		count(mkdir(path, 0777) < 0 ? errno : 0);
	}
	tell_counts();
	if (goes_on())
		for (int i = 0;; i++) {
			snprintf(path, sizeof path, "%s%d.d", argv[0], i % 5000);
			if (i % 3 == 0)
				rmdir(path);
			else
				mkdir(path, 0777);
		}
}

/* PREFIX COUNT: small files */
static void do_files(int argc, char **argv)
{
	char path[4096];

	(void)argc;
	for (int i = 0; i < atoi(argv[1]); i++) {
		int fd;

		snprintf(path, sizeof path, "%s%d", argv[0], i);
		fd = open(path, O_WRONLY | O_CREAT, 0666);
		count(fd < 0 ? errno : 0);
		close(fd);
	}
	tell_counts();
	if (goes_on())
		for (int i = 0;; i++) {
			snprintf(path, sizeof path, "%s%d", argv[0], i % 1000);
			if (i % 3 == 0)
				unlink(path);
			else
				close(open(path, O_WRONLY | O_CREAT, 0666));
		}
}

/* PATH BYTES: in one file, a piece at a time, to the first error */
static void do_fill(int argc, char **argv)
{
	static char piece[1 << 16];
	int fd = open(argv[0], O_WRONLY | O_CREAT | O_APPEND, 0666);
	long long left = atoll(argv[1]);
	ssize_t n = 0;

	(void)argc;
	while (left > 0 && (n = write(fd, piece, sizeof piece)) > 0)
		left -= n;
	tell_result(n);
	if (goes_on())
		for (;;)
			if (write(fd, piece, sizeof piece) < 0)
				usleep(1000);
}

/* DIRECTORY: keeps files there, each as large as may be, while there is room */
static void do_fill_disk(int argc, char **argv)
{
	static char piece[1 << 16];
	char path[4096];
	int error = 0;

	(void)argc;
	for (int i = 0; error != ENOSPC && i < 1000; i++) {
		int fd;

		snprintf(path, sizeof path, "%s/%d", argv[0], i);
		fd = open(path, O_WRONLY | O_CREAT | O_APPEND, 0666);
		error = fd < 0 ? errno : 0;
		while (fd >= 0 && write(fd, piece, sizeof piece) > 0)
			;
		error = error ? error : errno;
		close(fd);
	}
	tell("%s", error_name(error));
	if (goes_on())
		for (int i = 0;; i++) {
			snprintf(path, sizeof path, "%s/more%d", argv[0], i % 10);
			(void)!put(path, O_CREAT | O_APPEND, "more\n");
		}
}

/* PATH COUNT: values that are written and never finished, each in a file of its own */
static void do_staged(int argc, char **argv)
{
	static char piece[60000];

	(void)argc;
	more_files();
	memset(piece, '#', sizeof piece);
	for (int i = 0; i < atoi(argv[1]); i++) {
		int fd = open(argv[0], O_WRONLY | O_CLOEXEC);

		count(fd < 0 || write(fd, piece, sizeof piece) < 0 ? errno : 0);
	}
	tell_counts();
	if (goes_on())
		for (;;) {
			int fd = open(argv[0], O_WRONLY | O_CLOEXEC);

			(void)!write(fd, piece, sizeof piece);
			close(fd);
		}
}

/* PATH COUNT TEXT: the same line */
static void do_spam(int argc, char **argv)
{
	char line[4096];
	size_t n = (size_t)snprintf(line, sizeof line, "%s\n", argv[2]);
	int fd = open(argv[0], O_WRONLY | O_APPEND | O_CLOEXEC);

	(void)argc;
	for (int i = 0; i < atoi(argv[1]); i++)
		count(write(fd, line, n) < 0 ? errno : 0);
	tell_counts();
	if (goes_on())
		for (;;)
			(void)!write(fd, line, n);
}

/* COUNT: processes, each of which ends at once and is made anew */
static void do_forks(int argc, char **argv)
{
	int left = atoi(argv[0]);

	(void)argc;
	tell("ok");
	if (!goes_on())
		return;
	signal(SIGTERM, SIG_IGN);
	signal(SIGCHLD, SIG_IGN);
	while (left-- > 0 && fork())
		;
	for (;;) {
		if (fork() == 0) {
			setsid();
			_exit(0);
		}
		usleep(2000);
	}
}

/* PATH COUNT: connections, each of which asks once */
static void do_connections(int argc, char **argv)
{
	static const char ping[] = "{\"op\":\"ping\"}\n";
	int pong = 0, refused = 0, failed = 0;

	(void)argc;
	more_files();
	for (int i = 0; i < atoi(argv[1]); i++) {
		char text[1000] = "";
		int fd = connect_to(argv[0]);

		if (fd < 0 || (write(fd, ping, sizeof ping - 1) < 0 && errno != EPIPE) ||
		    read(fd, text, sizeof text - 1) < 0)
			failed++;
		else if (strstr(text, "pong"))
			pong++;
		else if (strstr(text, "EDQUOT"))
			refused++;
		if (!strstr(text, "pong"))
			close(fd);
	}
	tell("pong:%d EDQUOT:%d failed:%d", pong, refused, failed);
	if (goes_on())
		for (;;)
			close(connect_to(argv[0]));
}

/* PATH FRAME: sends, and never reads what is answered */
static void do_deaf(int argc, char **argv)
{
	char line[4096];
	size_t n = (size_t)snprintf(line, sizeof line, "%s\n", argv[1]), sent = 0;
	int fd = connect_to(argv[0]), quiet = 0;

	(void)argc;
	fcntl(fd, F_SETFL, O_NONBLOCK);
	while (sent < (64 << 20) && quiet < 100) {
		ssize_t done = write(fd, line, n);

		quiet = done < 0 ? quiet + 1 : 0;
		sent += done < 0 ? 0 : (size_t)done;
		if (done < 0)
			usleep(1000);
	}
	tell("%s", quiet ? error_name(errno) : "endless");
	if (goes_on())
		for (;;)
			if (write(fd, line, n) < 0)
				usleep(100);
}

/* PATH: messages, to the first error and after */
static void do_flood_history(int argc, char **argv)
{
	static char line[4200];
	int fd = open(argv[0], O_WRONLY | O_APPEND | O_CLOEXEC);
	size_t n;

	(void)argc;
	n = (size_t)snprintf(line, sizeof line, "{\"role\":\"user\",\"content\":\"%4000d\"}\n", 1);
	while (write(fd, line, n) > 0)
		;
	tell_result(-1);
	if (goes_on())
		for (;;)
			if (write(fd, line, n) < 0)
				usleep(1000);
}

/* PREFIX: names that are not there */
static void do_lookups(int argc, char **argv)
{
	char path[4096];
	struct stat st;

	(void)argc;
	for (int i = 0; i < 1000; i++) {
		snprintf(path, sizeof path, "%s%d", argv[0], i);
		count(stat(path, &st) < 0 ? errno : 0);
	}
	tell_counts();
	if (goes_on())
		for (unsigned i = 0;; i++) {
			snprintf(path, sizeof path, "%s%u", argv[0], i);
			(void)!stat(path, &st);
		}
}

/* Standard output, without end. */
static void do_talk(int argc, char **argv)
{
	static char text[4096];

	(void)argc;
	(void)argv;
	memset(text, 'x', sizeof text);
	text[sizeof text - 1] = '\n';
	tell("ok");
	if (goes_on())
		for (;;)
			(void)!write(1, text, sizeof text);
}

const struct way FLOOD_WAYS[] = {
	{"opens", 2, do_opens}, {"mkdirs", 2, do_mkdirs}, {"files", 2, do_files},
	{"fill", 2, do_fill}, {"fill-disk", 1, do_fill_disk}, {"staged", 2, do_staged},
	{"spam", 3, do_spam}, {"forks", 1, do_forks}, {"connections", 2, do_connections},
	{"deaf", 2, do_deaf}, {"lookups", 1, do_lookups},
	{"flood-history", 1, do_flood_history}, {"talk", 0, do_talk}, {NULL, 0, NULL},
};
