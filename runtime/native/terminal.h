/*
 * terminal: who looks at a program's terminal, and types there.
 *
 * A viewer is one end of a SOCK_SEQPACKET pair that the daemon hands over (inlet.h); whoever has
 * the other end is an operator of the agent. Packets have at most PACKET_MAX bytes, and others are
 * ignored; the first byte is the kind.
 *
 *     from the viewer   i BYTES        typed
 *                       w COLSxROWS    the size of its screen
 *                       d              it leaves, and the program goes on
 *     to the viewer     m BYTES        sequences for the modes in force: first of all, and after "l"
 *                       t BYTES        the last output, if the main screen is shown
 *                       o BYTES        output
 *                       l N            so many bytes of the output are not shown
 *                       n TEXT         a notice
 *                       q 0 or q 1     whether its screen is to answer what the program asks from
 *                                      here on; it is as long as nothing is said
 *                       x TEXT         how the program ended; nothing follows
 *
 * A viewer that takes nothing holds up the program for PATIENCE_MS; from then on, WAITING_MAX bytes
 * wait for it, and what is over is lost to it. Once it has caught up, it may hold it up again. If
 * it has lost nothing, its screen is right: the program is not made to draw all anew for it, which
 * the others would see.
 * While TYPED_MAX bytes of input wait for the program, no viewer is heard.
 *
 * A program that asks its terminal something expects one answer: it is asked of the viewer that
 * typed or resized last.
 *
 * Nothing here waits for a viewer, and everything has a fixed size. The two threads of the monitor
 * share it: who has the mutex of the record may use it.
 */
#ifndef CTXFS_TERMINAL_H
#define CTXFS_TERMINAL_H

#include <poll.h>
#include <sys/ioctl.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>

#include "common.h"
#include "inlet.h"
#include "modes.h"
#include "orders.h"

#define VIEWERS_MAX 8		/* at the same time */
#define VIEWERS_EVER 4000	/* of one run: each has two lines in its record */
#define PACKET_MAX 8192
#define PATIENCE_MS 2000
#define WAITING_MAX (256 << 10)
#define TYPED_MAX (64 << 10)
#define HEARD_MAX 32		/* packets of a viewer in turn */
#define SIDE_MAX 1000		/* of a terminal */
#define TEXT_MAX 600		/* of notices and ends */

/* SO_PASSRIGHTS of Linux 6.16, missing in older headers */
#define PASS_RIGHTS 83

struct viewer {
	int fd;			/* or -1 */
	unsigned number;
	bool look, hangup;
	unsigned cols, rows;	/* 0: not said */
	long long grace_ms;
	bool fresh;		/* it has got nothing yet */
	bool stale;		/* it has lost output, and is to get the modes again */
	bool untold;		/* of the last notice */
	bool answers;		/* as it was told */
	bool behind;		/* its patience is over */
	long long since;	/* when something began to wait that it does not take; or 0 */
	unsigned long long lost;
	size_t begun, length;	/* of the output that waits */
	char *waiting;		/* WAITING_MAX bytes */
};

/* Why a viewer leaves. */
enum leaving { STAYS, DETACHED, CLOSED, ENDED };

/* What is large is last: most runs never touch it. */
struct terminal {
	struct viewer viewers[VIEWERS_MAX];
	unsigned cols, rows;	/* as they are to be; 0: as they are */
	const struct viewer *last;	/* that typed or resized, and is there; or NULL */
	bool said;		/* the program has written something */
	bool redraw;		/* somebody came or caught up: the program is to draw all anew */
	bool over;		/* all output of the program is told, and its end is to be */
	char notice[TEXT_MAX], end[TEXT_MAX];
	size_t typed;
	struct modes modes;
	char input[TYPED_MAX + PACKET_MAX];
	char waiting[VIEWERS_MAX][WAITING_MAX];
};

/* What keeper.c sends must be the master of a pair in a devpts: the call for anything else may
 * take as long as its owner likes. */
static inline bool is_master(int fd)
{
	struct statfs where;
	struct stat st;
	int number;

	return fstat(fd, &st) == 0 && S_ISCHR(st.st_mode) && st.st_rdev == makedev(5, 2) &&
	       fstatfs(fd, &where) == 0 && where.f_type == DEVPTS_SUPER_MAGIC &&
	       ioctl(fd, TIOCGPTN, &number) == 0;
}

static inline void begin_terminal(struct terminal *t)
{
	reset_modes(&t->modes);
	for (size_t i = 0; i < VIEWERS_MAX; i++) {
		t->viewers[i].fd = -1;
		t->viewers[i].waiting = t->waiting[i];
	}
}

static inline void take_size(struct terminal *t, const struct viewer *v)
{
	if (v->look || !v->cols)
		return;
	t->cols = v->cols;
	t->rows = v->rows;
	t->last = v;
}

/* Forgets one that has left; another answers what the program asks. */
static inline void let_go(struct terminal *t, struct viewer *gone)
{
	close(gone->fd);
	gone->fd = -1;
	if (t->last != gone)
		return;
	t->last = NULL;
	for (const struct viewer *v = t->viewers; v < t->viewers + VIEWERS_MAX; v++)
		if (v->fd >= 0 && !v->look && v->cols)
			t->last = v;
}

/* Lets somebody look; returns false, and does not take the descriptor, if there is no place. */
static inline bool let_look(struct terminal *t, const struct viewing *asked, int fd)
{
	for (struct viewer *v = t->viewers; v < t->viewers + VIEWERS_MAX; v++) {
		if (v->fd >= 0 || asked->number > VIEWERS_EVER)
			continue;
		v->fd = fd;
		v->number = asked->number;
		v->look = asked->look;
		v->hangup = asked->hangup;
		v->cols = asked->cols <= SIDE_MAX ? asked->cols : SIDE_MAX;
		v->rows = asked->rows <= SIDE_MAX ? asked->rows : SIDE_MAX;
		v->grace_ms = (long long)asked->grace_ms;
		v->fresh = true;
		v->stale = v->untold = v->behind = false;
		v->answers = true;
		v->since = 0;
		v->lost = v->begun = v->length = 0;
		/* or to close what somebody sends could take long */
		(void)setsockopt(fd, SOL_SOCKET, PASS_RIGHTS, &(int){0}, sizeof(int));
		take_size(t, v);
		return true;
	}
	return false;
}

/* What viewers are told. */

static inline bool tell(struct viewer *v, char kind, const char *data, size_t length)
{
	struct iovec parts[] = {{&kind, 1}, {(void *)(uintptr_t)data, length}};
	struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};

	if (sendmsg(v->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) {
		v->since = 0;
		return true;
	}
	if (!v->since)
		v->since = now_ms();
	return false;
}

/* Tells data in packets; returns the length of what was taken. */
static inline size_t tell_part(struct viewer *v, char kind, const char *data, size_t length)
{
	size_t told = 0;

	while (told < length) {
		size_t part = length - told < PACKET_MAX - 1 ? length - told : PACKET_MAX - 1;

		if (!tell(v, kind, data + told, part))
			break;
		told += part;
	}
	return told;
}

static inline bool tell_text(struct viewer *v, char kind, const char *text)
{
	return tell(v, kind, text, strlen(text));
}

/* Tells a viewer, before output, if that has changed. */
static inline bool tell_who_answers(const struct terminal *t, struct viewer *v)
{
	bool answers = !t->last || t->last == v || v->look;

	if (answers != v->answers && !tell_text(v, 'q', answers ? "1" : "0"))
		return false;
	v->answers = answers;
	return true;
}

static inline bool tell_modes(struct terminal *t, struct viewer *v)
{
	static const char main_screen[] = "\033[?1047l";
	char text[sizeof main_screen - 1 + MODES_MAX];
	const char *tail, *rest;
	size_t length = 0, tail_length, rest_length;

	if (!v->fresh) {
		length = sizeof main_screen - 1;
		memcpy(text, main_screen, length);
	}
	length += write_modes(&t->modes, !v->fresh, text + length);
	if (!tell(v, 'm', text, length))
		return false;
	tail = tail_of(&t->modes, &tail_length);
	if (v->fresh && tail_length) {
		/* which changes modes, too */
		if (tell_part(v, 't', tail, tail_length) < tail_length)
			return false;
		length = write_modes(&t->modes, true, text);
		if (!tell(v, 'm', text, length))
			return false;
	}
	rest = unfinished(&t->modes, &rest_length);
	return !rest_length || tell(v, 'o', rest, rest_length);
}

/* Tells a viewer what it is to get, as far as it takes it. */
static inline enum leaving serve_viewer(struct terminal *t, struct viewer *v)
{
	size_t told = tell_part(v, 'o', v->waiting + v->begun, v->length);

	v->begun += told;
	v->length -= told;
	if (v->length)
		return STAYS;
	v->begun = 0;
	if (v->lost) {
		char count[32];

		snprintf(count, sizeof count, "%llu", v->lost);
		if (!tell_text(v, 'l', count))
			return STAYS;
		v->lost = 0;
		v->stale = true;
	}
	if (v->fresh || v->stale) {
		if (!tell_modes(t, v))
			return STAYS;
		v->fresh = v->stale = false;
		t->redraw = true;
	}
	if (!tell_who_answers(t, v))
		return STAYS;
	if (v->untold) {
		if (!tell_text(v, 'n', t->notice))
			return STAYS;
		v->untold = false;
	}
	v->behind = false;
	return t->over && tell_text(v, 'x', t->end) ? ENDED : STAYS;
}

/* Whether a viewer is to be served as soon as it takes something. */
static inline bool is_owed(const struct terminal *t, const struct viewer *v)
{
	return v->length || v->lost || v->fresh || v->stale || v->untold || t->over;
}

static inline void tell_output_to(const struct terminal *t, struct viewer *v, const char *data,
				  size_t length)
{
	size_t told = 0;

	if (v->fresh)
		return;	/* it is in the tail, which is to be told */
	if (!v->length && !v->lost && !v->stale && tell_who_answers(t, v))
		told = tell_part(v, 'o', data, length);
	data += told;
	length -= told;
	if (length && !v->lost && !v->stale) {
		size_t room = WAITING_MAX - v->length, part = length < room ? length : room;

		if (v->begun)
			memmove(v->waiting, v->waiting + v->begun, v->length);
		v->begun = 0;
		memcpy(v->waiting + v->length, data, part);
		v->length += part;
		length -= part;
	}
	v->lost += length;
}

/* Takes what the program wrote. */
static inline void tell_output(struct terminal *t, const char *data, size_t length)
{
	t->said = true;
	follow_output(&t->modes, data, length);
	for (struct viewer *v = t->viewers; v < t->viewers + VIEWERS_MAX; v++)
		if (v->fd >= 0)
			tell_output_to(t, v, data, length);
}

static inline void tell_notice(struct terminal *t, const char *text)
{
	snprintf(t->notice, sizeof t->notice, "%s", text);
	for (struct viewer *v = t->viewers; v < t->viewers + VIEWERS_MAX; v++)
		v->untold = v->fd >= 0;
}

/* When the patience of one is over that holds up the program; -1 if none does. */
static inline long long held_until(struct terminal *t)
{
	long long now = now_ms(), last = -1;

	for (struct viewer *v = t->viewers; v < t->viewers + VIEWERS_MAX; v++) {
		if (v->fd < 0 || !v->since || v->behind)
			continue;
		if (now - v->since >= PATIENCE_MS)
			v->behind = true;
		else if (v->since + PATIENCE_MS > last)
			last = v->since + PATIENCE_MS;
	}
	return last;
}

/* They have time anew to take what waits. */
static inline void be_patient(struct terminal *t)
{
	for (struct viewer *v = t->viewers; v < t->viewers + VIEWERS_MAX; v++) {
		v->behind = false;
		v->since = 0;
	}
}

/* What viewers say. */

static inline bool read_side(const char *text, unsigned *side)
{
	unsigned long long number;

	if (!parse_number(text, SIDE_MAX, &number) || !number)
		return false;
	*side = (unsigned)number;
	return true;
}

static inline bool read_size(const char *data, size_t length, unsigned *cols, unsigned *rows)
{
	char text[16], *x;

	if (length >= sizeof text || memchr(data, 0, length))
		return false;
	memcpy(text, data, length);
	text[length] = 0;
	x = strchr(text, 'x');
	if (!x)
		return false;
	*x = 0;
	return read_side(text, cols) && read_side(x + 1, rows);
}

static inline bool takes_input(const struct terminal *t)
{
	return t->typed < TYPED_MAX;
}

/* Hears a viewer; of one that is gone, CLOSED, all that it has said before. */
static inline enum leaving hear_viewer(struct terminal *t, struct viewer *v, bool closed)
{
	char packet[PACKET_MAX];

	for (int i = 0; closed || (i < HEARD_MAX && (v->look || takes_input(t))); i++) {
		ssize_t n = recv(v->fd, packet, sizeof packet, MSG_DONTWAIT | MSG_TRUNC);
		size_t length = n > 0 ? (size_t)n - 1 : 0;
		unsigned cols, rows;

		if (n < 0 && (errno == EINTR || errno == ECONNRESET))
			continue;
		if (n < 0)
			return errno == EAGAIN && !closed ? STAYS : CLOSED;
		if (n == 0 && closed)
			return CLOSED;
		if (n == 0 || n > PACKET_MAX)
			continue;
		if (packet[0] == 'd' && !length)
			return DETACHED;
		if (packet[0] == 'i' && !v->look && takes_input(t)) {
			memcpy(t->input + t->typed, packet + 1, length);
			t->typed += length;
			take_size(t, v);
		} else if (packet[0] == 'w' && read_size(packet + 1, length, &cols, &rows)) {
			v->cols = cols;
			v->rows = rows;
			take_size(t, v);
		}
	}
	return STAYS;
}

/* Fills in what to poll: VIEWERS_MAX of them. */
static inline void watch_viewers(const struct terminal *t, struct pollfd *fds)
{
	for (size_t i = 0; i < VIEWERS_MAX; i++) {
		const struct viewer *v = &t->viewers[i];

		fds[i] = (struct pollfd){.fd = v->fd, .events = POLLRDHUP};
		if (v->look || takes_input(t))
			fds[i].events |= POLLIN;
		if (v->fd >= 0 && is_owed(t, v))
			fds[i].events |= POLLOUT;
	}
}

#endif
