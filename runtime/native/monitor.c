/*
 * monitor: follows one run of an agent, from outside the agent's cgroup.
 *
 *     monitor RECORD OUT LOG REPLY LOG_MAX ROOM LIFELINE LEAF UID LEAD SOCKET FED WHOLE
 *             LEASE GRACE_MS FDS STEP
 *
 * LEAF is the directory of the cgroup in which the program is born (CLONE_INTO_CGROUP of
 * clone3(2)): moving a process there would wait for an RCU grace period, ten milliseconds
 * or more. Standard error is for complaints: it is closed as soon as the monitor's pid is
 * recorded, and whoever started it may wait for that.
 *
 * Starts STEP in the leaf cgroup: a list of the first program on the way into the cell
 * (the last one is the keeper) and its arguments. Writes its output to OUT and LOG, and
 * its start and end to RECORD. The monitor needs no daemon for this; the daemon watches
 * the record with inotify(7). RECORD must not exist: a run starts once, even if a daemon
 * dies during the start and the next one tries again. The monitor stays until the leaf
 * is empty, to keep all output of processes that the main process left behind. If the
 * program ended in a cell that a keeper holds, the monitor also stays until a daemon has
 * acted on the end, or until that keeper, which it must tell about the end, is gone.
 *
 * OUT and LOG are directories for standard output and error, created for the first data. With
 * "-" for LOG, both go to OUT, in the order in which they were written. REPLY is "-" or
 * another directory: it receives the lines of the output that begin with {.
 * Output is kept in segments, named by the offset of their first byte. When a segment
 * holds LOG_MAX / 2 bytes, the monitor begins the next and removes all but the last two.
 * ROOM is a file, or "-": all monitors of an owner share what it says that they may keep
 * (room.h). What is over is dropped, and a line says so, as on a full disk.
 * Lines in LOG that begin with "ctxfs:" come from the runtime: from this program, the
 * steps into the cell, and the daemon. If a line of the program begins so, the monitor
 * inserts a blank before the colon, however the program splits its writes.
 * FDS is a list of descriptors that STEP has from 4 on; 3 is its report socket (see
 * keeper.c). LIFELINE is a FIFO that the daemon holds open for writing while it lives.
 *
 * SOCKET listens for what a daemon hands over (inlet.h), or is "-". With "-" for FED, STEP has the
 * monitor's standard input; with "fed" it has a pipe, and the monitor writes into it what it is
 * sent at SOCKET. It holds the pipe open, so that the program sees no end of its input.
 *
 * A window that is handed over for a cell is open as long as somebody wants the agent to live.
 * When it hangs up, the record says so, and a daemon ends the agent. If there is none, or it has
 * not done so after HANG_UP_MS, the monitor tells the keeper, and after the grace it kills all in
 * WHOLE: the cgroup of the agent or, for a task, its own; or "-".
 *
 * If the program has a terminal, its keeper sends the master of it. What the program writes there
 * goes to OUT. The daemon hands viewers over (terminal.h): what they type goes to the program, and
 * they are told what it writes. If one that is to hang up goes without a word, it is as if a window
 * had hung up. The record says who looks, so that the next daemon knows.
 *
 * LEASE is a file with the moment at which the cell is to end, unless somebody puts that off, or
 * "-" (runtime/cell/leases.py). The monitor sleeps until the moment that it read last. If it finds
 * no later one then, it says so in the record and tells the keeper. GRACE_MS after that moment,
 * however late it was noticed, it kills all in WHOLE. It waits for no daemon. A moment that cannot
 * be read is long over, and a cell whose moment is over does not begin.
 *
 * An agent can hold the mutex of a pipe: it writes to one from a page that it takes long to
 * read. O_NONBLOCK does not matter for that. So one thread does everything with pipes, terminal
 * and kept output, and nobody waits for it but at the end of the run, for DRAIN_MS. The other
 * thread, the main one, has record, reports, SOCKET, what viewers say, lifeline, signals and
 * times, and never waits for what an agent holds.
 *
 * LEAD says what the end of the program causes when no daemon is alive. With "cell",
 * the cell ends: the monitor tells its keeper on the report socket. With one of FDS, the
 * cell of that pidfd's keeper ends: the monitor sends SIGTERM to the keeper. With "-",
 * or after the keeper said that the cell is held, nothing ends. A daemon that ends the
 * program but not the cell makes the record read-only.
 *
 * Lines of the record; the first has the version of the format:
 *     version N | monitor PID | chain PID | keeper PID | start PID NS | failed TEXT |
 *     hold | term | terminal | viewer NUMBER UID | left NUMBER detached|closed|ended |
 *     hangup NS | lease NS | exit CODE NS | signal NUMBER NS | lost NS | end NS
 * with pids of the host's pid namespace and times in nanoseconds since the epoch. "lost"
 * is the end of a program whose keeper was killed and could not report the end. These are
 * lines and not orders, because daemons read them while they grow, also daemons of older
 * and newer versions (runtime/cell/record.py).
 *
 * The monitor outlives the daemon and keeps output and exit status without it. Its record stays
 * until a daemon has acted on the end and removes it; with a window that is open, so does the
 * monitor, since the next daemon asks it for that. The keeper does not outlive the monitor: a
 * run that nobody records must not go on. The monitor writes lines of the record together that follow each other
 * within 3 ms: each write wakes the daemon, which so looks at a short run once, and commits
 * its start and its end together. What the daemon hands over waits in the queue of a socket,
 * which outlives it.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/signalfd.h>
#include <sys/timerfd.h>

#include "common.h"
#include "inlet.h"
#include "orders.h"
#include "room.h"
#include "terminal.h"

/* Increase it when the meaning of a line changes; runtime/cell/record.py lists the versions
 * that it can read. New kinds of lines do not need it: readers skip unknown lines. */
#define RECORD_VERSION 1

#define FIRST_PASSED 4
#define FIRST_VIEWER 8	/* of what the main thread polls */
#define NS_OF_MS 1000000ULL
#define NS_OF_S 1000000000ULL

/* The leader of the end, if it is not the keeper of a descriptor. */
#define LEAD_NOBODY (-1)
#define LEAD_CELL (-2)
/* Repeat it: a signal is lost if the agent has just sent the keeper the same (signal(7)). */
#define LEAD_AGAIN_MS 1000
/* The kernel may delay an event of a cgroup and then drop it when the cgroup is removed. */
#define LOOK_AGAIN_MS 100
/* After the end of a run a call for one of its pipes may take so long: others may hold it. */
#define DRAIN_MS 1000
/* A daemon has so long to act on a hang-up. */
#define HANG_UP_MS 300
/* The second of the two sizes by which a program is told to draw all anew comes so late. */
#define REDRAW_MS 60
/* What a program wrote before its end is at most this much (Documentation/driver-api/tty). */
#define LEFT_MAX (64 << 10)
#define STACK_SIZE (160 << 10)	/* of which an idle one touches a page */

/*
 * Lines wait so long for the next one. Each write wakes the daemon, which looks at the
 * whole run; of a short run it sees all lines at once. If the keeper said "stay", the
 * next one may take long, and lines do not wait.
 */
#define GATHER_MS 3

static int record_fd = -1;
static struct room *room;

/*
 * Guards the record and the state. The main thread has it, except while it sleeps; the other
 * one takes it for moments, to hear reports before output.
 */
static pthread_mutex_t ours = PTHREAD_MUTEX_INITIALIZER;

/* Lines that are not written yet, and when they will be. */
static struct {
	size_t length;
	long long due;
	char text[4096];
} gathered;

static void write_record(void)
{
	if (gathered.length)	/* one append, never torn */
		(void)!write(record_fd, gathered.text, gathered.length);
	gathered.length = 0;
}

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
	if (gathered.length + (size_t)n > sizeof gathered.text)
		write_record();
	memcpy(gathered.text + gathered.length, text, (size_t)n);
	gathered.length += (size_t)n;
	gathered.due = now_ms() + GATHER_MS;
}

/* CLOCK_REALTIME is shown; what lasts is counted by CLOCK_BOOTTIME, which nobody sets. */
static unsigned long long ns_of(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return t.tv_sec * NS_OF_S + t.tv_nsec;
}

/* Only the record can report this failure. */
static void give_up(const char *what)
{
	record("failed %s: %s", what, strerror(errno));
	record("end %llu", ns_of(CLOCK_REALTIME));
	write_record();
	exit(1);
}

/* A kept stream and its segments. */
struct stream {
	const char *path;
	int directory;		/* opened for the first data: most programs say nothing */
	int file;
	unsigned long long start, size, previous;
	unsigned long long segment;
	unsigned long long lost;
	bool guarded;		/* the data that follow are not the runtime's */
	bool told;		/* they tell what was lost, for which there is always room */
	int matched;		/* bytes of OURS at the beginning of the line; or MATCHED_NOT */
	unsigned long long left;	/* its end after this program's last write */
};

#define OURS "ctxfs:"
#define MATCHED_NOT (-1)

/* A keeper sends at most half; an agent may have obtained its socket and send more. */
#define WORDS_MAX 16

/* The keeper's reports so far. */
struct state {
	int report;	/* the report socket */
	pid_t keeper;	/* who said "hello" */
	int words;
	bool closed;	/* end of reports */
	bool held;
	bool started;
	bool staying;	/* it goes on after its program */
	bool ended;	/* its program has ended; from then on, the cell's end needs a leader */
	char end[TEXT_MAX];	/* as viewers are told of it; empty if nobody knows */
};

/* What viewers are told, and by whom. The master is the thread's of pipes alone. */
static struct terminal terminal;

static struct {
	bool came;	/* the keeper has sent a descriptor for the master */
	int handed;	/* which is not taken yet; or -1 */
	bool ending;	/* the program has ended */
	bool lost;	/* its keeper was killed: what is left at the terminal is hung up */
	char end[TEXT_MAX];	/* what the daemon says of its end */
} sent = {.handed = -1};

/* A pipe and the streams of its lines. */
struct source {
	int pipe;
	struct stream *lines;
	struct stream *replies;	/* for lines that begin with {, or NULL */
	struct stream *present;	/* the stream of the current line */
	bool inside;		/* part of the current line was read */
	struct state *state;	/* tells when the program writes, or NULL */
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

/* Finds the last two segments, also those of the daemon. */
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

static void begin_stream(struct stream *s, const char *path, long long log_max)
{
	*s = (struct stream){.path = path, .directory = -1, .file = -1};
	s->segment = log_max / 2 > 4096 ? log_max / 2 : 4096;
}

/* Makes a directory, and those above it that are missing. */
static void make_directory(const char *path)
{
	char above[4096], *slash;

	if (mkdir(path, 0700) == 0 || errno != ENOENT ||
	    snprintf(above, sizeof above, "%s", path) >= (int)sizeof above)
		return;
	slash = strrchr(above, '/');
	if (!slash || slash == above)
		return;
	*slash = 0;
	make_directory(above);
	mkdir(path, 0700);
}

/* Continues after an earlier run of the same incarnation. */
static bool open_stream(struct stream *s)
{
	make_directory(s->path);
	s->directory = open(s->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (s->directory >= 0)
		open_last(s);
	return s->directory >= 0;
}

static void next_segment(struct stream *s)
{
	char name[32];
	struct stat st;

	if (s->previous != s->start) {
		segment_name(name, sizeof name, s->previous);
		if (fstatat(s->directory, name, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
		    unlinkat(s->directory, name, 0) == 0)
			give_room(room, (unsigned long long)st.st_size);
	}
	close(s->file);
	s->previous = s->start;
	s->start += s->size;
	open_segment(s);
}

/* The daemon also appends lines, and may have begun a segment: use the true size. */
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
			open_segment(s);	/* the disk was too full for a new segment */
		/* again only if the daemon has just filled the new segment */
		if (s->size < s->segment && s->segment - s->size < part)
			part = s->segment - s->size;
		part = take_room(room, part, s->told);
		n = part ? write(s->file, data, part) : 0;
		if (n < (ssize_t)part)
			give_room(room, part - (n > 0 ? (size_t)n : 0));
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0) {
			/* That must not stop the agent, and must be reported. */
			s->lost += length;
			return;
		}
		s->size += n;
		data += n;
		length -= n;
	}
}

/* Returns the length of the data up to the colon of a forged "ctxfs:", or of all data. */
static size_t before_forged(struct stream *s, const char *data, size_t length)
{
	for (size_t i = 0; i < length; i++) {
		unsigned char c = (unsigned char)data[i];

		if (iscntrl(c) && c != '\t') {
			s->matched = 0;	/* a terminal begins a line here */
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
		s->matched = 0;	/* the daemon ended the line with a line of its own */
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
	if (s->directory < 0 && !open_stream(s)) {
		s->lost += length;
		return;
	}
	flock(s->directory, LOCK_EX);
	if (s->guarded)
		append_guarded(s, data, length);
	else
		append_locked(s, data, length);
	s->left = s->start + s->size;
	flock(s->directory, LOCK_UN);
}

static void tell_lost(struct stream *s)
{
	char note[128];
	int size = snprintf(note, sizeof note,
			    "\nctxfs: %llu bytes of output lost, the disk or its owner's account of "
			    "it was full\n", s->lost);
	unsigned long long lost = s->lost;
	bool guarded = s->guarded;

	if (!lost)
		return;
	s->lost = 0;
	s->guarded = false;
	s->told = true;
	append(s, note, size);
	s->told = false;
	s->guarded = guarded;
	s->matched = 0;
	if (s->lost)
		s->lost = lost;
}

static void keep(struct stream *s, const char *data, size_t length)
{
	if (!length)
		return;
	if (has_room(room))
		tell_lost(s);
	append(s, data, length);
}

/* Writes the lines that are here to their streams. */
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

static bool rouse;	/* the thread of pipes is to be woken; guarded by ours */

/*
 * Reads one report, if there is one; returns whether there may be more. The descriptor of
 * the cell's mounts (view.c) comes with one, and stays open: whoever lets a mount namespace
 * go waits for all processors, and that is not to be a process in the cell's cgroup. So do
 * others: to close what an agent has sent may take as long as it likes. The program's process
 * says "start" and "failed", and all else is the keeper's alone.
 */
static bool take_report(struct state *state)
{
	union {
		char space[CMSG_SPACE(sizeof(struct ucred)) + CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} control;
	char text[512];
	struct iovec data = {text, sizeof text - 1};
	struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &control,
				 .msg_controllen = sizeof control};
	ssize_t n = recvmsg(state->report, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	struct cmsghdr *header;
	pid_t pid = 0;
	int fd = -1;

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
		} else if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
			memcpy(&fd, CMSG_DATA(header), sizeof fd);
		}
	}
	if (!strcmp(text, "hello") && !state->keeper) {
		record("keeper %d", pid);
		state->keeper = pid;
	} else if (!strcmp(text, "start") && !state->started) {
		record("began %llu", ns_of(CLOCK_BOOTTIME));
		record("start %d %llu", pid, ns_of(CLOCK_REALTIME));
		state->started = true;
	} else if (strncmp(text, "failed ", 7) && pid != state->keeper) {
		;	/* an agent may have obtained the socket */
	} else if (!strcmp(text, "hold")) {
		record("hold");
		write_record();	/* runs are waiting to enter */
		state->held = true;
	} else if (!strncmp(text, "failed ", 7) || !strcmp(text, "term")) {
		record("%s", text);
		if (*text == 'f')
			snprintf(state->end, sizeof state->end, "%s", text);
	} else if (!strcmp(text, "terminal") && fd >= 0 && !sent.came) {
		sent.came = rouse = true;
		sent.handed = fd;
	} else if (!strncmp(text, "exit ", 5) || !strncmp(text, "signal ", 7)) {
		record("ceased %llu", ns_of(CLOCK_BOOTTIME));
		record("%s %llu", text, ns_of(CLOCK_REALTIME));
		if (!*state->end)
			snprintf(state->end, sizeof state->end, "%s", text);
		state->ended = true;
		if (state->staying)
			write_record();
	} else if (!strcmp(text, "stay")) {
		state->staying = true;
	}
	return true;
}

/* What the two threads share, beside what ours guards. */
static struct {
	struct source out, log;
	int in_pipe;		/* -1 unless FED */
	int others[3];		/* the program's ends of the pipes, to be closed */
	int to_pipes, to_main;	/* eventfds that wake the threads */
	atomic_llong calling;	/* since when the thread of pipes is in a call for one; or 0 */
	atomic_bool deaf;	/* nobody reads standard input */
	int master;		/* of the program's terminal, or -1 */
	long long quiet;	/* until then it is not read: nobody has the terminal open */
	atomic_bool ending, drained;
	struct inlet in;	/* last: what it takes is a page that most never touch */
} pipes = {.in = {.listener = -1, .window = -1}, .in_pipe = -1, .master = -1,
	   .others = {-1, -1, -1}};

static void wake(int eventfd)
{
	(void)!write(eventfd, &(uint64_t){1}, sizeof(uint64_t));
}

static void woken(int eventfd)
{
	(void)!read(eventfd, &(uint64_t){0}, sizeof(uint64_t));
}

/* The sooner of a timeout for poll(2) and a moment. */
static long long sooner(long long left, long long due)
{
	long long until = due - now_ms();

	if (until < 0)
		until = 0;
	return left < 0 || left > until ? until : left;
}

/* Moves available data; returns the length, 0 at the end or if none is left. */
static size_t drain(struct source *from)
{
	char data[65536];
	ssize_t n;

	pipes.calling = now_ms();
	do
		n = read(from->pipe, data, sizeof data);
	while (n < 0 && errno == EINTR);
	if (n == 0) {
		close(from->pipe);
		from->pipe = -1;
	}
	pipes.calling = 0;
	if (n <= 0)
		return 0;
	/* "start" comes before all output of the program: if this is its output, it was sent. */
	if (from->state && !from->lines->guarded) {
		pthread_mutex_lock(&ours);
		while (take_report(from->state))
			;
		from->lines->guarded = from->state->started || from->state->held;
		pthread_mutex_unlock(&ours);
		wake(pipes.to_main);
	}
	sort(from, data, n);
	return n;
}

/* Moves only the data that are in the pipe now. */
static void drain_rest(struct source *from)
{
	size_t moved = 0, n;
	int waiting = 0;

	pipes.calling = now_ms();
	if (from->pipe < 0 || ioctl(from->pipe, FIONREAD, &waiting) < 0)
		waiting = 0;
	pipes.calling = 0;
	while (moved < (unsigned)waiting && (n = drain(from)))
		moved += n;
	if (from->lines)
		tell_lost(from->lines);
	if (from->replies)
		tell_lost(from->replies);
}

/* The first of two moments, of which each may be -1: never. */
static long long first_of(long long one, long long other)
{
	return other < 0 || (one >= 0 && one < other) ? one : other;
}

/* Takes the master that came, if it is one. */
static void take_master(void)
{
	struct winsize size = {0};
	int fd;

	pthread_mutex_lock(&ours);
	fd = sent.handed;
	sent.handed = -1;
	pthread_mutex_unlock(&ours);
	if (fd < 0)
		return;
	pipes.calling = now_ms();
	if (is_master(fd) && fcntl(fd, F_SETFL, O_NONBLOCK) == 0 &&
	    ioctl(fd, TIOCGWINSZ, &size) == 0)
		pipes.master = fd;
	else
		close(fd);
	pipes.calling = 0;
	if (pipes.master < 0)
		return;
	pthread_mutex_lock(&ours);
	record("terminal");
	if (!terminal.cols) {
		terminal.cols = size.ws_col;
		terminal.rows = size.ws_row;
	}
	pthread_mutex_unlock(&ours);
	wake(pipes.to_main);
}

/*
 * Gives the terminal its size. A program draws all anew when that changes, so one that is to do
 * so gets another size for a moment. Returns when the next is due, or -1.
 */
static long long give_size(void)
{
	static struct winsize given;
	static long long due;
	struct winsize size;

	if (due && now_ms() < due)
		return due;
	pthread_mutex_lock(&ours);
	size = (struct winsize){.ws_col = (unsigned short)terminal.cols,
				.ws_row = (unsigned short)terminal.rows};
	due = terminal.redraw && terminal.said ? now_ms() + REDRAW_MS : 0;
	terminal.redraw = false;
	pthread_mutex_unlock(&ours);
	if (due)
		size.ws_row += size.ws_row > 1 ? -1 : 1;
	if (size.ws_col == given.ws_col && size.ws_row == given.ws_row)
		return due ? due : -1;
	given = size;
	pipes.calling = now_ms();	/* the agent may ask for the size, with a page of its own */
	(void)ioctl(pipes.master, TIOCSWINSZ, &size);
	pipes.calling = 0;
	return due ? due : -1;
}

/* Moves what is typed to the program. */
static void write_typed(void)
{
	char part[4096];
	size_t length;
	ssize_t n;

	pthread_mutex_lock(&ours);
	length = terminal.typed < sizeof part ? terminal.typed : sizeof part;
	memcpy(part, terminal.input, length);
	pthread_mutex_unlock(&ours);
	pipes.calling = now_ms();
	n = length ? write(pipes.master, part, length) : 0;
	pipes.calling = 0;
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n < 0)	/* nobody has the terminal any more */
		n = (ssize_t)length;
	pthread_mutex_lock(&ours);
	if (!takes_input(&terminal))
		wake(pipes.to_main);
	terminal.typed -= (size_t)n;
	memmove(terminal.input, terminal.input + n, terminal.typed);
	pthread_mutex_unlock(&ours);
}

/* Moves what the program has written; returns its length, 0 if there is nothing now. */
static size_t drain_master(void)
{
	static char data[LEFT_MAX];
	size_t length = 0;
	bool owed = false;
	ssize_t n;

	pipes.calling = now_ms();
	do {
		n = read(pipes.master, data + length, sizeof data - length);
		length += n > 0 ? (size_t)n : 0;
	} while ((n > 0 && length < sizeof data / 2) || (n < 0 && errno == EINTR));
	pipes.calling = 0;
	if (n == 0 || (n < 0 && errno != EAGAIN))
		pipes.quiet = now_ms() + LOOK_AGAIN_MS;
	if (!length)
		return 0;
	pthread_mutex_lock(&ours);
	tell_output(&terminal, data, length);
	for (size_t i = 0; i < VIEWERS_MAX; i++)
		owed |= terminal.viewers[i].fd >= 0 && is_owed(&terminal, &terminal.viewers[i]);
	pthread_mutex_unlock(&ours);
	if (owed)
		wake(pipes.to_main);
	keep(pipes.out.lines, data, length);
	return length;
}

/* All that the program wrote before its end is told, and its end may be. If nobody could report
 * that, the terminal hangs up, which the kernel tells whatever is left there. */
static void drain_left(void)
{
	size_t moved = 0, n;
	bool lost;

	take_master();
	n = pipes.master >= 0;
	while (n && moved < LEFT_MAX)
		moved += n = drain_master();
	pthread_mutex_lock(&ours);
	terminal.over = true;
	lost = sent.lost;
	pthread_mutex_unlock(&ours);
	wake(pipes.to_main);
	if (!lost || pipes.master < 0)
		return;
	pipes.calling = now_ms();
	close(pipes.master);
	pipes.calling = 0;
	pipes.master = -1;
}

/* Serves the terminal but for what is to be polled; returns when it is to be done again anyway, or
 * -1. */
static long long watch_master(struct pollfd *watched)
{
	static bool left;
	long long held, due;
	bool ending;

	take_master();
	pthread_mutex_lock(&ours);
	*watched = (struct pollfd){.fd = -1};
	held = held_until(&terminal);
	if (held < 0)
		watched->events |= POLLIN;
	if (terminal.typed)
		watched->events |= POLLOUT;
	ending = sent.ending && !left;
	pthread_mutex_unlock(&ours);
	if (ending) {
		left = true;
		drain_left();
	}
	if (pipes.master < 0)
		return -1;
	due = first_of(give_size(), held);
	if (pipes.quiet > now_ms())
		return first_of(due, pipes.quiet);
	watched->fd = watched->events ? pipes.master : -1;
	return due;
}

/* The thread of pipes: until the run has ended, and its output is kept. */
static void *serve_pipes(void *nothing)
{
	size_t written = 0;

	/* until the main thread has started the program, and sleeps */
	pthread_mutex_lock(&ours);
	pthread_mutex_unlock(&ours);
	for (int i = 0; i < 3; i++)
		close_quietly(pipes.others[i]);
	while (!pipes.ending) {
		struct pollfd fds[5] = {
			{.fd = pipes.to_pipes, .events = POLLIN},
			{.fd = pipes.out.pipe, .events = POLLIN},
			{.fd = pipes.log.pipe, .events = POLLIN},
			{.fd = pipes.in.length && !pipes.deaf ? pipes.in_pipe : -1,
			 .events = POLLOUT},
		};
		long long due = watch_master(&fds[4]);

		poll(fds, sizeof fds / sizeof *fds, due < 0 ? -1 : (int)sooner(-1, due));
		if (fds[0].revents)
			woken(pipes.to_pipes);
		if (fds[1].revents)
			drain(&pipes.out);
		if (fds[2].revents)
			drain(&pipes.log);
		if (fds[3].revents) {
			pipes.calling = now_ms();
			if (!write_taken(&pipes.in, pipes.in_pipe, &written))
				pipes.deaf = true;
			pipes.calling = 0;
			if (!pipes.in.length || pipes.deaf)
				wake(pipes.to_main);
		}
		if (fds[4].revents && fds[4].events & POLLOUT)
			write_typed();
		if (fds[4].revents && fds[4].events & POLLIN)
			drain_master();
	}
	drain_left();
	drain_rest(&pipes.out);
	drain_rest(&pipes.log);
	pipes.drained = true;
	wake(pipes.to_main);
	return nothing;
}

static bool begin_thread(void)
{
	pthread_attr_t small;
	pthread_t thread;

	pipes.to_pipes = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	pipes.to_main = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	pthread_attr_init(&small);
	pthread_attr_setstacksize(&small, STACK_SIZE);
	errno = pthread_create(&thread, &small, serve_pipes, NULL);
	return pipes.to_pipes >= 0 && pipes.to_main >= 0 && !errno;
}

/* poll(2), during which the other thread may hear reports. That one is woken only now, if it is to
 * be: it would wait for the mutex. */
static void sleep_until(struct pollfd *fds, size_t count, long long ms)
{
	bool wakes = rouse;

	rouse = false;
	pthread_mutex_unlock(&ours);
	if (wakes)
		wake(pipes.to_pipes);
	poll(fds, count, (int)ms);
	pthread_mutex_lock(&ours);
}

/*
 * Until all output is kept, or a call for a pipe takes too long: its holder lives, in another
 * agent that was given the descriptor. What is in the pipe then is lost.
 */
static void wait_drained(void)
{
	long long since = now_ms(), calling;

	pipes.ending = true;
	wake(pipes.to_pipes);
	while (!pipes.drained) {
		struct pollfd told = {.fd = pipes.to_main, .events = POLLIN};

		sleep_until(&told, 1, LOOK_AGAIN_MS);
		woken(pipes.to_main);
		calling = pipes.calling;
		if (calling && now_ms() - (calling > since ? calling : since) > DRAIN_MS)
			return;
	}
}

/* The monitor's orders. */
struct order {
	const char *record, *out, *log, *reply, *room, *lifeline, *leaf;
	long long log_max;
	uid_t uid;
	int lead, socket;
	bool fed;
	const char *whole, *lease;
	unsigned long long grace_ms;
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
	order->room = take_word(orders);
	order->lifeline = take_word(orders);
	order->leaf = take_word(orders);
	order->uid = take_id(orders);
	if (take_if(orders, "-"))
		order->lead = LEAD_NOBODY;
	else if (take_if(orders, "cell"))
		order->lead = LEAD_CELL;
	else
		order->lead = take_descriptor(orders);
	order->socket = take_descriptor_or_none(orders);
	order->fed = take_if(orders, "fed");
	if (!order->fed)
		take_if(orders, "-");
	order->whole = take_word(orders);
	order->lease = take_word(orders);
	order->grace_ms = take_number(orders, LLONG_MAX / NS_OF_MS);
	order->fds = take_numbers(orders, INT_MAX, &order->fd_count);
	order->step = take_list(orders);
	return all_taken(orders) && order->step.count && order->fd_count <= DESCRIPTORS_MAX;
}

/* Returns the end of the program; OURS is the other one, for reading or for writing. */
static int make_pipe(int *ours, bool reading, uid_t owner)
{
	int ends[2];

	if (pipe2(ends, O_CLOEXEC) < 0)
		give_up("pipe");
	/* Opening /dev/stdout opens the pipe again and checks its owner and mode. */
	(void)!fchown(ends[1], owner, -1);
	*ours = ends[!reading];
	fcntl(*ours, F_SETFL, O_NONBLOCK);
	return ends[reading];
}

/* In the child: arranges the descriptors and executes the first step. */
static void take_step(const struct order *order, int report, int in, int out, int log)
{
	static char *const environment[] = {NULL};
	int passed[DESCRIPTORS_MAX], count = (int)order->fd_count, high = FIRST_PASSED + count;

	/* first to numbers that do not collide */
	for (int i = 0; i < count; i++)
		passed[i] = fcntl((int)order->fds[i], F_DUPFD_CLOEXEC, high);
	report = fcntl(report, F_DUPFD_CLOEXEC, high);
	out = fcntl(out, F_DUPFD_CLOEXEC, high);
	log = fcntl(log, F_DUPFD_CLOEXEC, high);
	if (in >= 0)
		dup2(in, 0);
	dup2(out, 1);
	dup2(log, 2);
	dup2(report, FIRST_PASSED - 1);
	for (int i = 0; i < count; i++)
		dup2(passed[i], FIRST_PASSED + i);
	close_from((unsigned)(FIRST_PASSED + count), 0);
	if (leave_keyring() < 0)
		die("no session keyring for the agent: %m");
	execve(order->step.items[0], order->step.items, environment);
	dprintf(2, "ctxfs: %s: %m\n", order->step.items[0]);
	_exit(127);
}

/*
 * Returns whether a live process is in or below the cgroup of this cgroup.events.
 * Reading arms poll(2) for the next change (cgroups(7)).
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

static int open_in(const char *cgroup, const char *name, int flags)
{
	char path[4096];

	snprintf(path, sizeof path, "%s/%s", cgroup, name);
	return open(path, flags | O_CLOEXEC);
}

/* Whether a daemon holds the FIFO; unlike poll(2), read(2) tells before any writer came. */
static bool daemon_alive(int lifeline)
{
	char byte;

	return lifeline >= 0 && read(lifeline, &byte, 1) != 0;
}

/* Whether a daemon has acted on the end: the record is gone, or read-only. */
static bool is_seen_to(void)
{
	struct stat recorded;

	return fstat(record_fd, &recorded) || !recorded.st_nlink ||
	       !(recorded.st_mode & S_IWUSR);
}

/*
 * The end of a cell that this program leads: its lease is over, or a window or a viewer has hung up
 * and no daemon acts on that. First the keeper is told, and after the grace all is killed.
 */
static struct {
	const char *why;	/* as viewers are told; NULL until it begins */
	const char *word;	/* that the keeper is yet to be told; or NULL */
	unsigned long long kill_at;	/* all in WHOLE, by CLOCK_BOOTTIME */
	int clock;		/* goes on while the machine sleeps, unlike a timeout of poll(2) */
	int killer;		/* cgroup.kill of WHOLE */
	int lease;
	unsigned long long grace;	/* after the end of the lease */
} led = {.clock = -1, .killer = -1, .lease = -1};

static void wake_at(unsigned long long ns)
{
	struct itimerspec at = {.it_value = {(time_t)(ns / NS_OF_S), (long)(ns % NS_OF_S)}};

	timerfd_settime(led.clock, TFD_TIMER_ABSTIME, &at, NULL);
}

/* Sleeps until the end of the lease; returns false if that has come. */
static bool is_leased(void)
{
	uint64_t end;

	if (pread(led.lease, &end, sizeof end, 0) != sizeof end)
		end = 0;
	if (end > ns_of(CLOCK_BOOTTIME)) {
		wake_at(end);
		return true;
	}
	record("lease %llu", ns_of(CLOCK_REALTIME));
	write_record();
	led.why = "lease_over";
	led.word = "go";
	led.kill_at = end + led.grace;
	return false;
}

static void hang_up(int lifeline, long long grace_ms)
{
	uint64_t due = ns_of(CLOCK_BOOTTIME) + (daemon_alive(lifeline) ? HANG_UP_MS * NS_OF_MS : 0);

	record("hangup %llu", ns_of(CLOCK_REALTIME));
	write_record();
	if (led.why)
		return;
	led.why = "hangup";
	led.word = "hup";
	led.kill_at = due + (unsigned long long)grace_ms * NS_OF_MS;
	wake_at(due);
}

static void lose_window(int lifeline)
{
	close(pipes.in.window);
	pipes.in.window = -1;
	hang_up(lifeline, pipes.in.grace_ms);
}

static void go_on_leading(int report)
{
	unsigned long long now = ns_of(CLOCK_BOOTTIME);

	if (!led.why && is_leased())
		return;
	if (led.word && !is_seen_to())
		(void)!send(report, led.word, strlen(led.word), MSG_NOSIGNAL | MSG_DONTWAIT);
	led.word = NULL;
	if (now >= led.kill_at) {
		(void)!write(led.killer, "1", 1);
		led.kill_at = now + LEAD_AGAIN_MS * NS_OF_MS;
	}
	wake_at(led.kill_at);
}

/* Takes a packet about viewers (inlet.h); returns whether there may be more. */
static bool take_viewing(int peer)
{
	union {
		struct viewing viewer;
		char text[TEXT_MAX];
	} told;
	int fds[DESCRIPTORS_MAX];
	size_t count;
	ssize_t n = receive_message(peer, &told, sizeof told - 1, fds, &count);

	if (n <= 0)
		return false;
	if (told.text[0] == 't' && n == sizeof told.viewer && count == 1) {
		record("viewer %u %u", told.viewer.number, told.viewer.uid);
		if (let_look(&terminal, &told.viewer, fds[0]))
			return true;
		record("left %u closed", told.viewer.number);
	} else if (told.text[0] != 't') {
		told.text[n] = 0;
		if (told.text[0] == 'n')
			tell_notice(&terminal, told.text + 1);
		else
			snprintf(sent.end, sizeof sent.end, "%s", told.text + 1);
	}
	while (count)
		close(fds[--count]);
	return true;
}

static void leave(struct viewer *v, enum leaving how, const struct state *state, int lifeline)
{
	static const char *const words[] = {
		[DETACHED] = "detached", [CLOSED] = "closed", [ENDED] = "ended"};

	let_go(&terminal, v);
	record("left %u %s", v->number, words[how]);
	if (how == CLOSED && v->hangup && !state->ended)
		hang_up(lifeline, v->grace_ms);
}

/* Hears viewers, as far as FDS says that there is something, and tells them what it may. */
static void serve_viewers(const struct pollfd *fds, const struct state *state, int lifeline)
{
	for (size_t i = 0; i < VIEWERS_MAX; i++) {
		struct viewer *v = &terminal.viewers[i];
		short told = v->fd >= 0 ? fds[i].revents & ~POLLOUT : 0;
		enum leaving how = STAYS;

		if (v->fd < 0)
			continue;
		/* it has typed, or may hold up the program no more */
		rouse |= told || is_owed(&terminal, v);
		if (told)
			how = hear_viewer(&terminal, v, told & (POLLHUP | POLLRDHUP));
		if (how == STAYS)
			how = serve_viewer(&terminal, v);
		if (how != STAYS)
			leave(v, how, state, lifeline);
	}
	rouse |= terminal.redraw;
}

/* The program has ended: viewers are to be told how, after all that it wrote. */
static void end_terminal(const struct state *state)
{
	const char *end = *sent.end ? sent.end
			  : led.why	? led.why
			  : *state->end ? state->end
			  : state->started ? "lost"
					   : "failed it did not start, see its log";

	snprintf(terminal.end, sizeof terminal.end, "%s", end);
	sent.ending = rouse = true;
}

static bool has_viewers(void)
{
	for (size_t i = 0; i < VIEWERS_MAX; i++)
		if (terminal.viewers[i].fd >= 0)
			return true;
	return false;
}

/* The run has ended: viewers get what waits for them, as long as they take it. */
static void wait_for_viewers(const struct state *state, int lifeline)
{
	struct pollfd fds[VIEWERS_MAX] = {{0}};

	be_patient(&terminal);
	for (serve_viewers(fds, state, lifeline); has_viewers();) {
		long long until = held_until(&terminal);

		if (until < 0)
			break;
		watch_viewers(&terminal, fds);
		sleep_until(fds, VIEWERS_MAX, sooner(-1, until));
		serve_viewers(fds, state, lifeline);
	}
}

/* Tells the leader to begin the end; returns true if this must be repeated. */
static bool tell_end(int lead, int report)
{
	if (lead == LEAD_CELL) {
		(void)!send(report, "go", 2, MSG_NOSIGNAL | MSG_DONTWAIT);
		return false;
	}
	return syscall(SYS_pidfd_send_signal, lead, SIGTERM, NULL, 0) == 0;
}

/*
 * The program has ended in a cell that LEAD's keeper holds. Stays until a daemon has
 * acted on that end, or the keeper is gone. If the daemon dies before, this program
 * must lead the end.
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

/* The run has ended, and no daemon knows yet: the next one asks for the window. */
static void stay_for_window(int lifeline)
{
	while (pipes.in.window >= 0 && !is_seen_to()) {
		struct pollfd fds[1 + INLET_FDS] = {{.fd = pipes.in.window}};
		size_t count = 1 + watch_inlet(&pipes.in, fds + 1);

		poll(fds, count, LOOK_AGAIN_MS);
		if (fds[0].revents)
			lose_window(lifeline);
		serve_inlet(&pipes.in, fds + 1);
	}
}

int main(int argc, char **argv)
{
	struct stream out, log, reply;
	struct state state = {0};
	int sockets[2], signals, lifeline, lead, watched_group, events = -1, yes = 1, null;
	bool reaped = false, shared, replies;
	struct orders orders = orders_of_arguments(argc, argv);
	struct order order;
	long long next_word = 0;
	sigset_t watched, before;
	pid_t chain;

	if (!read_order(&orders, &order)) {
		dprintf(2, "usage: monitor RECORD OUT LOG REPLY LOG_MAX ROOM LIFELINE LEAF UID LEAD "
			   "SOCKET FED WHOLE LEASE GRACE_MS FDS STEP\n");
		return 2;
	}
	record_fd = open(order.record, O_WRONLY | O_APPEND | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (record_fd < 0) {
		perror(order.record);
		return 1;
	}
	pthread_mutex_lock(&ours);
	record("version %d", RECORD_VERSION);
	record("monitor %d", getpid());
	write_record();
	null = open("/dev/null", O_RDWR | O_CLOEXEC);
	dup2(null, 1);
	dup2(null, 2);
	stand_beside("ctx-monitor");
	shared = !strcmp(order.log, "-");
	replies = strcmp(order.reply, "-") != 0;
	lifeline = open(order.lifeline, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	room = open_room(order.room);
	begin_stream(&out, order.out, order.log_max);
	pipes.out = (struct source){-1, &out, replies ? &reply : NULL, &out, false, NULL};
	pipes.others[1] = make_pipe(&pipes.out.pipe, true, order.uid);
	pipes.log.pipe = -1;
	if (!shared) {
		begin_stream(&log, order.log, order.log_max);
		pipes.log = (struct source){-1, &log, NULL, &log, false, &state};
		pipes.others[2] = make_pipe(&pipes.log.pipe, true, order.uid);
	}
	if (replies)
		begin_stream(&reply, order.reply, order.log_max);
	if (order.socket >= 0) {
		pipes.in.listener = fcntl(order.socket, F_DUPFD_CLOEXEC, FIRST_PASSED);
		if (order.fed)
			pipes.others[0] = make_pipe(&pipes.in_pipe, false, order.uid);
		close(order.socket);
	}
	if (strcmp(order.whole, "-") || strcmp(order.lease, "-")) {
		pipes.in.take_viewing = take_viewing;
		led.killer = open_in(order.whole, "cgroup.kill", O_WRONLY);
		led.clock = timerfd_create(CLOCK_BOOTTIME, TFD_CLOEXEC | TFD_NONBLOCK);
		if (led.killer < 0 || led.clock < 0)
			give_up(order.whole);
	}
	if (strcmp(order.lease, "-")) {
		led.lease = open(order.lease, O_RDONLY | O_CLOEXEC);
		led.grace = order.grace_ms * NS_OF_MS;
		if (!is_leased()) {
			record("failed its lease was over before it began");
			record("end %llu", ns_of(CLOCK_REALTIME));
			write_record();
			return 1;
		}
	}
	begin_terminal(&terminal);
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) < 0)
		give_up("socketpair");
	setsockopt(sockets[0], SOL_SOCKET, SO_PASSCRED, &yes, sizeof yes);
	state.report = sockets[0];
	sigemptyset(&watched);
	sigaddset(&watched, SIGCHLD);
	sigprocmask(SIG_BLOCK, &watched, &before);
	if (!begin_thread())
		give_up("thread");

	/* later the agent may hold the lock of the directory */
	watched_group = open_in(order.leaf, "cgroup.events", O_RDONLY);
	chain = fork_into(order.leaf, 0, SIGCHLD);
	if (chain < 0)
		give_up(order.leaf);
	if (chain == 0) {
		sigprocmask(SIG_SETMASK, &before, NULL);
		take_step(&order, sockets[1], pipes.others[0], pipes.others[1],
			  pipes.others[shared ? 1 : 2]);
	}
	record("chain %d", chain);
	close(sockets[1]);
	lead = order.lead;
	if (lead >= 0)	/* one of the descriptors closed below */
		lead = fcntl(lead, F_DUPFD_CLOEXEC, FIRST_PASSED);
	for (size_t i = 0; i < order.fd_count; i++)
		close((int)order.fds[i]);
	dup2(null, 0);
	(void)!chdir("/");
	signal(SIGPIPE, SIG_IGN);
	signal(SIGHUP, SIG_IGN);
	signals = signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK);

	for (;;) {
		/* A killed runner reports no end: its silence is the end. */
		bool silent = state.closed && reaped;
		bool leading = lead != LEAD_NOBODY && !state.held && (state.ended || silent);
		struct signalfd_siginfo info;
		long long left = -1;
		bool telling;

		if (silent && state.started && !state.ended) {
			/* Processes left in the leaf must not continue as if they were the run. */
			record("lost %llu", ns_of(CLOCK_REALTIME));
			state.ended = sent.lost = true;
		}
		if (state.ended && !sent.ending && (sent.came || has_viewers()))
			end_terminal(&state);
		if (leading && now_ms() >= next_word) {
			next_word = 0;
			if (is_seen_to()) {
				lead = LEAD_NOBODY;
				leading = false;
			} else if (!daemon_alive(lifeline)) {
				write_record();
				next_word = now_ms() + LEAD_AGAIN_MS;
				leading = tell_end(lead, sockets[0]);
				lead = leading ? lead : LEAD_NOBODY;
			}
		}
		telling = leading && next_word;
		if (silent) {
			events = watched_group;	/* its changes matter from now on */
			if (!populated(events))
				break;
		}
		if (gathered.length && now_ms() >= gathered.due)
			write_record();
		if (telling)
			left = sooner(left, next_word);
		if (silent)
			left = sooner(left, now_ms() + LOOK_AGAIN_MS);
		if (gathered.length)
			left = sooner(left, gathered.due);

		/* A keeper that does not stay is about to exit: SIGCHLD tells it. Others are
		 * heard again when the lines are written. */
		bool leaving = state.ended && !state.staying && !reaped && gathered.length;
		struct pollfd fds[FIRST_VIEWER + VIEWERS_MAX + INLET_FDS] = {
			{.fd = signals, .events = POLLIN},
			{.fd = state.closed || leaving ? -1 : sockets[0], .events = POLLIN},
			{.fd = pipes.to_main, .events = POLLIN},
			/* Watched only while needed: a hung-up FIFO is always ready. */
			{.fd = leading && !telling ? lifeline : -1, .events = POLLIN},
			{.fd = events, .events = POLLPRI},
			{.fd = telling ? lead : -1, .events = POLLIN},
			{.fd = pipes.in.window},	/* whoever has the other end may send */
			{.fd = led.clock, .events = POLLIN},
		};
		size_t count = FIRST_VIEWER + VIEWERS_MAX;

		watch_viewers(&terminal, fds + FIRST_VIEWER);
		count += watch_inlet(&pipes.in, fds + count);

		if (!reaped && waitpid(chain, NULL, WNOHANG) == chain)
			reaped = true;
		else
			sleep_until(fds, count, left);
		while (read(signals, &info, sizeof info) == sizeof info)
			;
		if (fds[1].revents)
			take_report(&state);
		if (fds[2].revents)
			woken(pipes.to_main);
		if (fds[5].revents)
			lead = LEAD_NOBODY;	/* that keeper is gone */
		if (fds[6].revents)
			lose_window(lifeline);
		if (fds[7].revents)
			go_on_leading(sockets[0]);
		if (pipes.deaf)
			close_inlet(&pipes.in);
		serve_viewers(fds + FIRST_VIEWER, &state, lifeline);
		serve_inlet(&pipes.in, fds + FIRST_VIEWER + VIEWERS_MAX);
		if (!pipes.in.room)
			wake(pipes.to_pipes);
	}
	/* The cell is gone, or all processes of this run in it. Their output is in the
	 * pipes. Another process may still hold a pipe, since descriptors can be passed
	 * on; do not wait for its output. */
	wait_drained();
	record("end %llu", ns_of(CLOCK_REALTIME));
	write_record();
	if (has_viewers()) {
		end_terminal(&state);
		terminal.over = true;
		wait_for_viewers(&state, lifeline);
	}
	if (lead >= 0 && state.ended)
		stay_for_end(lead, lifeline, sockets[0]);
	else
		stay_for_window(lifeline);
	return 0;
}
