/*
 * orders: what the daemon tells its programs (runtime/orders.py writes it).
 *
 * Orders are strings in an order that both sides know. A list is preceded by its
 * length. Orders are the arguments of a program, or a message in a file or on a socket:
 * the number of all strings, then each string with a NUL at its end.
 *
 * A program takes all its orders before it acts. A missing string, an invalid number or
 * a truncated list makes all orders damaged: from then on, everything taken is empty, and
 * all_taken() returns false at the end. It also does so if orders are left over.
 */
#ifndef CTXFS_ORDERS_H
#define CTXFS_ORDERS_H

#include <limits.h>

#include "common.h"

#define ORDERS_MAX (64 << 20)	/* of a message in a file */
/* of uids and gids: setresuid(2) takes the next value as "unchanged" */
#define ID_MAX (UINT32_MAX - 1)

struct orders {
	char **next, **end;
	bool damaged;
	char **strings;	/* to be freed */
};

/* A list, with a NULL after the last string, as execve(2) needs it. */
struct list {
	char **items;
	size_t count;
};

/* Parses only ASCII digits, up to MAX; strtoul(3) would accept signs and blanks. */
static inline bool parse_number(const char *word, unsigned long long max, unsigned long long *number)
{
	unsigned long long value = 0;

	for (const char *c = word; *c; c++) {
		unsigned digit = (unsigned)(*c - '0');

		if (digit > 9 || digit > max || value > (max - digit) / 10)
			return false;
		value = value * 10 + digit;
	}
	*number = value;
	return *word != 0;
}

static inline struct orders orders_of_arguments(int argc, char **argv)
{
	return (struct orders){.next = argv + (argc > 0), .end = argv + argc};
}

/* Splits a message in place. */
static inline struct orders split_message(char *data, size_t length)
{
	struct orders orders = {.damaged = true};
	unsigned long long told;
	size_t count = 0;

	if (!length || data[length - 1])
		return orders;
	for (size_t i = 0; i < length; i++)
		count += data[i] == 0;
	if (!parse_number(data, length, &told) || told != count - 1)
		return orders;
	/* one more, for the NULL after a list */
	orders.strings = calloc(count + 1, sizeof *orders.strings);
	if (!orders.strings)
		return orders;
	for (size_t i = 0; i < count; i++, data += strlen(data) + 1)
		orders.strings[i] = data;
	orders.next = orders.strings + 1;
	orders.end = orders.strings + count;
	orders.damaged = false;
	return orders;
}

/* Reads a message from a file and closes it; the memory is never freed. */
static inline struct orders read_orders(int fd)
{
	size_t length = 0;
	char *data = read_all(fd, ORDERS_MAX, &length);

	close(fd);
	return split_message(data, data ? length : 0);
}

static inline char *take_word(struct orders *orders)
{
	static char nothing[1];

	if (orders->damaged || orders->next == orders->end) {
		orders->damaged = true;
		nothing[0] = 0;
		return nothing;
	}
	return *orders->next++;
}

/* Takes the next string if it equals WORD. */
static inline bool take_if(struct orders *orders, const char *word)
{
	if (orders->damaged || orders->next == orders->end || strcmp(*orders->next, word))
		return false;
	orders->next++;
	return true;
}

static inline unsigned long long take_number(struct orders *orders, unsigned long long max)
{
	unsigned long long number = 0;

	if (!parse_number(take_word(orders), max, &number)) {
		orders->damaged = true;
		return 0;
	}
	return number;
}

static inline int take_descriptor(struct orders *orders)
{
	return (int)take_number(orders, INT_MAX);
}

/* Takes a descriptor; "-" means none and returns -1. */
static inline int take_descriptor_or_none(struct orders *orders)
{
	return take_if(orders, "-") ? -1 : take_descriptor(orders);
}

/* Takes the length of a list; at least as many strings must be left. */
static inline size_t take_count(struct orders *orders)
{
	size_t left = orders->damaged ? 0 : (size_t)(orders->end - orders->next);

	return (size_t)take_number(orders, left ? left - 1 : 0);
}

static inline struct list take_list(struct orders *orders)
{
	static char *none[1];
	size_t count = take_count(orders);
	struct list list = {none, 0};

	none[0] = NULL;
	if (orders->damaged)
		return list;
	/* moves the strings over their number, to make room for the NULL */
	list.items = orders->next - 1;
	list.count = count;
	memmove(list.items, orders->next, count * sizeof *list.items);
	list.items[count] = NULL;
	orders->next += count;
	return list;
}

/* Takes a list of lists; COUNT returns its length. */
static inline struct list *take_lists(struct orders *orders, size_t *count)
{
	struct list *lists;

	*count = take_count(orders);
	lists = calloc(*count + 1, sizeof *lists);
	if (!lists) {
		orders->damaged = true;
		*count = 0;
	}
	for (size_t i = 0; i < *count; i++)
		lists[i] = take_list(orders);
	return lists;
}

static inline unsigned take_id(struct orders *orders)
{
	return (unsigned)take_number(orders, ID_MAX);
}

/* Takes a list of numbers; the caller frees it. */
static inline unsigned *take_numbers(struct orders *orders, unsigned max, size_t *count)
{
	struct list list = take_list(orders);
	unsigned *numbers = calloc(list.count + 1, sizeof *numbers);

	*count = numbers ? list.count : 0;
	orders->damaged |= !numbers;
	for (size_t i = 0; i < *count; i++) {
		unsigned long long number = 0;

		orders->damaged |= !parse_number(list.items[i], max, &number);
		numbers[i] = (unsigned)number;
	}
	return numbers;
}

/* Takes UID GID GROUPS: groups are a list, or "=" for unchanged. */
static inline struct ids take_ids(struct orders *orders)
{
	struct ids ids = {0};

	ids.uid = take_id(orders);
	ids.gid = take_id(orders);
	ids.same_groups = take_if(orders, "=");
	if (!ids.same_groups)
		ids.groups = take_numbers(orders, ID_MAX, &ids.group_count);
	return ids;
}

static inline bool all_taken(const struct orders *orders)
{
	return !orders->damaged && orders->next == orders->end;
}

#endif
