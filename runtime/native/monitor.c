/*
 * monitor: stays with one run of an agent, outside the agent's cgroup.
 *
 *     monitor RECORD OUT LOG REPLY LOG_MAX LIFELINE MONITORS LEAF UID LEAD FDS STEP
 *
 * MONITORS and LEAF are cgroup directories. The monitor is born in the first,
 * the program in the second (CLONE_INTO_CGROUP of clone3(2)): moving a process
 * there would wait for an RCU grace period, ten milliseconds or more. The
 * process that was started exits as soon as the monitor's pid is recorded.
 *
 * Starts STEP (a list: the first program on the way into the cell, which ends in the
 * keeper, and its arguments) in the leaf cgroup, writes its output to OUT and LOG, and
 * what becomes of it to RECORD. It needs no daemon for any of this; the daemon watches the record
 * with inotify(7). RECORD must not exist: a run is started once, even if a
 * daemon died while it did so and the next one tries again. The monitor stays
 * until the leaf is empty, so that what the main process leaves behind is heard
 * to its end, and until a daemon has acted on that end, or a keeper that has to be
 * told about it is gone.
 *
 * OUT and LOG are directories, made if missing, for standard output and error;
 * with "-" for LOG both go to OUT, in the order in which they were written.
 * REPLY is "-" or one more directory: lines of the output that begin with {
 * go there instead.
 * Output is kept in segments named by the offset of their first byte; when one
 * holds LOG_MAX / 2 bytes the next is begun and all but the last two removed.
 * Lines in LOG that begin with "ctxfs:" are the runtime's: this program's, those of
 * the steps into the cell, and those that the daemon appends. In a line of the
 * program that begins so, a blank comes before the colon, wherever its writes end.
 * FDS is a list of descriptors that STEP finds from 4 on; 3 is its report socket (see
 * keeper.c). LIFELINE is a FIFO that the daemon holds open for writing as long as it lives.
 *
 * LEAD says what the end of the program means when no daemon is alive: "cell",
 * the end of the cell, which its keeper is told on the report socket; one of
 * FDS, the same of the cell whose keeper that pidfd is of, by SIGTERM; "-", or
 * once the keeper says that the cell is held, nothing. A daemon that ends the program
 * and not the cell says so by making the record read-only.
 *
 * Lines of the record, which begins with the version of the form that they have:
 *     version N | monitor PID | chain PID | keeper PID | start PID NS | failed TEXT |
 *     hold | term | exit CODE NS | signal NUMBER NS | lost NS | end NS
 * with pids as the host sees them and times in nanoseconds since the epoch. "lost"
 * is the end of a program whose keeper was killed, so that nobody could tell of it.
 * These are lines, and no orders, for they are read while they grow, and by daemons that
 * are older or younger than this program (runtime/record.py).
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>

#include "common.h"
#include "orders.h"

/* Higher when a line means something else than before; runtime/record.py knows which it can
 * read. A line of a new kind does not need it: those are passed over. */
#define RECORD_VERSION 1

#define FIRST_PASSED 4

/* Who leads the end, if not the keeper that a descriptor is of. */
#define LEAD_NOBODY (-1)
#define LEAD_CELL (-2)
/* A signal is lost on a keeper to which its agent has just sent the same (signal(7)). */
#define LEAD_AGAIN_MS 1000
/* Nobody is told of what the kernel held back for a moment when the cgroup was removed. */
#define LOOK_AGAIN_MS 100

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

/* Nobody is there but the record to be told. */
static void give_up(const char *what)
{
	record("failed %s: %s", what, strerror(errno));
	record("end %llu", now_ns());
	exit(1);
}

/* One kept stream: the segments that it goes to. */
struct stream {
	int directory;
	int file;
	unsigned long long start, size, previous;
	unsigned long long segment;
	unsigned long long lost;
	bool guarded;		/* what comes now is not the runtime's */
	int matched;		/* bytes of OURS that the line began with; MATCHED_NOT */
	unsigned long long left;	/* where it ended when this program wrote last */
};

#define OURS "ctxfs:"
#define MATCHED_NOT (-1)

/* A keeper says half of this; in its place may be what holds its socket by tricks. */
#define WORDS_MAX 16

/* What the keeper has said so far. */
struct state {
	int report;	/* where it says it */
	int words;
	bool closed;	/* it says no more */
	bool held;
	bool started;
	bool ended;	/* its program; from then on somebody must lead the cell's end */
};

/* A pipe, and where its lines go. */
struct source {
	int pipe;
	struct stream *lines;
	struct stream *replies;	/* those that begin with {, if they go elsewhere */
	struct stream *present;	/* the line that is being read */
	bool inside;		/* something of it was read */
	struct state *state;	/* who says when it is the program that writes; NULL if all may */
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

/* The last segment that is there, whoever began it, and the one before. */
static void open_last(struct stream *s)
{
	int copy = openat(s->directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *listing = copy < 0 ? NULL : fdopendir(copy);
	struct dirent *entry;

	s->start = s->previous = 0;
	while (listing && (entry = readdir(listing))) {
		unsigned long long start;

		if (!isdigit((unsigned char)entry->d_name[0]))
			continue;
		start = strtoull(entry->d_name, NULL, 10);
		if (start >= s->start) {
			s->previous = s->start;
			s->start = start;
		} else if (start > s->previous) {
			s->previous = start;
		}
	}
	if (listing)
		closedir(listing);
	open_segment(s);
}

/* Continues where an earlier run of the same incarnation left off. */
static void open_stream(struct stream *s, const char *path, long long log_max)
{
	mkdir(path, 0700);
	s->directory = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (s->directory < 0)
		give_up(path);
	s->segment = log_max / 2 > 4096 ? log_max / 2 : 4096;
	s->guarded = false;
	s->lost = s->left = 0;
	s->matched = 0;
	open_last(s);
}

static void next_segment(struct stream *s)
{
	char name[32];

	if (s->previous != s->start) {
		segment_name(name, sizeof name, s->previous);
		unlinkat(s->directory, name, 0);
	}
	close(s->file);
	s->previous = s->start;
	s->start += s->size;
	open_segment(s);
}

/* The daemon appends lines of its own: the true size counts, and it may have begun a segment. */
static void look_at_segment(struct stream *s)
{
	struct stat st;

	if (s->file < 0 || fstat(s->file, &st) < 0)
		return;
	s->size = (unsigned long long)st.st_size;
	if (s->size < s->segment && st.st_nlink)
		return;
	close(s->file);
	open_last(s);
}

static void append_locked(struct stream *s, const char *data, size_t length)
{
	look_at_segment(s);
	while (length) {
		size_t part = length;
		ssize_t n;

		if (s->size >= s->segment)
			next_segment(s);
		if (s->file < 0)
			open_segment(s);	/* the disk was too full for a new one */
		/* more only if the daemon has just filled the new one */
		if (s->size < s->segment && s->segment - s->size < part)
			part = s->segment - s->size;
		n = write(s->file, data, part);
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

/* How much of the data comes before the colon of a line that is not ours, or all of it. */
static size_t before_forged(struct stream *s, const char *data, size_t length)
{
	for (size_t i = 0; i < length; i++) {
		unsigned char c = (unsigned char)data[i];

		if (iscntrl(c) && c != '\t') {
			s->matched = 0;	/* what a terminal takes for the beginning of a line */
		} else if (s->matched == MATCHED_NOT || c != (unsigned char)OURS[s->matched]) {
			s->matched = MATCHED_NOT;
		} else if (!OURS[++s->matched]) {
			s->matched = MATCHED_NOT;
			return i;
		}
	}
	return length;
}

static void append_guarded(struct stream *s, const char *data, size_t length)
{
	look_at_segment(s);
	if (s->start + s->size != s->left)
		s->matched = 0;	/* the daemon has ended the line with one of its own */
	while (length) {
		size_t part = before_forged(s, data, length);

		append_locked(s, data, part);
		if (part == length)
			return;
		append_locked(s, " :", 2);
		data += part + 1;
		length -= part + 1;
	}
}

static void append(struct stream *s, const char *data, size_t length)
{
	flock(s->directory, LOCK_EX);
	if (s->guarded)
		append_guarded(s, data, length);
	else
		append_locked(s, data, length);
	s->left = s->start + s->size;
	flock(s->directory, LOCK_UN);
}

static void keep(struct stream *s, const char *data, size_t length)
{
	if (!length)
		return;
	if (s->lost) {
		char note[96];
		int size = snprintf(note, sizeof note,
				    "\nctxfs: %llu bytes of output lost, the disk was full\n", s->lost);
		unsigned long long lost = s->lost;
		bool guarded = s->guarded;

		s->lost = 0;
		s->guarded = false;
		append(s, note, size);
		s->guarded = guarded;
		s->matched = 0;
		if (s->lost)
			s->lost = lost;
	}
	append(s, data, length);
}

/* To each stream its lines, as far as they are here. */
static void sort(struct source *from, const char *data, size_t length)
{
	const char *end = data + length, *kept = data;

	while (from->replies && data < end) {
		const char *newline = memchr(data, '\n', end - data);

		if (!from->inside) {
			struct stream *to = *data == '{' ? from->replies : from->lines;

			if (to != from->present) {
				keep(from->present, kept, data - kept);
				from->present = to;
				kept = data;
			}
		}
		from->inside = !newline;
		data = newline ? newline + 1 : end;
	}
	keep(from->present, kept, end - kept);
}

/* One word, if there is one; whether there may be more. */
static bool take_report(struct state *state)
{
	char text[512], control[CMSG_SPACE(sizeof(struct ucred))];
	struct iovec data = {text, sizeof text - 1};
	struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1,
				 .msg_control = control, .msg_controllen = sizeof control};
	ssize_t n = recvmsg(state->report, &message, MSG_DONTWAIT);
	struct cmsghdr *header;
	pid_t pid = 0;

	if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
		state->closed = true;
	if (n <= 0)
		return n < 0 && errno == EINTR;
	if (++state->words > WORDS_MAX) {
		state->closed = true;
		return false;
	}
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
		state->started = true;
	} else if (!strcmp(text, "hold")) {
		record("hold");
		state->held = true;
	} else if (!strncmp(text, "failed ", 7) || !strcmp(text, "term")) {
		record("%s", text);
	} else if (!strncmp(text, "exit ", 5) || !strncmp(text, "signal ", 7)) {
		record("%s %llu", text, now_ns());
		state->ended = true;
	}
	return true;
}

/* Moves what is there: how much, 0 at the end of the stream or if nothing is left. */
static size_t drain(struct source *from)
{
	char data[65536];
	ssize_t n;

	do
		n = read(from->pipe, data, sizeof data);
	while (n < 0 && errno == EINTR);
	if (n == 0) {
		close(from->pipe);
		from->pipe = -1;
	}
	if (n <= 0)
		return 0;
	/* The keeper says "start" before the program can write: it has, if this is of that. */
	if (from->state && !from->lines->guarded) {
		while (take_report(from->state))
			;
		from->lines->guarded = from->state->started || from->state->held;
	}
	sort(from, data, n);
	return n;
}

/* What is in the pipe now, and no more. */
static void drain_rest(struct source *from)
{
	size_t moved = 0, n;
	int waiting = 0;

	if (from->pipe < 0 || ioctl(from->pipe, FIONREAD, &waiting) < 0)
		return;
	while (moved < (unsigned)waiting && (n = drain(from)))
		moved += n;
}

/* What the monitor is told. */
struct order {
	const char *record, *out, *log, *reply, *lifeline, *monitors, *leaf;
	long long log_max;
	uid_t uid;
	int lead;
	unsigned *fds;
	size_t fd_count;
	struct list step;
};

static bool read_order(struct orders *orders, struct order *order)
{
	order->record = take_word(orders);
	order->out = take_word(orders);
	order->log = take_word(orders);
	order->reply = take_word(orders);
	order->log_max = (long long)take_number(orders, LLONG_MAX);
	order->lifeline = take_word(orders);
	order->monitors = take_word(orders);
	order->leaf = take_word(orders);
	order->uid = take_id(orders);
	if (take_if(orders, "-"))
		order->lead = LEAD_NOBODY;
	else if (take_if(orders, "cell"))
		order->lead = LEAD_CELL;
	else
		order->lead = take_descriptor(orders);
	order->fds = take_numbers(orders, INT_MAX, &order->fd_count);
	order->step = take_list(orders);
	return all_taken(orders) && order->step.count && order->fd_count <= DESCRIPTORS_MAX;
}

static pid_t must_fork(const char *cgroup, uint64_t flags, int signal)
{
	pid_t pid = fork_into(cgroup, flags, signal);

	if (pid < 0)
		give_up(cgroup);
	return pid;
}

static void make_pipe(int ends[2], uid_t owner)
{
	if (pipe2(ends, O_CLOEXEC) < 0)
		give_up("pipe");
	/* /dev/stdout opens the pipe anew, by its owner and mode. */
	(void)!fchown(ends[1], owner, -1);
	fcntl(ends[0], F_SETFL, O_NONBLOCK);
}

/* In the child: descriptors as the steps expect them, then the first of these. */
static void take_step(const struct order *order, int report, int out, int log)
{
	static char *const environment[] = {NULL};
	int passed[DESCRIPTORS_MAX], count = (int)order->fd_count, high = FIRST_PASSED + count;

	/* out of the way of each other first */
	for (int i = 0; i < count; i++)
		passed[i] = fcntl((int)order->fds[i], F_DUPFD_CLOEXEC, high);
	report = fcntl(report, F_DUPFD_CLOEXEC, high);
	out = fcntl(out, F_DUPFD_CLOEXEC, high);
	log = fcntl(log, F_DUPFD_CLOEXEC, high);
	dup2(out, 1);
	dup2(log, 2);
	dup2(report, FIRST_PASSED - 1);
	for (int i = 0; i < count; i++)
		dup2(passed[i], FIRST_PASSED + i);
	close_from((unsigned)(FIRST_PASSED + count), 0);
	execve(order->step.items[0], order->step.items, environment);
	dprintf(2, "ctxfs: %s: %m\n", order->step.items[0]);
	_exit(127);
}

/*
 * Whether a live process is in the cgroup whose cgroup.events this is, or
 * below it. Reading arms poll(2) for the next change (cgroups(7)).
 */
static bool populated(int events)
{
	char text[256];
	ssize_t n = pread(events, text, sizeof text - 1, 0);

	if (n <= 0)
		return false;
	text[n] = 0;
	return strstr(text, "populated 1") != NULL;
}

static int open_events(const char *cgroup)
{
	char path[4096];

	snprintf(path, sizeof path, "%s/cgroup.events", cgroup);
	return open(path, O_RDONLY | O_CLOEXEC);
}

/* Whether a daemon holds the FIFO: read(2) tells even where poll(2) never saw one. */
static bool daemon_alive(int lifeline)
{
	char byte;

	return lifeline >= 0 && read(lifeline, &byte, 1) != 0;
}

/* Whether a daemon has seen to what the end means: the record is gone, or read-only. */
static bool is_seen_to(void)
{
	struct stat recorded;

	return fstat(record_fd, &recorded) || !recorded.st_nlink ||
	       !(recorded.st_mode & S_IWUSR);
}

/* Tells whoever leads the end to begin it; true if that may not have arrived. */
static bool tell_end(int lead, int report)
{
	if (lead == LEAD_CELL) {
		(void)!send(report, "go", 2, MSG_NOSIGNAL | MSG_DONTWAIT);
		return false;
	}
	return syscall(SYS_pidfd_send_signal, lead, SIGTERM, NULL, 0) == 0;
}

/*
 * What the program was of is held by the keeper that LEAD is of, and the program has
 * ended: stays until a daemon has seen to that end, or that keeper is gone. A daemon that
 * dies before has left it to this program.
 */
static void stay_for_end(int lead, int lifeline, int report)
{
	struct pollfd keeper = {.fd = lead, .events = POLLIN};

	while (!is_seen_to()) {
		if (!daemon_alive(lifeline) && !tell_end(lead, report))
			return;
		if (poll(&keeper, 1, LOOK_AGAIN_MS) > 0)
			return;
	}
}

int main(int argc, char **argv)
{
	struct stream out, log, reply;
	struct source from_out = {.pipe = -1}, from_log = {.pipe = -1};
	struct state state = {0};
	int out_pipe[2], log_pipe[2], sockets[2], signals, lifeline, lead, events = -1, yes = 1, null;
	bool reaped = false, shared, replies;
	struct orders orders = orders_of_arguments(argc, argv);
	struct order order;
	long long next_word = 0;
	sigset_t watched;
	pid_t monitor, chain;

	if (!read_order(&orders, &order)) {
		dprintf(2, "usage: monitor RECORD OUT LOG REPLY LOG_MAX LIFELINE MONITORS LEAF UID LEAD "
			   "FDS STEP\n");
		return 2;
	}
	record_fd = open(order.record, O_WRONLY | O_APPEND | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (record_fd < 0) {
		perror(order.record);
		return 1;
	}
	record("version %d", RECORD_VERSION);
	monitor = must_fork(order.monitors, CLONE_PARENT, 0);
	if (monitor > 0) {
		record("monitor %d", monitor);
		return 0;
	}
	stand_beside("ctx-monitor");
	shared = !strcmp(order.log, "-");
	replies = strcmp(order.reply, "-") != 0;
	lifeline = open(order.lifeline, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	open_stream(&out, order.out, order.log_max);
	if (!shared)
		open_stream(&log, order.log, order.log_max);
	if (replies)
		open_stream(&reply, order.reply, order.log_max);
	make_pipe(out_pipe, order.uid);
	if (!shared)
		make_pipe(log_pipe, order.uid);
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) < 0)
		give_up("socketpair");
	setsockopt(sockets[0], SOL_SOCKET, SO_PASSCRED, &yes, sizeof yes);

	chain = must_fork(order.leaf, 0, SIGCHLD);
	if (chain == 0)
		take_step(&order, sockets[1], out_pipe[1], shared ? out_pipe[1] : log_pipe[1]);
	record("chain %d", chain);
	close(sockets[1]);
	close(out_pipe[1]);
	state.report = sockets[0];
	from_out = (struct source){out_pipe[0], &out, replies ? &reply : NULL, &out, false, NULL};
	if (!shared) {
		close(log_pipe[1]);
		from_log = (struct source){log_pipe[0], &log, NULL, &log, false, &state};
	}
	lead = order.lead;
	if (lead >= 0)	/* one of those that are closed */
		lead = fcntl(lead, F_DUPFD_CLOEXEC, FIRST_PASSED);
	for (size_t i = 0; i < order.fd_count; i++)
		close((int)order.fds[i]);
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

	for (;;) {
		/* A runner that was killed has told no end: then this is it. */
		bool silent = state.closed && reaped;
		bool leading = lead != LEAD_NOBODY && !state.held && (state.ended || silent);
		struct signalfd_siginfo info;
		long long left = -1;
		bool telling;

		if (silent && state.started && !state.ended) {
			/* What it has left in the leaf must not go on as if it were the run. */
			record("lost %llu", now_ns());
			state.ended = true;
		}
		if (leading && now_ms() >= next_word) {
			next_word = 0;
			if (is_seen_to()) {
				lead = LEAD_NOBODY;
				leading = false;
			} else if (!daemon_alive(lifeline)) {
				next_word = now_ms() + LEAD_AGAIN_MS;
				leading = tell_end(lead, sockets[0]);
				lead = leading ? lead : LEAD_NOBODY;
			}
		}
		telling = leading && next_word;
		if (silent) {
			if (events < 0)
				events = open_events(order.leaf);
			if (!populated(events))
				break;
		}
		if (telling) {
			left = next_word - now_ms();
			left = left < 0 ? 0 : left;
		}
		if (silent && (left < 0 || left > LOOK_AGAIN_MS))
			left = LOOK_AGAIN_MS;

		struct pollfd fds[] = {
			{.fd = signals, .events = POLLIN},
			{.fd = state.closed ? -1 : sockets[0], .events = POLLIN},
			{.fd = from_out.pipe, .events = POLLIN},
			{.fd = from_log.pipe, .events = POLLIN},
			/* Watched only while it matters: a hung-up FIFO is always ready. */
			{.fd = leading && !telling ? lifeline : -1, .events = POLLIN},
			{.fd = events, .events = POLLPRI},
			{.fd = telling ? lead : -1, .events = POLLIN},
		};

		if (!reaped && waitpid(chain, NULL, WNOHANG) == chain)
			reaped = true;
		else
			poll(fds, sizeof fds / sizeof *fds, (int)left);
		while (read(signals, &info, sizeof info) == sizeof info)
			;
		if (fds[2].revents)
			drain(&from_out);
		if (fds[3].revents)
			drain(&from_log);
		if (fds[1].revents)
			take_report(&state);
		if (fds[6].revents)
			lead = LEAD_NOBODY;	/* that keeper is gone */
	}
	/* The cell is gone, or all that was of this run in it. What it wrote is in
	 * the pipes; a writer may live on elsewhere (descriptors travel): what comes
	 * later is not waited for. */
	drain_rest(&from_out);
	drain_rest(&from_log);
	record("end %llu", now_ns());
	if (lead >= 0 && state.ended)
		stay_for_end(lead, lifeline, sockets[0]);
	return 0;
}
