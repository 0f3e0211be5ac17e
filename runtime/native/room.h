/*
 * room: how much output all monitors of one owner may still keep.
 *
 * A file of fixed size, which monitors map (monitor.c) and daemons read and write
 * (runtime/kernel/rooms.py). Each number has one kind of writer, so that nobody needs a lock.
 * The file outlives monitors and daemons. ROOM_VERSION tells them that the other one has another
 * layout; then a monitor keeps what LOG_MAX allows.
 */
#ifndef CTXFS_ROOM_H
#define CTXFS_ROOM_H

#include <stdatomic.h>
#include <sys/mman.h>

#include "common.h"

#define ROOM_VERSION 1

struct room {
	uint64_t version;
	_Atomic int64_t kept;	/* of monitors: bytes written, less what they removed */
	_Atomic int64_t most;	/* of daemons: what that may become */
};

/* NULL if there is no such file, or another version made it. */
static inline struct room *open_room(const char *path)
{
	int fd = open(path, O_RDWR | O_CLOEXEC);
	struct room *room = MAP_FAILED;
	struct stat st;

	if (fd >= 0 && fstat(fd, &st) == 0 && st.st_size >= (off_t)sizeof *room)
		room = mmap(NULL, sizeof *room, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close_quietly(fd);
	return room == MAP_FAILED || room->version != ROOM_VERSION ? NULL : room;
}

static inline bool has_room(struct room *room)
{
	return !room || room->kept < room->most;
}

/* Takes as much of SIZE as there is, of all if FORCED; others take some at the same time. */
static inline size_t take_room(struct room *room, size_t size, bool forced)
{
	int64_t over;

	if (!room)
		return size;
	over = atomic_fetch_add(&room->kept, (int64_t)size) + (int64_t)size - room->most;
	if (over <= 0 || forced)
		return size;
	over = over < (int64_t)size ? over : (int64_t)size;
	atomic_fetch_sub(&room->kept, over);
	return size - (size_t)over;
}

static inline void give_room(struct room *room, unsigned long long size)
{
	if (room)
		atomic_fetch_sub(&room->kept, (int64_t)size);
}

#endif
