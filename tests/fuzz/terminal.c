/*
 * terminal: gives the monitor's terminal.h and modes.h what others choose, for tests and fuzzing.
 *
 *     terminal < REQUESTS > ANSWERS
 *
 * A request is a length of four bytes and so many bytes, which are steps: a kind, a length of two
 * bytes, and so many bytes for it. The answer is the same: what puts another terminal into the
 * modes that are in force at the end. What must hold is asserted.
 *
 *     'o' BYTES    the program writes
 *     'N' BYTES    viewer N, a digit, sends a packet; if it is not there, another comes
 *     'T' NUMBER   viewer NUMBER, a byte, takes all that it was told
 *     'G' NUMBER   viewer NUMBER goes
 *     't' BYTES    the program takes what was typed
 */
#define _GNU_SOURCE
#include <assert.h>
#include <ctype.h>

#include "terminal.h"

static struct terminal terminal, again;
static int others[VIEWERS_MAX];

static void take_all(size_t i)
{
	char packet[PACKET_MAX + 1];
	ssize_t n;

	while (others[i] >= 0 && (n = recv(others[i], packet, sizeof packet, MSG_DONTWAIT)) > 0) {
		assert(n <= PACKET_MAX);
		assert(strchr("motlnqx", packet[0]));
	}
}

/* The viewer of a place, and its other end, leave. */
static void go(size_t i)
{
	struct viewer *v = &terminal.viewers[i];

	if (v->fd >= 0) {
		close(others[i]);
		others[i] = -1;
		assert(hear_viewer(&terminal, v, true) != STAYS);
		let_go(&terminal, v);
	}
}

/* To the first place that is free. */
static void come(bool look)
{
	struct viewing asked = {.number = 1, .look = look, .cols = 80, .rows = 24};
	int ends[2];

	assert(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, ends) == 0);
	assert(let_look(&terminal, &asked, ends[0]));
	for (size_t i = 0; i < VIEWERS_MAX; i++)
		if (terminal.viewers[i].fd == ends[0])
			others[i] = ends[1];
}

/* Whether it is sequences that set something, and nothing else. */
static void check_modes(const char *text, size_t length)
{
	for (size_t i = 0; i < length; i++) {
		assert(text[i] == ESC && i + 1 < length);
		i++;
		if (text[i] == '=' || text[i] == '>')
			continue;
		assert(text[i] == '[');
		for (i++; i < length && !isalpha((unsigned char)text[i]); i++)
			assert(strchr("0123456789;?<> ", text[i]));
		assert(i < length && strchr("hlqmu", text[i]));
	}
}

static void check(void)
{
	assert(terminal.typed <= sizeof terminal.input);
	assert(terminal.cols <= SIDE_MAX && terminal.rows <= SIDE_MAX);
	assert(terminal.modes.kept <= sizeof terminal.modes.tail);
	assert(!terminal.last || (terminal.last->fd >= 0 && !terminal.last->look));
	for (size_t i = 0; i < VIEWERS_MAX; i++) {
		const struct viewer *v = &terminal.viewers[i];

		assert(v->begun + v->length <= WAITING_MAX);
	}
}

static void step(char kind, const char *data, size_t length)
{
	size_t i = (size_t)(kind - '1');

	if (kind == 'o') {
		tell_output(&terminal, data, length);
		for (size_t k = 0; k < length; k++)	/* as the other, however it is split */
			follow_output(&again.modes, data + k, 1);
	} else if (kind == 't') {
		terminal.typed -= length < terminal.typed ? length : terminal.typed;
	} else if ((kind == 'T' || kind == 'G') && length && (unsigned char)*data < VIEWERS_MAX) {
		i = (unsigned char)*data;
		if (kind == 'T')
			take_all(i);
		else
			go(i);
	} else if (kind >= '1' && kind <= '8') {
		if (terminal.viewers[i].fd < 0)
			come(i == VIEWERS_MAX - 1);
		if (terminal.viewers[i].fd < 0)
			return;
		(void)!send(others[i], data, length, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (hear_viewer(&terminal, &terminal.viewers[i], false) != STAYS)
			go(i);
	}
	for (i = 0; i < VIEWERS_MAX; i++)
		if (terminal.viewers[i].fd >= 0)
			serve_viewer(&terminal, &terminal.viewers[i]);
	held_until(&terminal);
	check();
}

static size_t answer(const char *data, size_t size, char *modes)
{
	char all[MODES_MAX];
	size_t length, other, tail, tail_again;
	const char *kept, *kept_again;

	begin_terminal(&terminal);
	begin_terminal(&again);
	memset(others, -1, sizeof others);
	for (size_t at = 0; at + 3 <= size;) {
		size_t part = (unsigned char)data[at + 1] * 256U + (unsigned char)data[at + 2];

		part = part < size - at - 3 ? part : size - at - 3;
		step(data[at], data + at + 3, part);
		at += 3 + part;
	}
	for (size_t i = 0; i < VIEWERS_MAX; i++)
		go(i);
	length = write_modes(&terminal.modes, true, modes);
	assert(length < MODES_MAX);
	check_modes(modes, length);
	other = write_modes(&again.modes, true, all);
	assert(length == other && !memcmp(modes, all, length));
	kept = tail_of(&terminal.modes, &tail);
	kept_again = tail_of(&again.modes, &tail_again);
	assert(tail <= TAIL_MAX);
	assert(tail == tail_again && !memcmp(kept, kept_again, tail));
	length = write_modes(&terminal.modes, false, modes);
	check_modes(modes, length);
	return length;
}

int main(void)
{
	uint32_t size;

	while (fread(&size, sizeof size, 1, stdin) == 1) {
		char *data = malloc(size), modes[MODES_MAX];	/* as long as it is, for ASan */
		uint32_t length;

		memset(&terminal, 0, sizeof terminal);
		memset(&again, 0, sizeof again);
		if (size && fread(data, size, 1, stdin) != 1)
			return 1;
		length = (uint32_t)answer(data, size, modes);
		free(data);
		fwrite(&length, sizeof length, 1, stdout);
		fwrite(modes, 1, length, stdout);
		fflush(stdout);
	}
	return 0;
}
