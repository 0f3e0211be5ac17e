/*
 * What an ordinary user needs in order to mount.
 */
#ifndef CTXFS_ORDINARY_H
#define CTXFS_ORDINARY_H

#include <sched.h>

#include "common.h"

/* Maps an id to itself: a user other than root may map nothing else. */
static inline void map_id(const char *path, unsigned id)
{
	char text[64];

	snprintf(text, sizeof text, "%u %u 1", id, id);
	if (write_file(AT_FDCWD, path, text) < 0)
		die("%s: %m", path);
}

/* Enters a user namespace, where an ordinary user may mount, and keeps the ids. */
static inline void enter_user_namespace(void)
{
	uid_t uid = geteuid();
	gid_t gid = getegid();

	if (unshare(CLONE_NEWUSER) < 0)
		die("unshare: %m");
	if (write_file(AT_FDCWD, "/proc/self/setgroups", "deny") < 0)
		die("/proc/self/setgroups: %m");
	map_id("/proc/self/uid_map", uid);
	map_id("/proc/self/gid_map", gid);
}

#endif
