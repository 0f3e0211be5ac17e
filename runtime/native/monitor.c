/*
 * monitor: stays with one run of an agent, outside the agent's cgroup.
 *
 *     monitor RECORD DIRECTORY LOG_MAX LIFELINE MONITORS LEAF UID FDS --
 *             PROGRAM ARGUMENT...
 *
 * MONITORS and LEAF are cgroup directories. The monitor is born in the first,
 * the program in the second (CLONE_INTO_CGROUP of clone3(2)): moving a process
 * there would wait for an RCU grace period, ten milliseconds or more. The
 * process that was started exits as soon as the monitor's pid is recorded.
 *
 * Starts PROGRAM (the steps that lead into the cell, ending in the keeper) in
 * the leaf cgroup, writes its output to DIRECTORY/out/ and DIRECTORY/log/, and
 * what becomes of it to RECORD. It needs no daemon for any of this; the daemon
 * watches the record with inotify(7). RECORD must not exist: a run is started
 * once, even if a daemon died while it did so and the next one tries again.
 *
 * Output is kept in segments named by the offset of their first byte; when one
 * holds LOG_MAX / 2 bytes the next is begun and all but the last two removed.
 * FDS lists descriptors, separated by commas, that PROGRAM finds from 4 on;
 * 3 is its report socket (see keeper.c). LIFELINE is a FIFO that the daemon
 * holds open for writing as long as it lives.
 *
 * Lines of the record:
 *     monitor PID | chain PID | keeper PID | start PID NS | failed TEXT |
 *     term | exit CODE NS | signal NUMBER NS | end NS
 * with pids as the host sees them and times in nanoseconds since the epoch.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define FIRST_PASSED 4

static int record_fd = -1;

static void record(const char *format, ...)
{
	char text[600];
	va_list args;
	int n;

	va_start(args, format);
	n = vsnprintf(text, sizeof text - 1, format, args);
	va_end(args);
	if (n > (int)sizeof text - 2)
		n = sizeof text - 2;
	for (int i = 0; i < n; i++)
		if (iscntrl((unsigned char)text[i]))
			text[i] = '?';
	text[n++] = '\n';
	(void)!write(record_fd, text, n);	/* one append, never torn */
}

static unsigned long long now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_REALTIME, &t);
	return t.tv_sec * 1000000000ULL + t.tv_nsec;
}

static void die(const char *what)
{
	record("failed %s: %s", what, strerror(errno));
	record("end %llu", now_ns());
	exit(1);
}

/* One output stream: the pipe it comes from and the segments it goes to. */
struct stream {
	int pipe;
	int directory;
	int file;
	unsigned long long start, size, previous;
	unsigned long long segment;
	unsigned long long lost;
};

static void segment_name(char *name, size_t size, unsigned long long start)
{
	snprintf(name, size, "%020llu", start);
}

static void open_segment(struct stream *s)
{
	char name[32];
	struct stat st;

	segment_name(name, sizeof name, s->start);
	s->file = openat(s->directory, name, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
	s->size = s->file >= 0 && fstat(s->file, &st) == 0 ? (unsigned long long)st.st_size : 0;
}

/* Continues where an earlier run of the same incarnation left off. */
static void open_stream(struct stream *s, const char *base, const char *name, long long log_max)
{
	char path[4096];
	struct dirent *entry;
	DIR *listing;

	snprintf(path, sizeof path, "%s/%s", base, name);
	mkdir(path, 0700);
	s->directory = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (s->directory < 0)
		die(path);
	s->segment = log_max / 2 > 4096 ? log_max / 2 : 4096;
	s->start = s->previous = 0;
	listing = opendir(path);
	while (listing && (entry = readdir(listing))) {
		unsigned long long start;

		if (!isdigit((unsigned char)entry->d_name[0]))
			continue;
		start = strtoull(entry->d_name, NULL, 10);
		if (start >= s->start) {
			s->previous = s->start;
			s->start = start;
		}
	}
	if (listing)
		closedir(listing);
	open_segment(s);
}

static void next_segment(struct stream *s)
{
	char name[32];
	struct stat st;

	/* The daemon appends lines of its own: the true size counts. */
	if (fstat(s->file, &st) == 0)
		s->size = st.st_size;
	if (s->previous != s->start) {
		segment_name(name, sizeof name, s->previous);
		unlinkat(s->directory, name, 0);
	}
	close(s->file);
	s->previous = s->start;
	s->start += s->size;
	open_segment(s);
}

static void append(struct stream *s, const char *data, size_t length)
{
	while (length) {
		ssize_t n = write(s->file, data, length);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0) {
			/* A full disk must not stop the agent, nor be silent. */
			s->lost += length;
			return;
		}
		s->size += n;
		data += n;
		length -= n;
	}
}

/* Moves what is there; false at the end of the stream or if nothing is left. */
static bool drain(struct stream *s)
{
	char data[65536];
	size_t room = sizeof data;
	ssize_t n;

	if (s->size >= s->segment)
		next_segment(s);
	if (s->segment - s->size < room)
		room = s->segment - s->size;
	n = read(s->pipe, data, room);
	if (n < 0)
		return errno == EINTR;
	if (n == 0) {
		close(s->pipe);
		s->pipe = -1;
		return false;
	}
	if (s->lost) {
		char note[96];
		int length = snprintf(note, sizeof note,
				      "\nctxfs: %llu bytes of output lost, the disk was full\n", s->lost);
		unsigned long long lost = s->lost;

		s->lost = 0;
		append(s, note, length);
		if (s->lost)
			s->lost = lost;
	}
	append(s, data, n);
	return true;
}

/* What is in the pipe now, and no more. */
static void drain_rest(struct stream *s)
{
	unsigned long long before = s->start + s->size;
	int waiting = 0;

	if (s->pipe < 0 || ioctl(s->pipe, FIONREAD, &waiting) < 0)
		return;
	while (s->start + s->size - before + s->lost < (unsigned)waiting && drain(s))
		;
}

/* fork(2) with the child born in a cgroup. */
static pid_t fork_into(const char *cgroup, unsigned long long flags, int signal)
{
	int fd = open(cgroup, O_PATH | O_DIRECTORY | O_CLOEXEC);
	struct clone_args args = {
		.flags = CLONE_INTO_CGROUP | flags,
		.exit_signal = (unsigned)signal,
		.cgroup = (unsigned)fd,
	};
	pid_t pid;

	if (fd < 0)
		die(cgroup);
	pid = (pid_t)syscall(SYS_clone3, &args, sizeof args);
	if (pid < 0)
		die(cgroup);
	close(fd);
	return pid;
}

static void make_pipe(int ends[2], uid_t owner)
{
	if (pipe2(ends, O_CLOEXEC) < 0)
		die("pipe");
	/* /dev/stdout opens the pipe anew, by its owner and mode. */
	(void)!fchown(ends[1], owner, -1);
	fcntl(ends[0], F_SETFL, O_NONBLOCK);
}

/* In the child: descriptors as the chain expects them, then the chain. */
static void enter(char **argv, char *fds, int report, int out, int log)
{
	static char *const environment[] = {
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", NULL};
	int passed[16], count = 0, high = 64;

	for (char *word = strtok(fds, ","); word && count < 16; word = strtok(NULL, ","))
		passed[count++] = fcntl(atoi(word), F_DUPFD_CLOEXEC, high);
	report = fcntl(report, F_DUPFD_CLOEXEC, high);
	out = fcntl(out, F_DUPFD_CLOEXEC, high);
	log = fcntl(log, F_DUPFD_CLOEXEC, high);
	dup2(out, 1);
	dup2(log, 2);
	dup2(report, FIRST_PASSED - 1);
	for (int i = 0; i < count; i++)
		dup2(passed[i], FIRST_PASSED + i);
	syscall(SYS_close_range, (unsigned)(FIRST_PASSED + count), ~0U, 0);
	environ = (char **)environment;
	execvp(argv[0], argv);
	dprintf(2, "ctxfs: %s: %s\n", argv[0], strerror(errno));
	_exit(127);
}

/*
 * One report of the keeper. True when the program has ended: from then on the
 * cell's end must be led by somebody, the daemon or the keeper.
 */
static bool take_report(int report, bool *closed)
{
	char text[512], control[CMSG_SPACE(sizeof(struct ucred))];
	struct iovec data = {text, sizeof text - 1};
	struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1,
				 .msg_control = control, .msg_controllen = sizeof control};
	ssize_t n = recvmsg(report, &message, MSG_DONTWAIT);
	struct cmsghdr *header;
	pid_t pid = 0;

	if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
		*closed = true;
	if (n <= 0)
		return false;
	text[n] = 0;
	for (header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
		if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_CREDENTIALS) {
			struct ucred peer;

			memcpy(&peer, CMSG_DATA(header), sizeof peer);
			pid = peer.pid;
		}
	}
	if (!strcmp(text, "hello")) {
		record("keeper %d", pid);
	} else if (!strcmp(text, "start")) {
		record("start %d %llu", pid, now_ns());
	} else if (!strncmp(text, "failed ", 7) || !strcmp(text, "term")) {
		record("%s", text);
	} else if (!strncmp(text, "exit ", 5) || !strncmp(text, "signal ", 7)) {
		record("%s %llu", text, now_ns());
		return true;
	}
	return false;
}

int main(int argc, char **argv)
{
	struct stream out = {.pipe = -1}, log = {.pipe = -1};
	int out_pipe[2], log_pipe[2], sockets[2], signals, lifeline, yes = 1, null;
	bool closed = false, reaped = false, ended = false, told = false;
	sigset_t watched;
	char byte;
	pid_t monitor, chain;

	if (argc < 11 || strcmp(argv[9], "--")) {
		dprintf(2, "usage: monitor RECORD DIRECTORY LOG_MAX LIFELINE MONITORS LEAF UID FDS -- "
			   "PROGRAM ARGUMENT...\n");
		return 2;
	}
	record_fd = open(argv[1], O_WRONLY | O_APPEND | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (record_fd < 0) {
		perror(argv[1]);
		return 1;
	}
	monitor = fork_into(argv[5], CLONE_PARENT, 0);
	if (monitor > 0) {
		record("monitor %d", monitor);
		return 0;
	}
	setsid();	/* a terminal's Ctrl-C ends the daemon, not the agents */
	prctl(PR_SET_NAME, "ctx-monitor");
	lifeline = open(argv[4], O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	open_stream(&out, argv[2], "out", atoll(argv[3]));
	open_stream(&log, argv[2], "log", atoll(argv[3]));
	make_pipe(out_pipe, (uid_t)atol(argv[7]));
	make_pipe(log_pipe, (uid_t)atol(argv[7]));
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) < 0)
		die("socketpair");
	setsockopt(sockets[0], SOL_SOCKET, SO_PASSCRED, &yes, sizeof yes);

	chain = fork_into(argv[6], 0, SIGCHLD);
	if (chain == 0)
		enter(argv + 10, argv[8], sockets[1], out_pipe[1], log_pipe[1]);
	record("chain %d", chain);
	close(sockets[1]);
	close(out_pipe[1]);
	close(log_pipe[1]);
	out.pipe = out_pipe[0];
	log.pipe = log_pipe[0];
	for (char *word = strtok(argv[8], ","); word; word = strtok(NULL, ","))
		close(atoi(word));
	null = open("/dev/null", O_RDWR | O_CLOEXEC);
	dup2(null, 0);
	dup2(null, 1);
	dup2(null, 2);
	(void)!chdir("/");
	signal(SIGPIPE, SIG_IGN);
	signal(SIGHUP, SIG_IGN);
	sigemptyset(&watched);
	sigaddset(&watched, SIGCHLD);
	sigprocmask(SIG_BLOCK, &watched, NULL);
	signals = signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK);

	while (!closed || !reaped) {
		/* Watched only once it matters: a hung-up FIFO is always ready. */
		bool watch_daemon = ended && !told;
		struct pollfd fds[] = {
			{.fd = signals, .events = POLLIN},
			{.fd = closed ? -1 : sockets[0], .events = POLLIN},
			{.fd = out.pipe, .events = POLLIN},
			{.fd = log.pipe, .events = POLLIN},
			{.fd = watch_daemon ? lifeline : -1, .events = POLLIN},
		};
		struct signalfd_siginfo info;

		/* read(2) tells a missing writer even where poll(2) never saw one. */
		if (watch_daemon && (lifeline < 0 || read(lifeline, &byte, 1) == 0)) {
			(void)!send(sockets[0], "go", 2, MSG_NOSIGNAL | MSG_DONTWAIT);
			told = true;
			continue;
		}
		if (!reaped && waitpid(chain, NULL, WNOHANG) == chain)
			reaped = true;
		else
			poll(fds, 5, -1);
		while (read(signals, &info, sizeof info) == sizeof info)
			;
		if (fds[2].revents)
			drain(&out);
		if (fds[3].revents)
			drain(&log);
		if (fds[1].revents && take_report(sockets[0], &closed))
			ended = true;
	}
	/* The cell is gone. What it wrote is in the pipes; a writer may live on
	 * elsewhere (descriptors travel): what comes later is not waited for. */
	drain_rest(&out);
	drain_rest(&log);
	record("end %llu", now_ns());
	return 0;
}
