/*
 * modes: what a program has made of its terminal, and what it wrote last.
 *
 * Another terminal that comes later is put into the same modes. Nothing of the output is repeated
 * for that: it gets sequences that are made here, from tables and numbers, so that none of them is
 * a question, which it would answer as if somebody typed. All of it has a fixed size.
 */
#ifndef CTXFS_MODES_H
#define CTXFS_MODES_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define SEQUENCE_MAX 256
#define NUMBERS_MAX 32
#define NUMBER_MAX 65535
#define KEYBOARDS_MAX 8	/* of the stack of kitty's keyboard protocol */
#define TAIL_MAX (16 << 10)
#define MODES_MAX 2048	/* bytes that write_modes() writes at most */

enum { ESC = 0x1b, BEL = 0x07, CAN = 0x18, SUB = 0x1a };

/* Modes of DECSET and DECRST, and what they are at first. Left out are those of the screen,
 * which is drawn anew, and the ones that last for a moment (1048, 2026). */
static const struct {
	unsigned number;
	bool at_first;
} private_modes[] = {
	{1, false}, {5, false}, {7, true}, {9, false}, {12, false}, {25, true}, {66, false},
	{1000, false}, {1002, false}, {1003, false}, {1004, false}, {1005, false}, {1006, false},
	{1007, false}, {1015, false}, {1016, false}, {2004, false}, {2027, false}, {2031, false},
	{2048, false},
};
#define PRIVATE_MODES (sizeof private_modes / sizeof *private_modes)

enum reading { TEXT, ESCAPED, CONTROL, STRING };

struct modes {
	bool on[PRIVATE_MODES];
	bool insert, keypad;
	unsigned alternate;	/* the mode by which the alternate screen was entered; or 0 */
	unsigned cursor;	/* its style (DECSCUSR) */
	unsigned keys;		/* xterm's modifyOtherKeys */
	/* kitty's, of the main screen and of the alternate one; the last one is in force */
	struct {
		uint8_t flags[KEYBOARDS_MAX];
		unsigned depth;
	} keyboards[2];

	/* a sequence that is not complete; of a string only its introducer is kept */
	enum reading reading;
	char sequence[SEQUENCE_MAX];
	size_t length;

	/* the last output, on the screen that is not the alternate one */
	char tail[2 * TAIL_MAX];
	size_t kept;
	bool cut;	/* there was more before it */
};

static inline void reset_modes(struct modes *m)
{
	for (size_t i = 0; i < PRIVATE_MODES; i++)
		m->on[i] = private_modes[i].at_first;
	m->insert = m->keypad = false;
	m->alternate = m->cursor = m->keys = 0;
	memset(m->keyboards, 0, sizeof m->keyboards);
}

static inline void set_private_mode(struct modes *m, unsigned number, bool on)
{
	if (number == 47 || number == 1047 || number == 1049)
		m->alternate = on ? number : 0;
	for (size_t i = 0; i < PRIVATE_MODES; i++)
		if (private_modes[i].number == number)
			m->on[i] = on;
}

/* CSI PREFIX NUMBERS u */
static inline void set_keyboard(struct modes *m, char prefix, const unsigned *numbers)
{
	uint8_t *flags = m->keyboards[m->alternate != 0].flags, given = (uint8_t)numbers[0];
	unsigned *depth = &m->keyboards[m->alternate != 0].depth, count = numbers[0] ? numbers[0] : 1;

	if (prefix == '>') {
		if (*depth == KEYBOARDS_MAX)	/* the oldest is dropped */
			memmove(flags, flags + 1, --*depth);
		flags[(*depth)++] = given;
	} else if (prefix == '<') {
		*depth -= count < *depth ? count : *depth;
	} else if (prefix == '=') {
		if (!*depth)
			flags[(*depth)++] = 0;
		flags += *depth - 1;
		*flags = numbers[1] == 2   ? *flags | given
			 : numbers[1] == 3 ? *flags & (uint8_t)~given
					   : given;
	}
}

/* Carries out a complete control sequence, as far as it matters here. */
static inline void carry_out(struct modes *m)
{
	const char *at = m->sequence + 2, *end = m->sequence + m->length - 1;
	char prefix = at < end && *at >= '<' && *at <= '?' ? *at++ : 0, between = 0;
	unsigned numbers[NUMBERS_MAX] = {0};
	size_t count = 0;

	for (; at < end; at++) {
		if (*at >= '0' && *at <= '9') {
			numbers[count] = numbers[count] * 10 + (unsigned)(*at - '0');
			if (numbers[count] > NUMBER_MAX)
				numbers[count] = NUMBER_MAX;
		} else if (*at == ';' && count + 1 < NUMBERS_MAX) {
			count++;
		} else if (*at >= ' ' && *at < '0' && !between) {
			between = *at;
		} else {
			return;
		}
	}
	count++;
	if (prefix == '?' && !between && (*end == 'h' || *end == 'l')) {
		for (size_t i = 0; i < count; i++)
			set_private_mode(m, numbers[i], *end == 'h');
	} else if (!prefix && !between && (*end == 'h' || *end == 'l')) {
		for (size_t i = 0; i < count; i++)
			if (numbers[i] == 4)
				m->insert = *end == 'h';
	} else if (!prefix && between == ' ' && *end == 'q') {
		m->cursor = numbers[0] <= 6 ? numbers[0] : 0;
	} else if (prefix == '>' && !between && *end == 'm' && numbers[0] == 4) {
		m->keys = numbers[1] <= 3 ? numbers[1] : 0;
	} else if (prefix == '>' && !between && *end == 'n' && numbers[0] == 4) {
		m->keys = 0;
	} else if (prefix && !between && *end == 'u') {
		set_keyboard(m, prefix, numbers);
	} else if (!prefix && between == '!' && *end == 'p') {
		set_private_mode(m, 1, false);
		set_private_mode(m, 25, true);
		m->insert = m->keypad = false;
	}
}

/* Takes one byte of a sequence, or the one that begins it. */
static inline void follow_byte(struct modes *m, unsigned char c)
{
	enum reading reading = m->reading;

	if (c == ESC) {
		m->reading = ESCAPED;
		m->sequence[0] = ESC;
		m->length = 1;
	} else if (c == CAN || c == SUB) {
		m->reading = TEXT;
	} else if (reading == STRING) {
		if (c == BEL && m->sequence[1] == ']')
			m->reading = TEXT;
	} else if (reading != TEXT && c >= ' ' && c != 0x7f) {
		if (m->length < SEQUENCE_MAX)
			m->sequence[m->length++] = (char)c;
		if (reading == CONTROL && c >= '@') {
			m->reading = TEXT;
			if (c < 0x7f && m->length < SEQUENCE_MAX)	/* else it was too long */
				carry_out(m);
		} else if (reading == ESCAPED && c >= '0') {
			bool whole = m->length == 2;

			m->reading = !whole ? TEXT : c == '[' ? CONTROL : TEXT;
			if (whole && strchr("]PX^_", c))
				m->reading = STRING;
			else if (whole && c == 'c')
				reset_modes(m);
			else if (whole && (c == '=' || c == '>'))
				m->keypad = c == '=';
		}
	}
}

static inline void keep_tail(struct modes *m, const char *data, size_t length)
{
	if (length > TAIL_MAX) {
		data += length - TAIL_MAX;
		length = TAIL_MAX;
		m->kept = 0;
		m->cut = true;
	}
	if (m->kept + length > sizeof m->tail) {
		memmove(m->tail, m->tail + m->kept - TAIL_MAX, TAIL_MAX);
		m->kept = TAIL_MAX;
		m->cut = true;
	}
	memcpy(m->tail + m->kept, data, length);
	m->kept += length;
}

/* Takes what the program wrote. */
static inline void follow_output(struct modes *m, const char *data, size_t length)
{
	const char *end = data + length;

	while (data < end) {
		const char *next = data + 1;
		bool alternate = m->alternate != 0;

		if (m->reading == TEXT) {
			next = memchr(data, ESC, (size_t)(end - data));
			next = !next ? end : next > data ? next : data + 1;
		}
		keep_tail(m, data, (size_t)(next - data));
		if (m->reading != TEXT || *data == ESC)
			follow_byte(m, (unsigned char)*data);
		if (alternate != (m->alternate != 0)) {
			m->kept = 0;
			m->cut = false;
		}
		data = next;
	}
}

/* The last output, from the beginning of a line on; none while the alternate screen is shown. */
static inline const char *tail_of(const struct modes *m, size_t *length)
{
	size_t begun = m->kept > TAIL_MAX ? m->kept - TAIL_MAX : 0;
	const char *newline;

	*length = 0;
	if (m->alternate)
		return m->tail;
	if (begun || m->cut) {
		newline = memchr(m->tail + begun, '\n', m->kept - begun);
		begun = newline ? (size_t)(newline + 1 - m->tail) : m->kept;
	}
	*length = m->kept - begun;
	return m->tail + begun;
}

/* What is to be said again of a sequence that is not complete, so that its rest is none of the
 * text. */
static inline const char *unfinished(const struct modes *m, size_t *length)
{
	*length = m->reading == TEXT || m->length == SEQUENCE_MAX ? 0 : m->length;
	return m->sequence;
}

__attribute__((format(printf, 3, 4)))
static inline void add(char *text, size_t *length, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	*length += (size_t)vsnprintf(text + *length, MODES_MAX - *length, format, args);
	va_end(args);
}

static inline void write_keyboards(const struct modes *m, bool alternate, bool whole, char *text,
				   size_t *length)
{
	if (whole)
		add(text, length, "\033[<%uu", KEYBOARDS_MAX);
	for (size_t i = 0; i < m->keyboards[alternate].depth; i++)
		add(text, length, "\033[>%uu", m->keyboards[alternate].flags[i]);
}

/*
 * Writes what puts a terminal that shows its main screen into these modes, at most MODES_MAX
 * bytes: one that is in others if WHOLE, else one as it is at first. Returns the length.
 */
static inline size_t write_modes(const struct modes *m, bool whole, char *text)
{
	size_t length = 0;

	write_keyboards(m, false, whole, text, &length);
	if (m->alternate) {
		add(text, &length, "\033[?%uh", m->alternate);
		write_keyboards(m, true, whole, text, &length);
	}
	/* what is off comes first: to leave one mode of the mouse may leave all of them */
	for (int on = 0; on < 2; on++)
		for (size_t i = 0; i < PRIVATE_MODES; i++)
			if (m->on[i] == on && (whole || on != private_modes[i].at_first))
				add(text, &length, "\033[?%u%c", private_modes[i].number,
				    on ? 'h' : 'l');
	if (whole || m->insert)
		add(text, &length, "\033[4%c", m->insert ? 'h' : 'l');
	if (whole || m->keypad)
		add(text, &length, "\033%c", m->keypad ? '=' : '>');
	if (whole || m->cursor)
		add(text, &length, "\033[%u q", m->cursor);
	if (whole || m->keys)
		add(text, &length, "\033[>4;%um", m->keys);
	return length;
}

#endif
