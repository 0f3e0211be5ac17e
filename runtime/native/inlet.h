/*
 * inlet: what a daemon hands to a monitor: bytes for standard input, and a window.
 *
 * The daemon makes the listening SOCK_SEQPACKET socket, in a directory of its own, and connects
 * to it. It waits for no answer: what it sent stays in the kernel's queue when the daemon dies,
 * and a full queue is its flow control. Peers are served in the order in which they came, so
 * that the bytes of a daemon that died come before those of the next.
 *
 * The first byte of each packet is its kind:
 *
 *     'v' VERSION		of the sender: the first packet of both sides
 *     'i' and a struct bytes	bytes for standard input, at most INLET_MAX
 *     'w' and a struct handed	with a descriptor: a window. It hangs up when whoever holds the
 *				other end is gone. Nothing is ever read from it.
 *     'w'			the window again, for a daemon that has begun since; answered
 *				by the same, with a descriptor unless there is none any more
 *     't' and a struct viewing	with a descriptor: a viewer of the program's terminal (terminal.h)
 *     'n' TEXT			a notice for all viewers
 *     'x' TEXT			what viewers are told at the end, whatever the program says
 *     '?' KIND			the answer to a packet of a kind that is unknown here
 *
 * Bytes of message 0 are taken as they come. Those of another message are at an offset of one
 * of its lines, of which it may have several, and are taken once: so a daemon begins with the
 * first byte of a message that an earlier daemon may have told in part. If a message is told
 * that begins in the midst of a line, a newline comes before it.
 */
#ifndef CTXFS_INLET_H
#define CTXFS_INLET_H

#include <poll.h>
#include <stdatomic.h>
#include <stddef.h>

#include "common.h"

#define INLET_VERSION 1	/* the same as in runtime/cell/inlet.py */
#define INLET_MAX 7168
#define PEERS_MAX 4
/* Of pollfds: the listening socket and all peers. */
#define INLET_FDS (1 + PEERS_MAX)

struct bytes {
	char kind;
	uint8_t line;	/* of the message */
	char unused[6];
	uint64_t message, offset;
	char data[INLET_MAX];
};

struct handed {
	char kind;
	char unused[7];
	uint64_t grace_ms;	/* after a hang-up */
};

struct viewing {
	char kind;
	uint8_t look, hangup;
	char unused;
	uint32_t number, uid;
	uint16_t cols, rows;	/* or 0 */
	uint64_t grace_ms;	/* after a hang-up */
};

/* Belongs to the thread that serves the socket; but what is in data, up to length, belongs to
 * whoever writes it, until that sets length to 0. */
struct inlet {
	int listener;	/* or -1: nothing is taken */
	int peers[PEERS_MAX];
	bool waits[PEERS_MAX];	/* has bytes, for which there is no room yet */
	size_t count;
	int window;		/* or -1 */
	long long grace_ms;
	/* takes a packet about viewers, if there can be any; whether there may be more */
	bool (*take_viewing)(int peer);
	/* what was taken last */
	uint64_t message, taken;
	uint8_t line;
	bool open;	/* it did not end with a newline */
	bool room;	/* for more, of the first peer that has any */
	atomic_size_t length;
	char data[1 + INLET_MAX];	/* with a newline before it */
};

static inline void close_inlet(struct inlet *in)
{
	while (in->count)
		close(in->peers[--in->count]);
	close_quietly(in->listener);
	in->listener = -1;
}

/* Fills in what to poll; returns the number, at most INLET_FDS. */
static inline size_t watch_inlet(const struct inlet *in, struct pollfd *fds)
{
	fds[0] = (struct pollfd){.fd = in->count < PEERS_MAX ? in->listener : -1, .events = POLLIN};
	for (size_t i = 0; i < in->count; i++)
		fds[1 + i] = (struct pollfd){.fd = in->waits[i] ? -1 : in->peers[i], .events = POLLIN};
	return 1 + in->count;
}

static inline void tell_peer(int peer, char kind, char what)
{
	(void)!send(peer, (char[]){kind, what}, 2, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static inline void accept_peers(struct inlet *in)
{
	while (in->count < PEERS_MAX) {
		struct ucred who = {.uid = (uid_t)-1};
		socklen_t size = sizeof who;
		int peer = accept4(in->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

		if (peer < 0)
			return;
		getsockopt(peer, SOL_SOCKET, SO_PEERCRED, &who, &size);
		if (who.uid && who.uid != geteuid()) {
			close(peer);
			continue;
		}
		tell_peer(peer, 'v', INLET_VERSION);
		in->waits[in->count] = false;
		in->peers[in->count++] = peer;
	}
}

/* Takes what is new of a packet. */
static inline void take_bytes(struct inlet *in, const struct bytes *sent, size_t length)
{
	uint64_t skipped = 0;
	size_t begun = 0;

	if (sent->message && sent->message == in->message && sent->line <= in->line) {
		/* a line is told once, also if the next daemon would word it otherwise */
		if (sent->line < in->line || !in->open)
			return;
		skipped = in->taken > sent->offset ? in->taken - sent->offset : 0;
		if (skipped >= length)
			return;
	} else if (sent->message) {
		if (in->open)
			in->data[begun++] = '\n';
		in->message = sent->message;
		in->line = sent->line;
		in->taken = 0;
	}
	length -= skipped;
	memcpy(in->data + begun, sent->data + skipped, length);
	in->taken += length;
	in->open = sent->data[skipped + length - 1] != '\n';
	in->room = false;
	in->length = begun + length;
}

static inline bool take_window(struct inlet *in, int peer)
{
	int fds[DESCRIPTORS_MAX];
	struct handed handed;
	size_t count;
	ssize_t n = receive_message(peer, &handed, sizeof handed, fds, &count);

	if (n == sizeof handed && count == 1) {
		close_quietly(in->window);
		in->window = fds[0];
		in->grace_ms = (long long)handed.grace_ms;
		return true;
	}
	while (count)
		close(fds[--count]);
	if (n == 1)
		(void)!send_message(peer, "w", 1, &in->window, in->window >= 0);
	return n > 0;
}

/* Takes one packet of a peer; returns whether there may be more. */
static inline bool take_packet(struct inlet *in, size_t i)
{
	const size_t head = offsetof(struct bytes, data);
	struct bytes sent;
	char kind;
	ssize_t n = recv(in->peers[i], &kind, 1, MSG_PEEK | MSG_DONTWAIT);

	if (n == 1 && kind == 'i' && !in->room) {
		in->waits[i] = true;
		return false;
	}
	if (n == 1 && kind == 'w')
		return take_window(in, in->peers[i]);
	if (n == 1 && in->take_viewing && (kind == 't' || kind == 'n' || kind == 'x'))
		return in->take_viewing(in->peers[i]);
	if (n == 1)
		n = recv(in->peers[i], &sent, sizeof sent, MSG_DONTWAIT);
	if (n < 0 && (errno == EINTR || errno == ECONNRESET))	/* it left answers unread */
		return true;
	if (n < 0 && errno == EAGAIN)
		return false;
	if (n <= 0 || (kind == 'v' && (n != 2 || sent.line != INLET_VERSION))) {
		close(in->peers[i]);
		in->peers[i] = -1;
		return false;
	}
	if (kind == 'i' && (size_t)n > head)
		take_bytes(in, &sent, (size_t)n - head);
	else if (kind != 'v' && kind != '?')
		tell_peer(in->peers[i], '?', kind);
	return true;
}

/* Serves what is ready, and who waited, if there is room. */
static inline void serve_inlet(struct inlet *in, const struct pollfd *fds)
{
	size_t kept = 0;

	in->room = !in->length;
	for (size_t i = 0; i < in->count; i++) {
		if (fds[1 + i].revents || (in->waits[i] && in->room)) {
			in->waits[i] = false;
			while (in->peers[i] >= 0 && take_packet(in, i))
				;
		}
	}
	for (size_t i = 0; i < in->count; i++) {
		if (in->peers[i] < 0)
			continue;
		in->waits[kept] = in->waits[i];
		in->peers[kept++] = in->peers[i];
	}
	in->count = kept;
	if (fds[0].revents)
		accept_peers(in);
}

/* Writes some of what was taken, from WRITTEN on; returns whether somebody still reads it. */
static inline bool write_taken(struct inlet *in, int pipe, size_t *written)
{
	ssize_t n = write(pipe, in->data + *written, in->length - *written);

	if (n < 0)
		return errno == EAGAIN || errno == EINTR;
	*written += (size_t)n;
	if (*written == in->length) {
		*written = 0;
		in->length = 0;
	}
	return true;
}

#endif
