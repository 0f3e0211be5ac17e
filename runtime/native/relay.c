/*
 * relay: passes the connections of one cell on to its networks.
 *
 *     relay DIRECTORY NAME CGROUP IDS OWNERS_FD OWNERS_MAX INCARNATION PAYERS LEVELS NETWORKS
 *                                                                                 (orders.h)
 *
 * A network is a Unix socket of the operator's, outside of every cell. The keeper of a cell
 * (keeper.c) listens for it in the cell, on a Unix socket and on a port of the loopback. This
 * program lives outside of the cell, in the agent's cgroup and with IDS, which are not the
 * agent's: it accepts there, connects to the operator's socket, and copies in both directions
 * until both have ended. It needs no daemon.
 *
 * It gets the listening sockets from the keeper, at the socket NAME in DIRECTORY, and keeps that
 * connection. It exits when the keeper closes it: the cell is gone, or has another relay.
 *
 * LEVELS are descriptors of files: the agent's own counters, then those of each agent that owns
 * the one before (struct counters). All relays of a tree, and the daemons, share them in memory.
 * The relay counts connections and bytes at every level, and lets no more than the lowest limit
 * pass. If a network is closed in the agent's own file, or a limit is reached, it closes what is
 * open. Nothing tells it: while connections are open, it looks every LOOK_MS. The daemon sees in
 * the file how many are open, and kills a relay that does not close them.
 * NETWORKS are lists: a name; the path of the operator's socket, or "-" for none; what is said there
 * first; for each level, the number of the network's line in that file.
 *
 * What is said first is "none", or "proxy": a header of the PROXY protocol (version 2) in which the
 * addresses have the 64 bits of INCARNATION, so that whoever listens knows whose the connection is.
 * With "counters" the descriptors PAYERS go with it: the counters of the agent and of all that pay
 * for it, for a meter (runtime/metering). A header that an agent sends comes after this one, and is
 * a part of its request.
 *
 * On the Unix socket it serves processes in the cgroup CGROUP, but not those of the agent's
 * children (in "child" below it): a descriptor of the directory can be passed on. No other
 * process can connect to a port of the cell's own loopback.
 *
 * Each connection holds one of OWNERS_MAX bytes of OWNERS_FD by a lock (F_OFD_SETLK of fcntl(2)),
 * so that all relays of an owner together have no more, and a killed relay has none. Without a
 * free byte, and with CONNECTIONS_MAX of its own, it accepts none: who connects waits. While the
 * queue of an operator's socket is full, it accepts one at each socket that leads there: the
 * others would hold bytes, for which those of other networks had to wait.
 *
 * The relay is in a leaf of the agent's cgroup, and pauses and ends with it. It parses nothing
 * that an agent sends, and has a uid that is no agent's, so that the operator's socket can be
 * closed to agents. It outlives the daemon, and gets no orders after its start but the numbers
 * in the file of counters.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/un.h>

#include "common.h"
#include "counters.h"
#include "orders.h"

#define USAGE "usage: relay DIRECTORY NAME CGROUP IDS OWNERS_FD OWNERS_MAX INCARNATION PAYERS LEVELS " \
	      "NETWORKS"
#define CONNECTIONS_MAX 256
#define LOOK_MS 250
#define REPORT_MS 1000		/* between two reports of one network */
#define BUSY_MS 5000		/* that a queue may be full before that is trouble */
#define PART 16384		/* bytes that a direction reads before it has written them */
#define PARTS_AT_ONCE 16	/* of one connection, before others have their turn */
#define EVENTS 64
#define PEERPIDFD 77		/* SO_PEERPIDFD of Linux 6.5, missing in older headers */

enum header { NO_HEADER, PROXY, COUNTERS };

struct network {
	const char *name, *path;
	enum header header;
	struct line *lines[LEVELS_MAX];	/* own first */
	uint64_t open;			/* connections of this relay */
	unsigned long long trouble;	/* to be reported */
	long long reported;		/* when that was done */
};

/* What epoll(7) hands back. */
enum kind { KEEPER, LISTENER, SIDE };

struct connection;

struct listener {
	enum kind kind;
	int fd;
	bool local;	/* a Unix socket */
	bool idle;	/* it accepts none */
	struct network *network;
	struct connection *waiting;	/* until the operator's socket has room */
};

/* One end of a connection: 0 is the agent's, 1 the operator's. */
struct side {
	enum kind kind;
	int fd;
	struct connection *connection;
	bool readable, writable;
	bool ended;		/* it sends no more */
	bool done;		/* nothing more can or need be sent to it */
	bool gone;		/* nothing can: it is closed in both directions */
	char *rest;		/* what it has sent and the other one did not take yet */
	size_t offset, length;
};

struct connection {
	struct side sides[2];
	struct listener *listener;
	struct network *network;
	struct connection *previous, *next;
	unsigned slot;		/* its byte of the owner's */
	long long begun;
	bool pending, closed, connected;
};

static struct network *networks;
static struct listener *listeners;
static size_t network_count, listener_count, level_count;
static struct connection connections = {.previous = &connections, .next = &connections};
static struct connection *closed_ones;
static unsigned open_count, slots_max, next_slot;
static bool paused;
static int poller, own_fd, owners_fd;
static struct counters *own;
static bool *held_slots;
static int payers[LEVELS_MAX];
static size_t payer_count;
static unsigned char greeting[52] = "\r\n\r\n\0\r\nQUIT\n\x21\x21\0\x24";
static const char *cgroup;
static enum kind keeper_kind = KEEPER;

/* The numbers. */

static unsigned long long load(const uint64_t *number)
{
	return __atomic_load_n(number, __ATOMIC_RELAXED);
}

static void add(struct network *network, size_t field, unsigned long long amount)
{
	for (size_t i = 0; i < level_count; i++)
		__atomic_fetch_add((uint64_t *)(void *)((char *)network->lines[i] + field), amount,
				   __ATOMIC_RELAXED);
}

/* No difference is added: what a relay that was killed has left there would stay. */
static void count_open(struct network *network, int more)
{
	network->open += (uint64_t)more;
	__atomic_store_n(&network->lines[0]->open, network->open, __ATOMIC_RELAXED);
}

/* Tells the daemon by a write, which inotify(7) sees, unlike a change in memory. */
static void report_trouble(struct network *network)
{
	uint64_t *there = &network->lines[0]->trouble;
	long long now = now_ms();

	if (network->trouble == load(there) || now - network->reported < REPORT_MS)
		return;
	network->reported = now;
	(void)!pwrite(own_fd, &network->trouble, sizeof network->trouble,
		      (char *)there - (char *)own);
}

/* Bytes that may still pass; 0 is trouble with the first level whose limit is reached. */
static unsigned long long room(struct network *network)
{
	unsigned long long least = ULLONG_MAX;

	for (size_t i = 0; i < level_count; i++) {
		const struct line *line = network->lines[i];
		unsigned long long max = load(&line->max);
		unsigned long long used = load(&line->sent) + load(&line->received);

		if (max == NO_LIMIT)
			continue;
		if (used >= max) {
			network->trouble = TROUBLE_LIMIT | i;
			return 0;
		}
		if (max - used < least)
			least = max - used;
	}
	if (network->trouble & TROUBLE_LIMIT)
		network->trouble = 0;
	return least;
}

static bool is_open(struct network *network)
{
	return !load(&network->lines[0]->closed) && room(network) > 0;
}

/* The account of the owner. */

static bool lock_slot(unsigned slot, short type)
{
	struct flock range = {.l_type = type, .l_whence = SEEK_SET, .l_start = slot, .l_len = 1};

	return fcntl(owners_fd, F_OFD_SETLK, &range) == 0;
}

static void free_slot(unsigned slot)
{
	lock_slot(slot, F_UNLCK);
	held_slots[slot] = false;
}

static bool take_slot(unsigned *slot)
{
	for (unsigned i = 0; i < slots_max; i++) {
		unsigned tried = (next_slot + i) % slots_max;

		/* its own locks would not keep it away */
		if (held_slots[tried] || !lock_slot(tried, F_WRLCK))
			continue;
		held_slots[tried] = true;
		next_slot = tried + 1;
		*slot = tried;
		return true;
	}
	return false;
}

/* Connections. */

static void watch(int fd, uint32_t events, void *what)
{
	struct epoll_event event = {.events = events, .data.ptr = what};

	if (epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event) < 0)
		die("epoll_ctl: %m");
}

static void set_idle(struct listener *listener)
{
	bool idle = paused || listener->waiting;
	struct epoll_event event = {.events = idle ? 0 : EPOLLIN, .data.ptr = listener};

	if (listener->idle == idle)
		return;
	listener->idle = idle;
	epoll_ctl(poller, EPOLL_CTL_MOD, listener->fd, &event);
}

static void pause_listeners(bool wanted)
{
	if (paused == wanted)
		return;
	paused = wanted;
	for (size_t i = 0; i < listener_count; i++)
		set_idle(&listeners[i]);
}

static void set_waiting(struct connection *c, bool wanted)
{
	if (wanted == (c->listener->waiting == c))
		return;
	c->listener->waiting = wanted ? c : NULL;
	set_idle(c->listener);
}

/* A client over TCP sees an abrupt end as such. */
static void set_reset(int fd)
{
	struct linger none = {1, 0};

	setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
}

static void end_connection(struct connection *c, bool reset)
{
	if (c->closed)
		return;
	c->closed = true;
	set_waiting(c, false);
	if (reset && !c->listener->local)
		set_reset(c->sides[0].fd);
	for (int i = 0; i < 2; i++) {
		close_quietly(c->sides[i].fd);
		free(c->sides[i].rest);
		c->sides[i].rest = NULL;
	}
	free_slot(c->slot);
	c->previous->next = c->next;
	c->next->previous = c->previous;
	open_count--;
	count_open(c->network, -1);
	/* events of this round may still name it */
	c->next = closed_ones;
	closed_ones = c;
	pause_listeners(false);
}

static void free_closed(void)
{
	while (closed_ones) {
		struct connection *next = closed_ones->next;

		free(closed_ones);
		closed_ones = next;
	}
}

/* Sends what is left of the other side; false if nothing was sent. */
static bool send_rest(struct side *from, struct side *to)
{
	ssize_t n = send(to->fd, from->rest + from->offset, from->length, MSG_NOSIGNAL);

	if (n < 0 && errno == EINTR)
		return true;
	if (n < 0 && errno == EAGAIN) {
		to->writable = false;
		return false;
	}
	if (n < 0) {
		/* What it has sent before can still be read and passed on. */
		to->done = to->gone = true;
		n = (ssize_t)from->length;
	}
	from->offset += (size_t)n;
	from->length -= (size_t)n;
	if (!from->length) {
		free(from->rest);
		from->rest = NULL;
	}
	return true;
}

/* Reads once and passes on; false if nothing was there. -1: the connection is over. */
static int pass(struct connection *c, struct side *from, struct side *to)
{
	static char part[PART];
	unsigned long long most = room(c->network);
	ssize_t n, sent = 0;

	if (!most)
		return -1;
	n = recv(from->fd, part, most < sizeof part ? (size_t)most : sizeof part, 0);
	if (n < 0 && errno == EINTR)
		return 1;
	if (n < 0 && errno == EAGAIN) {
		from->readable = false;
		return 0;
	}
	if (n < 0)
		return -1;
	if (n == 0) {
		from->ended = true;
		return 1;
	}
	add(c->network, from == c->sides ? offsetof(struct line, sent)
					 : offsetof(struct line, received), (size_t)n);
	if (to->done)
		return 1;	/* nobody takes it */
	do
		sent = send(to->fd, part, (size_t)n, MSG_NOSIGNAL);
	while (sent < 0 && errno == EINTR);
	if (sent < 0 && errno != EAGAIN) {
		to->done = to->gone = true;
		return 1;
	}
	if (sent == n)
		return 1;
	to->writable = false;
	sent = sent < 0 ? 0 : sent;
	from->rest = malloc((size_t)(n - sent));
	if (!from->rest)
		return -1;
	memcpy(from->rest, part + sent, (size_t)(n - sent));
	from->offset = 0;
	from->length = (size_t)(n - sent);
	return 1;
}

/* Copies from one side to the other; 1 if something was done, -1 if the connection is over. */
static int copy(struct connection *c, struct side *from, struct side *to)
{
	if (from->length)
		return to->writable && send_rest(from, to);
	if (!from->ended && from->readable)
		return pass(c, from, to);
	if (from->ended && !to->done) {
		shutdown(to->fd, SHUT_WR);
		to->done = true;
		return 1;
	}
	return 0;
}

/* Whether nothing is left to copy. */
static bool is_over(const struct connection *c)
{
	bool ended = true;

	for (int i = 0; i < 2; i++) {
		const struct side *side = &c->sides[i];

		if (side->gone && side->ended && !side->length)
			return true;
		ended &= side->ended && side->done;
	}
	return ended;
}

static void pump(struct connection *c)
{
	c->pending = false;
	for (int parts = 0; parts < PARTS_AT_ONCE; parts++) {
		int there = copy(c, &c->sides[0], &c->sides[1]);
		int back = there < 0 ? 0 : copy(c, &c->sides[1], &c->sides[0]);

		if (there < 0 || back < 0) {
			end_connection(c, true);
			return;
		}
		if (is_over(c)) {
			end_connection(c, false);
			return;
		}
		if (!there && !back)
			return;
	}
	c->pending = true;
}

/* Says whose a connection is: from and to fd63:7478:6673:0:INCARNATION, each at port 1. */
static void prepare_greeting(const char *incarnation)
{
	unsigned long long number;
	char *end;

	number = strtoull(incarnation, &end, 16);
	if (end - incarnation != 16 || *end)
		die("the runtime's incarnation is damaged");
	for (size_t at = 16; at < 48; at += 16) {
		memcpy(greeting + at, "\xfd\x63\x74\x78\x66\x73\0", 8);
		for (int i = 0; i < 8; i++)
			greeting[at + 8 + (size_t)i] = (unsigned char)(number >> (56 - 8 * i));
	}
	greeting[49] = greeting[51] = 1;
}

/* Connects to the operator's socket, and says whose the connection is; a new socket has room. */
static bool reach(struct connection *c)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	enum header header = c->network->header;
	size_t count = header == COUNTERS ? payer_count : 0;
	int fd = c->sides[1].fd;

	memcpy(address.sun_path, c->network->path, strlen(c->network->path));
	if (!c->connected && connect(fd, (struct sockaddr *)&address, sizeof address) < 0)
		return false;
	c->connected = true;
	return header == NO_HEADER ||
	       send_message(fd, greeting, sizeof greeting, payers, count) == sizeof greeting;
}

/* Begins to pass, now or later. */
static void connect_out(struct connection *c)
{
	if (!reach(c)) {
		/* Its queue is full, or descriptors of all relays that nobody took yet are too
		 * many. */
		if (errno == EAGAIN || errno == ETOOMANYREFS) {
			set_waiting(c, true);
			if (now_ms() - c->begun >= BUSY_MS)
				c->network->trouble = EAGAIN;
			return;
		}
		c->network->trouble = (unsigned long long)errno;
		end_connection(c, true);
		return;
	}
	set_waiting(c, false);
	if (c->network->trouble < TROUBLE_LIMIT)
		c->network->trouble = 0;
	for (int i = 0; i < 2; i++)
		watch(c->sides[i].fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, &c->sides[i]);
}

static void begin(struct listener *listener, int fd, unsigned slot)
{
	struct connection *c = calloc(1, sizeof *c);
	int yes = 1, out = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	if (!c || out < 0) {
		free(c);
		close_quietly(out);
		close(fd);
		free_slot(slot);
		return;
	}
	c->listener = listener;
	c->network = listener->network;
	c->begun = now_ms();
	if (!listener->local)
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
	c->slot = slot;
	c->sides[0] = (struct side){.kind = SIDE, .fd = fd, .connection = c};
	c->sides[1] = (struct side){.kind = SIDE, .fd = out, .connection = c};
	c->next = connections.next;
	c->previous = &connections;
	c->next->previous = connections.next = c;
	open_count++;
	count_open(c->network, 1);
	add(c->network, offsetof(struct line, connections), 1);
	connect_out(c);
}

/* Whether a path of a process's cgroup is the agent's, and no child's. */
static bool is_agents(const char *path)
{
	size_t n = strlen(cgroup);

	if (strncmp(path, cgroup, n) || path[n] != '/')
		return false;
	return strncmp(path + n, "/child/", 7) != 0;
}

/* Whether the process at the other end of a Unix socket is the agent's. */
static bool serves(int fd)
{
	struct ucred peer;
	socklen_t length = sizeof peer, size = sizeof(int);
	char path[64], line[PATH_MAX + 16];
	bool found = false, there = true;
	FILE *file;
	int held;

	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) < 0 || peer.pid <= 0)
		return false;
	snprintf(path, sizeof path, "/proc/%d/cgroup", peer.pid);
	file = fopen(path, "re");
	while (file && fgets(line, sizeof line, file)) {
		line[strcspn(line, "\n")] = 0;
		if (!strncmp(line, "0::", 3))
			found = is_agents(line + 3);
	}
	if (file)
		fclose(file);
	if (!found)
		return false;
	/* After the look: a process that is still there had that pid all the time. Before Linux
	 * 6.5, only the number tells. */
	if (getsockopt(fd, SOL_SOCKET, PEERPIDFD, &held, &size) == 0) {
		there = syscall(SYS_pidfd_send_signal, held, 0, NULL, 0) == 0 || errno == EPERM;
		close(held);
	} else if (errno != ENOPROTOOPT) {
		there = false;
	}
	return there;
}

static void accept_one(struct listener *listener)
{
	unsigned slot;
	int fd;

	if (open_count >= CONNECTIONS_MAX || !take_slot(&slot)) {
		pause_listeners(true);
		return;
	}
	fd = accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	if (fd < 0) {
		free_slot(slot);
		if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
			pause_listeners(true);
		return;
	}
	if ((listener->local && !serves(fd)) || !strcmp(listener->network->path, "-") ||
	    !is_open(listener->network)) {
		if (!listener->local)
			set_reset(fd);
		close(fd);
		free_slot(slot);
		return;
	}
	begin(listener, fd, slot);
}

static void hear(struct side *side, uint32_t events)
{
	struct connection *c = side->connection;
	int error = 0;
	socklen_t length = sizeof error;

	if (c->closed)
		return;
	if (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR))
		side->readable = true;
	if (events & (EPOLLOUT | EPOLLHUP | EPOLLERR))
		side->writable = true;
	if (events & EPOLLERR &&
	    getsockopt(side->fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error) {
		end_connection(c, true);
		return;
	}
	if (events & EPOLLHUP)
		side->done = side->gone = true;	/* it may have sent something before */
	pump(c);
}

/* What nobody tells: closed networks, limits that others reached, queues with room again. */
static void look(void)
{
	struct connection *next;

	for (struct connection *c = connections.next; c != &connections; c = next) {
		next = c->next;
		if (!is_open(c->network))
			end_connection(c, true);
		else if (c->listener->waiting == c)
			connect_out(c);
	}
	pause_listeners(false);
}

static bool any_trouble(void)
{
	bool found = false;

	for (size_t i = 0; i < network_count; i++) {
		report_trouble(&networks[i]);
		found |= networks[i].trouble != load(&networks[i].lines[0]->trouble);
	}
	return found;
}

static bool pump_pending(void)
{
	struct connection *next;
	bool found = false;

	for (struct connection *c = connections.next; c != &connections; c = next) {
		next = c->next;
		if (c->pending)
			pump(c);
	}
	for (struct connection *c = connections.next; c != &connections; c = c->next)
		found |= c->pending;
	return found;
}

static void serve(int keeper)
{
	long long due = now_ms() + LOOK_MS;
	bool pending = false;

	watch(keeper, EPOLLRDHUP, &keeper_kind);
	for (size_t i = 0; i < listener_count; i++)
		watch(listeners[i].fd, EPOLLIN, &listeners[i]);
	for (;;) {
		struct epoll_event events[EVENTS];
		bool trouble = any_trouble();
		long long left = due - now_ms();
		int timeout = -1, n;

		if (pending)
			timeout = 0;
		else if (open_count || paused || trouble)
			timeout = left > 0 ? (int)left : 0;
		n = epoll_wait(poller, events, EVENTS, timeout);
		for (int i = 0; i < n; i++) {
			enum kind *kind = events[i].data.ptr;

			if (*kind == KEEPER)
				return;
			if (*kind == LISTENER)
				accept_one((struct listener *)(void *)kind);
			else
				hear((struct side *)(void *)((char *)kind - offsetof(struct side, kind)),
				     events[i].events);
		}
		free_closed();
		if (now_ms() >= due) {
			look();
			due = now_ms() + LOOK_MS;
		}
		pending = pump_pending();
		free_closed();
	}
}

/* The start. */

static struct counters *map_counters(int fd)
{
	struct counters *found = mmap(NULL, COUNTERS_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (found == MAP_FAILED)
		die("the counters: %m");
	if (found->version != COUNTERS_VERSION)
		die("the counters are of another version");
	return found;
}

static enum header header_of(const char *word)
{
	if (!strcmp(word, "proxy"))
		return PROXY;
	return !strcmp(word, "counters") ? COUNTERS : NO_HEADER;
}

static void take_payers(struct orders *orders)
{
	unsigned *fds = take_numbers(orders, INT_MAX, &payer_count);

	if (payer_count > LEVELS_MAX)
		die("the runtime's list of payers is damaged");
	for (size_t i = 0; i < payer_count; i++)
		payers[i] = (int)fds[i];
	free(fds);
}

static void take_networks(struct orders *orders, struct counters **levels)
{
	struct list *lists = take_lists(orders, &network_count);

	networks = calloc(network_count + 1, sizeof *networks);
	if (!networks)
		die("%m");
	for (size_t i = 0; i < network_count; i++) {
		struct network *network = &networks[i];

		if (lists[i].count != 3 + level_count ||
		    strlen(lists[i].items[1]) >= sizeof((struct sockaddr_un *)NULL)->sun_path)
			die("the runtime's list of networks is damaged");
		network->name = lists[i].items[0];
		network->path = lists[i].items[1];
		network->header = header_of(lists[i].items[2]);
		network->reported = -REPORT_MS;
		for (size_t j = 0; j < level_count; j++) {
			unsigned long long number;

			if (!parse_number(lists[i].items[3 + j], COUNTERS_LINES - 1, &number))
				die("the runtime's list of networks is damaged");
			network->lines[j] = &levels[j]->lines[number];
		}
		network->trouble = load(&network->lines[0]->trouble);
		count_open(network, 0);
	}
	free(lists);
}

static int connect_keeper(const char *directory, const char *name)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int held = open(directory, O_PATH | O_DIRECTORY | O_CLOEXEC);
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	/* sun_path holds 108 bytes */
	snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d/%.80s", held, name);
	if (held < 0 || fd < 0)
		die("the cell's keeper: %m");
	if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0) {
		if (errno == ECONNREFUSED || errno == ENOENT)
			exit(0);	/* there is no cell (any more) */
		die("the cell's keeper: %m");
	}
	close(held);
	return fd;
}

/* The keeper names each listening socket: "s" or "p" for socket or port, and the network. */
static void take_listeners(int keeper)
{
	static char message[DESCRIPTORS_MAX * 80];
	int fds[DESCRIPTORS_MAX];
	size_t count;
	ssize_t n = receive_message(keeper, message, sizeof message, fds, &count);
	struct orders named;

	if (n <= 0)
		exit(0);	/* there is no cell (any more) */
	named = split_message(message, (size_t)n);
	listeners = calloc(count + 1, sizeof *listeners);
	if (!listeners)
		die("%m");
	for (size_t i = 0; i < count; i++) {
		const char *word = take_word(&named);

		for (size_t j = 0; j < network_count; j++) {
			if (strcmp(networks[j].name, word + (*word != 0)))
				continue;
			listeners[listener_count++] = (struct listener){
				.kind = LISTENER, .fd = fds[i], .local = *word == 's',
				.network = &networks[j]};
		}
	}
	if (!all_taken(&named))
		die("the keeper's list of networks is damaged");
}

int main(int argc, char **argv)
{
	struct orders orders = orders_of_arguments(argc, argv);
	const char *directory = take_word(&orders), *name = take_word(&orders);
	struct counters *levels[LEVELS_MAX];
	unsigned *level_fds;
	struct ids ids;
	int keeper;

	cgroup = take_word(&orders);
	ids = take_ids(&orders);
	owners_fd = take_descriptor(&orders);
	slots_max = (unsigned)take_number(&orders, INT_MAX);
	prepare_greeting(take_word(&orders));
	take_payers(&orders);
	level_fds = take_numbers(&orders, INT_MAX, &level_count);
	if (orders.damaged || !level_count || level_count > LEVELS_MAX)
		die(USAGE);
	for (size_t i = 0; i < level_count; i++)
		levels[i] = map_counters((int)level_fds[i]);
	take_networks(&orders, levels);
	if (!all_taken(&orders))
		die(USAGE);
	own = levels[0];
	own_fd = (int)level_fds[0];
	held_slots = calloc(slots_max + 1, sizeof *held_slots);
	if (!held_slots)
		die("%m");
	for (size_t i = 1; i < level_count; i++)
		close((int)level_fds[i]);
	stand_beside("ctx-relay");
	keeper = connect_keeper(directory, name);
	if (leave_keyring() < 0 || become_groups(&ids) < 0 || become(&ids) < 0 ||
	    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0 || chdir("/") < 0)
		die("the relay's ids: %m");
	take_listeners(keeper);
	poller = epoll_create1(EPOLL_CLOEXEC);
	if (poller < 0)
		die("epoll_create1: %m");
	/* so that relays of one owner do not all try the same bytes first */
	next_slot = slots_max ? (unsigned)getpid() % slots_max : 0;
	serve(keeper);
	return 0;
}
