/*
 * counters: what passed through the networks of an agent and of all that it owns, and what the
 * models that they reached said was used.
 *
 * A file of fixed size, which relays map (relay.c) and daemons read and write
 * (runtime/cell/networks.py). Each number has one kind of writer, so that nobody needs a lock:
 * all relays of a tree add to the first three. The file outlives relays and daemons.
 * COUNTERS_VERSION tells them that the other one has another layout. Version 1 had no struct spent;
 * a daemon makes its files longer, which relays that map them do not notice.
 */
#ifndef CTXFS_COUNTERS_H
#define CTXFS_COUNTERS_H

#include <stddef.h>
#include <stdint.h>

#define COUNTERS_VERSION 2
#define COUNTERS_LINES 42
#define COUNTERS_LINES_SIZE 8192
#define COUNTERS_SIZE 12288
#define LEVELS_MAX 32		/* agents that own each other */

#define NO_LIMIT UINT64_MAX
/* Trouble: the errno of a connect(2), or this with the number of the level whose limit is
 * reached; 0 for none. */
#define TROUBLE_LIMIT (1ULL << 32)

struct line {
	char name[72];
	uint64_t connections, sent, received;	/* of all relays that map the file */
	uint64_t trouble, open;			/* of the agent's own: open connections */
	uint64_t max, closed, listens, told, spare[6];	/* of daemons */
};

/* What an agent and all below it by lineage used of models: tokens, cost in 10^-9 of the operator's
 * unit, and requests. Relays know nothing of it, but pass the file on. */
struct spent {
	char name[128];
	uint64_t tokens_max, cost_max;	/* of daemons */
	uint64_t in, cached, written, out, estimated, cost;	/* of the meter, as the next */
	uint64_t requests, refused, unpriced, trouble;
	uint64_t spare, owner;		/* of daemons: a uid */
};

struct counters {
	uint64_t version, spare[7];
	struct line lines[COUNTERS_LINES];
	char unused[COUNTERS_LINES_SIZE - 64 - COUNTERS_LINES * sizeof(struct line)];
	struct spent spent;
};

_Static_assert(sizeof(struct line) == 192, "the layout of counters");
_Static_assert(offsetof(struct counters, spent) == COUNTERS_LINES_SIZE, "where counters go on");
_Static_assert(sizeof(struct counters) <= COUNTERS_SIZE, "the size of counters");

#endif
