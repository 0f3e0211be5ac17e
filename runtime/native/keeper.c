/*
 * keeper: PID 1 of an agent's cell; also starts further programs in a cell.
 *
 *     keeper ORDERS_FD REPORT_FD GRACE_MS [HAND_FD]
 *
 * Starts the agent's program, reports its end to the monitor, and is the last
 * process of the PID namespace: when it exits, the kernel kills all processes
 * inside, including nested cells (pid_namespaces(7)). It exits when its program
 * has ended and the namespace is empty. A *held* keeper does not exit: it keeps
 * the cell for processes that enter it (enter.c), until it is told to end. A
 * keeper without a program is held from the start.
 *
 *     keeper ORDERS_FD REPORT_FD -
 *
 * The *runner*: not PID 1, but a process that entered a cell. Starts a program
 * there, in its own session, and reports its end. It ends no other process and
 * waits for no other: the cell's keeper does that.
 *
 * ORDERS_FD holds orders (orders.h): the working directory; the environment, a list; the
 * program and its arguments, a list, empty for no program; if it is to have a terminal, the word
 * "terminal", columns and rows; and with HAND_FD the networks, a list of lists: a name and a port
 * of the loopback, or 0 for none. REPORT_FD is a SOCK_SEQPACKET socket to the monitor, for these
 * words:
 *
 *     to the monitor    hello | terminal | start | failed TEXT | hold | term | exit N |
 *                       signal N | stay
 *     from the monitor  go    (the end is recorded, and no daemon is alive to
 *                              lead it, or the cell's lease is over: the keeper
 *                              must end the cell)
 *                       hup   (the agent's window has hung up, and no daemon has
 *                              ended it: the same, with SIGHUP to all before SIGTERM,
 *                              and a grace of at most HANG_UP_GRACE_MS. A runner
 *                              tells its program's group, with SIGHUP last, and
 *                              does no more)
 *
 * "stay" comes before the end of the program if something else is in the namespace, perhaps
 * a zombie: this process may go on for long.
 *
 * The program's own process sends "start" before it executes the program, so that
 * the socket's credentials carry its pid. With "terminal" comes the master of a pair in the cell's
 * own devpts, which nobody else has; the program leads a session with the slave as its controlling
 * terminal. If it stops, with no shell above it that could continue it, it is continued here.
 * From "hello" on, no signal is lost. PID 1
 * obeys these signals, only from outside of its namespace:
 *
 *     SIGUSR1   be held, and say "hold"; does nothing once an end has begun
 *     SIGHUP    exit as soon as nothing else is left, held or not
 *     SIGTERM   end the cell, held or not, as on "go" and without a monitor: send
 *               SIGTERM to all, exit when nothing is left or the grace is over
 *
 * HAND_FD is a listening SOCK_SEQPACKET socket, given for a cell with networks. Before the
 * program starts, PID 1 listens for each network on a socket in NETWORKS and on the port. Whoever
 * connects to HAND_FD gets all of these, named in orders: "s" or "p" for socket or port, and the
 * network. Only the daemon and its relays (relay.c) can connect there. PID 1 keeps the listening
 * sockets and the last such connection: while there is no relay, programs that connect wait.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/un.h>
#include <sys/vfs.h>

#include "common.h"
#include "filter.h"
#include "orders.h"

#define HANG_UP_GRACE_MS 500	/* as in runtime/cell/windows.py */

static int report_fd = -1;

static void report(const char *format, ...)
{
	char text[512];
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof text, format, args);
	va_end(args);
	/* If the monitor is gone, this fails; poll notices the monitor's end. */
	(void)!send(report_fd, text, strlen(text), MSG_NOSIGNAL);
}

#define NETWORKS "/run/ctx/net"	/* the same as in runtime/cell/networks.py */
#define BACKLOG 128	/* connections that wait for the relay, of each socket */
/* Above this, a keeper has HAND_FD at most. */
#define FIRST_OTHER 5

/* What to start, and the networks to listen for. */
struct spec {
	const char *cwd;
	struct list env, argv;
	unsigned cols, rows;	/* of its terminal; or 0: it has none */
	struct list *networks;
	size_t network_count;
};

/* The listening sockets, and the message that names them. */
static struct {
	int fds[DESCRIPTORS_MAX];
	size_t count, length;
	char names[DESCRIPTORS_MAX * 80];
	int hand, relay;
} listening = {.hand = -1, .relay = -1};

/* Returns false if the orders are damaged. */
static bool read_spec(int fd, struct spec *spec)
{
	struct orders orders = read_orders(fd);

	spec->cwd = take_word(&orders);
	spec->env = take_list(&orders);
	spec->argv = take_list(&orders);
	if (take_if(&orders, "terminal")) {
		spec->cols = (unsigned)take_number(&orders, USHRT_MAX);
		spec->rows = (unsigned)take_number(&orders, USHRT_MAX);
	}
	if (listening.hand >= 0)
		spec->networks = take_lists(&orders, &spec->network_count);
	return all_taken(&orders);
}

static void listen_at(const char *kind, const char *network, const void *address, socklen_t length)
{
	const struct sockaddr *where = address;
	int fd = socket(where->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	if (fd < 0 || listening.count == DESCRIPTORS_MAX || bind(fd, where, length) < 0 ||
	    listen(fd, BACKLOG) < 0) {
		report("failed network:%s: cannot listen in the cell: %s", network, strerror(errno));
		exit(EXIT_FAILED);
	}
	listening.fds[listening.count++] = fd;
	listening.length += (size_t)snprintf(listening.names + listening.length,
					     sizeof listening.names - listening.length, "%s%s%c",
					     kind, network, 0);
}

static void listen_for(const char *network, unsigned port)
{
	struct sockaddr_un path = {.sun_family = AF_UNIX};
	struct sockaddr_in loopback = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port),
				       .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};

	snprintf(path.sun_path, sizeof path.sun_path, NETWORKS "/%s", network);
	listen_at("s", network, &path, sizeof path);
	if (port)
		listen_at("p", network, &loopback, sizeof loopback);
}

static void listen_for_all(const struct spec *spec)
{
	for (size_t i = 0; i < spec->network_count; i++) {
		const struct list *network = &spec->networks[i];
		unsigned long long port;

		if (network->count != 2 || strlen(network->items[0]) > 64 ||
		    !parse_number(network->items[1], UINT16_MAX, &port)) {
			report("failed the runtime's list of networks is damaged");
			exit(EXIT_FAILED);
		}
		listen_for(network->items[0], (unsigned)port);
	}
}

/* To another relay, after which the one before ends. */
static void hand_out(void)
{
	char message[sizeof listening.names + 16];
	int size, fd = accept4(listening.hand, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

	if (fd < 0)
		return;
	if (listening.relay >= 0)
		close(listening.relay);
	listening.relay = fd;
	size = snprintf(message, sizeof message, "%zu%c", listening.count, 0);
	memcpy(message + size, listening.names, listening.length);
	(void)!send_message(fd, message, (size_t)size + listening.length, listening.fds,
			    listening.count);
}

/*
 * Abstract sockets belong to a network namespace: in the host's, an agent could
 * connect to services that trust every local process. From here on, it can connect
 * only to those of its own processes (landlock(7)).
 */
static bool scope_sockets(void)
{
	return enter_domain((struct ruleset){.scoped = SCOPE_ABSTRACT_UNIX_SOCKET}) >= 0;
}

/* As sh(1) does it: a file that the kernel cannot execute is a script. Returns on failure. */
static void execute_file(const char *file, const struct list *argv)
{
	char *script[argv->count + 2];

	execv(file, argv->items);
	if (errno != ENOEXEC)
		return;
	script[0] = "/bin/sh";
	script[1] = (char *)(uintptr_t)file;
	memcpy(script + 2, argv->items + 1, argv->count * sizeof *script);
	execv(script[0], script);
}

/* execvp(3), whose C libraries differ in scripts and in what ends the search. */
static void search_program(const struct list *argv)
{
	const char *name = argv->items[0], *path = getenv("PATH"), *end;
	bool denied = false;
	char file[PATH_MAX];

	if (strchr(name, '/')) {
		execute_file(name, argv);
		return;
	}
	errno = ENOENT;
	for (path = path ? path : "/bin:/usr/bin"; *name; path = end + 1) {
		int n;

		end = strchrnul(path, ':');
		n = snprintf(file, sizeof file, "%.*s%s%s", (int)(end - path), path,
			     end == path ? "" : "/", name);
		if (n < (int)sizeof file)
			execute_file(file, argv);
		denied |= errno == EACCES;
		if (errno != EACCES && errno != ENOENT && errno != ENOTDIR && errno != ESTALE &&
		    errno != ENODEV && errno != ETIMEDOUT)
			return;
		if (!*end)
			break;
	}
	if (denied)
		errno = EACCES;
}

static const char *why_not(const char *name, int error)
{
	if (error != ENOENT)
		return strerror(error);
	if (strchr(name, '/') && access(name, F_OK) == 0)
		return "its interpreter is not in the agent's view: mount that as well";
	return "no such program in the agent's view: mount it, or name another in exec";
}

/* Opens the master of a new pair in the cell's own devpts; another program may be at its path. */
static int open_master(void)
{
	int master = open("/dev/pts/ptmx", O_RDWR | O_NOFOLLOW | O_NOCTTY | O_CLOEXEC);
	struct statfs where;

	if (master >= 0 && fstatfs(master, &where) == 0 && where.f_type == DEVPTS_SUPER_MAGIC)
		return master;
	if (master >= 0)
		errno = ENOTTY;
	close_quietly(master);
	return -1;
}

/* Makes a terminal, and sends its master to the monitor. Returns the slave; -1 if there is none,
 * and says why. */
static int make_terminal(const struct spec *spec)
{
	struct winsize size = {.ws_col = (unsigned short)spec->cols,
			       .ws_row = (unsigned short)spec->rows};
	int master = open_master(), slave = -1;

	if (master >= 0 && ioctl(master, TIOCSPTLCK, &(int){0}) == 0 &&
	    ioctl(master, TIOCSWINSZ, &size) == 0)
		slave = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
	if (slave < 0)
		report("failed %s", errno == ENOSPC ? "no terminal left (kernel.pty.max)"
						    : strerror(errno));
	else
		(void)!send_message(report_fd, "terminal", strlen("terminal"), &master, 1);
	close(master);
	return slave;
}

static void become_program(const struct spec *spec, int terminal, const sigset_t *mask)
{
	if (terminal >= 0 && (ioctl(terminal, TIOCSCTTY, 0) < 0 || dup2(terminal, 0) < 0 ||
			      dup2(terminal, 1) < 0 || dup2(terminal, 2) < 0)) {
		report("failed to take the terminal: %s", strerror(errno));
		_exit(126);
	}
	report("start");
	/* The program inherits nothing above standard error. The report socket is
	 * still needed if exec fails. */
	close_from(3, CLOSE_ON_EXEC);
	if (chdir(spec->cwd) < 0) {
		report("failed cwd %.200s: %s", spec->cwd, strerror(errno));
		_exit(126);
	}
	if (!scope_sockets()) {
		report("failed to restrict abstract sockets: %s", strerror(errno));
		_exit(126);
	}
	if (!filter_calls()) {
		report("failed to filter system calls: %s", errno == EINVAL ?
		       "this kernel has no seccomp filters" : strerror(errno));
		_exit(126);
	}
	/* signals that were ignored for the daemon (nohup(1)) are not ignored for the agent */
	for (int number = 1; number < NSIG; number++)
		signal(number, SIG_DFL);
	sigprocmask(SIG_SETMASK, mask, NULL);
	environ = spec->env.items;
	search_program(&spec->argv);
	report("failed %.200s: %s", spec->argv.items[0], why_not(spec->argv.items[0], errno));
	_exit(errno == ENOENT ? 127 : 126);
}

/* Returns what follows the name in /proc/PID/stat, NULL if there is no such process. */
static char *status_of(const char *pid, char *stat, size_t size)
{
	char path[64], *end;
	ssize_t n;
	int fd;

	snprintf(path, sizeof path, "/proc/%.20s/stat", pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	n = fd < 0 ? -1 : read(fd, stat, size - 1);
	close_quietly(fd);
	stat[n > 0 ? n : 0] = 0;
	end = strrchr(stat, ')');	/* the name may contain anything */
	return end && end[1] == ' ' ? end + 2 : NULL;
}

/* What is done with the status of a process; true if no other is to be looked at. */
typedef bool look(pid_t pid, const char *status);

/* Returns the PID of a process of this namespace, other than the keeper, at which the look was the
 * last; 0 if there is none, -1 if /proc cannot tell. */
static pid_t look_at_others(look *at)
{
	DIR *proc = opendir("/proc");
	struct dirent *entry;
	pid_t found = 0;

	if (!proc)
		return -1;
	while (!found && (entry = readdir(proc))) {
		char stat[512], *end, *status;
		long pid = strtol(entry->d_name, &end, 10);

		if (*end || pid <= 1)
			continue;
		status = status_of(entry->d_name, stat, sizeof stat);
		if (status && at((pid_t)pid, status))
			found = (pid_t)pid;
	}
	closedir(proc);
	return found;
}

/* A zombie does not count: its parent may be outside and reap it later. */
static bool still_runs(pid_t pid, const char *status)
{
	(void)pid;
	return *status != 'Z' && *status != 'X';
}

static pid_t find_other(void)
{
	return look_at_others(still_runs);
}

/* An interactive shell ignores SIGTERM, but not that its terminal is gone. It has to come last:
 * readline(3) remembers one signal. */
static bool hang_up_terminal(pid_t pid, const char *status)
{
	int terminal = 0;

	if (sscanf(status, "%*c %*d %*d %*d %d", &terminal) == 1 && terminal)
		kill(pid, SIGHUP);
	return false;
}

/* Looks at every process of the machine: to be asked once. */
static bool nobody_to_signal(void)
{
	return kill(-1, 0) < 0 && errno == ESRCH;
}

static bool namespace_empty(void)
{
	return nobody_to_signal() || find_other() == 0;
}

/* Returns a descriptor that becomes readable when any other process ends, or -1. */
static int watch_other(void)
{
	pid_t other = find_other();

	return other > 0 ? (int)syscall(SYS_pidfd_open, other, 0) : -1;
}

static void report_end(int status)
{
	if (WIFSIGNALED(status))
		report("signal %d", WTERMSIG(status));
	else
		report("exit %d", WEXITSTATUS(status));
}

/* Reaps all ended children; returns true if the program is one of them. */
static bool collect(pid_t program, bool terminal, int *program_status)
{
	bool found = false;
	int status;
	pid_t pid;

	while ((pid = waitpid(-1, &status, WNOHANG | (terminal ? WUNTRACED : 0))) > 0) {
		if (pid != program)
			continue;
		if (WIFSTOPPED(status)) {
			kill(-program, SIGCONT);
			continue;
		}
		found = true;
		*program_status = status;
	}
	return found;
}

/*
 * A sender outside of the namespace has no pid here, so an agent cannot give orders
 * to its PID 1 (pid_namespaces(7)). sigqueue(3) lets the agent choose the pid, but not
 * this code. If the kernel had no room for the details of a signal
 * (RLIMIT_SIGPENDING), the signal appears to come from uid 0, which in a cell can only
 * be the agent itself.
 */
static bool from_outside(const struct signalfd_siginfo *info)
{
	return info->ssi_pid == 0 && info->ssi_code == SI_USER &&
	       (info->ssi_uid != 0 || getuid() == 0);
}

/* Handles signals. */
struct told {
	bool hold, leave, end;
};

static struct told take_signals(int signals)
{
	struct told told = {0};
	/* a limited number at a time, or a flood of signals would keep the keeper busy */
	struct signalfd_siginfo infos[8];
	ssize_t n = read(signals, infos, sizeof infos);

	for (size_t i = 0; n > 0 && i < (size_t)n / sizeof *infos; i++) {
		if (!from_outside(&infos[i]))
			continue;
		told.hold |= infos[i].ssi_signo == SIGUSR1;
		told.leave |= infos[i].ssi_signo == SIGHUP;
		told.end |= infos[i].ssi_signo == SIGTERM;
	}
	return told;
}

/* Returns true if the keeper must lead the end: on "go" and "hup", or if the monitor is gone. */
static bool hear_monitor(bool *connected, bool *hung_up)
{
	char word[16] = "";
	ssize_t n = recv(report_fd, word, sizeof word - 1, MSG_DONTWAIT);

	if (n > 0) {
		*hung_up = !strcmp(word, "hup");
		return *hung_up || !strcmp(word, "go");
	}
	/* A run without a monitor to record its output and end must not continue. */
	*connected = n < 0 && (errno == EAGAIN || errno == EINTR);
	return !*connected;
}

/* Returns a descriptor that reads blocked signals: SIGCHLD, or all others. */
static int watch_signals(const sigset_t *all, bool children)
{
	sigset_t some = *all;

	if (children) {
		sigemptyset(&some);
		sigaddset(&some, SIGCHLD);
	} else {
		sigdelset(&some, SIGCHLD);
	}
	return signalfd(-1, &some, SFD_CLOEXEC | SFD_NONBLOCK);
}

/* The main loop of PID 1, after the start of its program, if any. */
static int keep(pid_t program, bool terminal, const sigset_t *watched, long long grace_ms)
{
	int children = watch_signals(watched, true), signals = watch_signals(watched, false);
	bool ended = !program, held = !program, leaving = false, end_now = false;
	bool connected = true, hung_up = false;
	long long deadline = -1;

	if (held)
		report("hold");
	for (;;) {
		struct signalfd_siginfo info;
		struct told told;
		int other = -1, status = 0, timeout = -1;
		bool ended_now, alone = false;

		(void)!read(children, &info, sizeof info);
		ended_now = collect(program, terminal, &status);
		/* Only now: signals sent before the program died have arrived, and a
		 * cell that is to be held must stay. */
		told = take_signals(signals);
		if (told.hold && !held && !leaving && deadline < 0) {
			held = true;
			report("hold");
		}
		leaving |= told.leave;
		if (ended_now) {
			ended = true;
			alone = nobody_to_signal();
			if (held || !alone)
				report("stay");
			report_end(status);
		}
		if (told.end && !(program && ended) && deadline < 0)
			report("term");
		if ((told.end || end_now) && deadline < 0) {
			if (hung_up) {
				if (grace_ms > HANG_UP_GRACE_MS)
					grace_ms = HANG_UP_GRACE_MS;
				kill(-1, SIGHUP);
			}
			deadline = now_ms() + grace_ms;
			kill(-1, SIGTERM);
			kill(-1, SIGCONT);	/* a stopped process does not receive SIGTERM */
			look_at_others(hang_up_terminal);
		}
		if (ended && (!held || leaving || deadline >= 0)) {
			if (alone || namespace_empty())
				return 0;
			other = watch_other();
			if (other < 0)
				timeout = 20;	/* no /proc in this view */
		}
		if (deadline >= 0) {
			long long left = deadline - now_ms();

			if (left <= 0)
				return 0;
			if (timeout < 0 || left < timeout)
				timeout = (int)left;
		}

		struct pollfd fds[] = {
			{.fd = children, .events = POLLIN},
			{.fd = signals, .events = POLLIN},
			{.fd = connected ? report_fd : -1, .events = POLLIN},
			{.fd = other, .events = POLLIN},
			{.fd = listening.hand, .events = POLLIN},
		};

		poll(fds, sizeof fds / sizeof *fds, timeout);
		if (other >= 0)
			close(other);
		if (fds[2].revents && hear_monitor(&connected, &hung_up))
			end_now = true;
		if (fds[4].revents)
			hand_out();
	}
}

/* The main loop of a runner, after the start of its program. */
static int wait_for(pid_t program, bool terminal, const sigset_t *watched)
{
	int status, children = watch_signals(watched, true);
	bool connected = true, hung_up = false;

	while (!collect(program, terminal, &status)) {
		struct signalfd_siginfo info;
		struct pollfd fds[] = {
			{.fd = children, .events = POLLIN},
			{.fd = connected ? report_fd : -1, .events = POLLIN},
		};

		poll(fds, sizeof fds / sizeof *fds, -1);
		(void)!read(children, &info, sizeof info);
		if (fds[1].revents && hear_monitor(&connected, &hung_up) && connected && hung_up) {
			kill(-program, SIGTERM);
			kill(-program, SIGCONT);
			kill(-program, SIGHUP);
		}
	}
	report_end(status);
	return 0;
}

int main(int argc, char **argv)
{
	static const int heard[] = {SIGCHLD, SIGTERM, SIGHUP, SIGUSR1};
	struct rlimit no_core = {1, 1};	/* no core, not even to a pipe (filter.h) */
	struct orders orders = orders_of_arguments(argc, argv);
	int spec_fd = take_descriptor(&orders), report_to = take_descriptor(&orders);
	bool runner = take_if(&orders, "-");
	long long grace_ms = runner ? 0 : (long long)take_number(&orders, LLONG_MAX / 2);
	int hand = orders.next < orders.end ? take_descriptor(&orders) : -1;
	struct spec spec = {0};
	sigset_t blocked, inherited;
	pid_t program = 0;
	int terminal = -1;

	if (!all_taken(&orders))
		return 2;
	report_fd = report_to;
	listening.hand = hand;
	/* after execution by descriptor, the name would be the descriptor's number */
	prctl(PR_SET_NAME, "keeper");
	fcntl(report_fd, F_SETFD, FD_CLOEXEC);
	/* The agent has the same uid, and could otherwise trace its PID 1. */
	prctl(PR_SET_DUMPABLE, 0);
	setrlimit(RLIMIT_CORE, &no_core);
	umask(022);
	if (runner) {
		setsid();
		sigfillset(&blocked);	/* a runner handles no signals */
	} else {
		sigemptyset(&blocked);
		for (size_t i = 0; i < sizeof heard / sizeof *heard; i++)
			sigaddset(&blocked, heard[i]);
	}
	/* PID 1 does not receive signals that it neither handles nor blocks. */
	sigprocmask(SIG_BLOCK, &blocked, &inherited);
	for (size_t i = 0; i < sizeof heard / sizeof *heard; i++)
		sigdelset(&inherited, heard[i]);
	report("hello");
	/* The agent must not have descriptors of earlier steps, such as the parent's
	 * namespaces. The descriptors needed here come first. */
	close_from(hand < 0 ? FIRST_OTHER : (unsigned)hand + 1, 0);
	if (!read_spec(spec_fd, &spec) || (runner && !spec.argv.count)) {
		report("failed the runtime's start data is damaged");
		return EXIT_FAILED;
	}
	if (hand >= 0)
		fcntl(hand, F_SETFD, FD_CLOEXEC);
	listen_for_all(&spec);
	if (spec.argv.count && spec.cols) {
		terminal = make_terminal(&spec);
		if (terminal < 0)
			return EXIT_FAILED;
	}
	if (spec.argv.count) {
		program = fork();
		if (program < 0) {
			report("failed fork: %s", strerror(errno));
			return EXIT_FAILED;
		}
		if (program == 0) {
			if (!runner || terminal >= 0)
				setsid();	/* signals to its group must not reach PID 1 */
			become_program(&spec, terminal, &inherited);
		}
	}
	close_quietly(terminal);
	close(0);
	close(1);
	close(2);
	return runner ? wait_for(program, spec.cols, &blocked)
		      : keep(program, spec.cols, &blocked, grace_ms);
}
