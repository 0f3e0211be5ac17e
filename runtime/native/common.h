/*
 * What several of the programs do: taking an agent's ids, and giving up every
 * capability. Each function returns 0, or -1 with errno.
 */
#ifndef CTXFS_COMMON_H
#define CTXFS_COMMON_H

#include <grp.h>
#include <linux/capability.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#define GROUPS_MAX 1024

/*
 * setgroups(2) as TEXT says: numbers separated by commas, "-" for none. "=" leaves
 * them as they are, for whoever may not change them.
 */
static inline int take_groups(char *text)
{
	gid_t groups[GROUPS_MAX];
	char *state = NULL;
	int count = 0;

	if (!strcmp(text, "="))
		return 0;
	for (char *word = strtok_r(text, ",", &state); word && *word != '-' && count < GROUPS_MAX;
	     word = strtok_r(NULL, ",", &state))
		groups[count++] = (gid_t)strtoul(word, NULL, 10);
	return setgroups((size_t)count, groups);
}

/* Empties the bounding set as far as there is the right to. */
static inline int empty_bounding_set(void)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct sets[_LINUX_CAPABILITY_U32S_3];

	if (syscall(SYS_capget, &header, sets) < 0)
		return -1;
	if (!(sets[0].effective & 1U << CAP_SETPCAP))
		return 0;
	for (unsigned long number = 0; prctl(PR_CAPBSET_READ, number, 0, 0, 0) >= 0; number++)
		if (prctl(PR_CAPBSET_DROP, number, 0, 0, 0) < 0)
			return -1;
	return 0;
}

/* Empties every set that exec could take a capability from. */
static inline int give_up_capabilities(void)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct none[_LINUX_CAPABILITY_U32S_3] = {{0}};

	if (empty_bounding_set() < 0 || prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) < 0)
		return -1;
	return (int)syscall(SYS_capset, &header, none);
}

/* Takes an agent's uid and gid for good, and gives up every capability and every way to one. */
static inline int take_ids(uid_t uid, gid_t gid)
{
	/* the bounding set before the ids, with which the right to change it goes */
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || empty_bounding_set() < 0)
		return -1;
	if (setresgid(gid, gid, gid) < 0 || setresuid(uid, uid, uid) < 0)
		return -1;
	return give_up_capabilities();
}

/* execveat(2) of an open program: no path, which somebody could have put something at. */
static inline int execute(int program, char **argv, char **environment)
{
	return (int)syscall(SYS_execveat, program, "", argv, environment, 0x1000 /* AT_EMPTY_PATH */);
}

#endif
