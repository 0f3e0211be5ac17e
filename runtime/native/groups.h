/*
 * Cgroups in which agents may make others (cgroups(7)): they are reached by descriptors, since
 * the names of deep ones are longer than a path may be.
 */
#ifndef CTXFS_GROUPS_H
#define CTXFS_GROUPS_H

#include <dirent.h>

#include "common.h"

#define DEPTH_MAX 512	/* of a tree; a version before had bounds that allow more than a few */
#define LIST_MAX (64 << 20)	/* bytes of a list of processes */

static inline int open_group(int at, const char *name)
{
	return openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

/* What is done to each cgroup of a tree. */
typedef void visit(int group, void *context);

/* Visits the cgroup of an open directory, and those below it; closes it. */
static inline void visit_groups(int group, int depth, visit *act, void *context)
{
	struct dirent *entry;
	DIR *list;

	if (group < 0)
		return;
	act(group, context);
	list = depth < DEPTH_MAX ? fdopendir(group) : NULL;
	if (!list) {
		close(group);
		return;
	}
	while ((entry = readdir(list)))
		if (entry->d_type == DT_DIR && entry->d_name[0] != '.')
			visit_groups(open_group(dirfd(list), entry->d_name), depth + 1, act, context);
	closedir(list);
}

/*
 * The PIDs in a cgroup, without those of processes that the PID namespace does not have; the
 * caller frees them. NULL if it cannot be read: the processes of a threaded cgroup are listed
 * by the one above in which its threads' processes are (EOPNOTSUPP).
 */
static inline pid_t *list_processes(int group, size_t *count)
{
	int fd = openat(group, "cgroup.procs", O_RDONLY | O_CLOEXEC);
	size_t length = 0, capacity = 64;
	char *text = fd < 0 ? NULL : read_all(fd, LIST_MAX, &length), *next = text;
	pid_t *pids = text ? calloc(capacity, sizeof *pids) : NULL;

	*count = 0;
	close_quietly(fd);
	while (pids && *next) {
		pid_t pid = (pid_t)strtol(next, &next, 10), *more = pids;

		next += *next == '\n';
		if (!pid)
			continue;
		if (*count == capacity) {
			more = realloc(pids, (capacity *= 4) * sizeof *pids);
			if (!more) {
				free(pids);
				*count = 0;
			}
			pids = more;
		}
		if (pids)
			pids[(*count)++] = pid;
	}
	free(text);
	return pids;
}

static inline bool is_listed(const pid_t *pids, size_t count, pid_t pid)
{
	for (size_t i = 0; i < count; i++)
		if (pids[i] == pid)
			return true;
	return false;
}

#endif
