/*
 * sweep: signals the processes of cgroups that agents were in, and removes such cgroups.
 *
 *     sweep ORDERS_FD
 *
 * An agent may have made cgroups below its own, and may hold the lock of a directory of them
 * for as long as it likes. So the daemon itself touches none: it asks this program (orders.h).
 *
 *     signal NUMBER SPARED GROUPS
 *         Sends a signal to each process in and below GROUPS whose PID is not in SPARED, and
 *         says how many there are. SIGTERM is followed by SIGCONT, and by thawing what is frozen,
 *         for who is stopped or frozen would not see it. A process that forks faster than it
 *         is looked at is not waited for. 0 sends nothing.
 *     hurry GROUPS
 *         Gives all threads in and below GROUPS the priority of others: behind them, what is
 *         killed ends as late as its agent likes.
 *     remove GROUPS
 *         Kills what is in and below GROUPS and removes them. Says the numbers of those that
 *         are still there, from 0 on.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>

#include "groups.h"
#include "orders.h"

#define LOOKS 6
#define PIDS_MAX (4 << 20)	/* PID_MAX_LIMIT of the kernel */
#define AT_ONCE 512	/* processes held by descriptors */
#define REMOVAL_MS 1000	/* that processes have to end after SIGKILL */

/* Signalling. */

/* one bit for each PID that is to be sent nothing (more) */
static unsigned char passed[PIDS_MAX / 8];
static int number;
static size_t left, found;

static bool is_passed(pid_t pid)
{
	return pid <= 0 || pid >= PIDS_MAX || passed[pid / 8] & 1 << pid % 8;
}

static void pass(pid_t pid)
{
	if (pid > 0 && pid < PIDS_MAX)
		passed[pid / 8] |= (unsigned char)(1 << pid % 8);
}

/*
 * Signals some of the processes in a cgroup. A PID may be another process's by the time it
 * is used; the process of a pidfd is the right one if its PID is still listed afterwards.
 */
static void signal_some(int group, const pid_t *pids, size_t count)
{
	int held[AT_ONCE];
	size_t listed;
	pid_t *again;

	for (size_t i = 0; i < count; i++)
		held[i] = (int)syscall(SYS_pidfd_open, pids[i], 0);
	again = list_processes(group, &listed);
	for (size_t i = 0; i < count; i++) {
		if (held[i] < 0)
			continue;
		if (again && is_listed(again, listed, pids[i])) {
			syscall(SYS_pidfd_send_signal, held[i], number, NULL, 0);
			if (number == SIGTERM)
				syscall(SYS_pidfd_send_signal, held[i], SIGCONT, NULL, 0);
			pass(pids[i]);
			found++;
		}
		close(held[i]);
	}
	free(again);
}

static void signal_group(int group, void *context)
{
	size_t count, wanted = 0;
	pid_t *pids = list_processes(group, &count);
	const bool *sends = context;

	for (size_t i = 0; pids && i < count; i++)
		if (!is_passed(pids[i]))
			pids[wanted++] = pids[i];
	left += wanted;
	for (size_t i = 0; *sends && i < wanted; i += AT_ONCE)
		signal_some(group, pids + i, wanted - i < AT_ONCE ? wanted - i : AT_ONCE);
	free(pids);
	if (*sends && number == SIGTERM)
		write_file(group, "cgroup.freeze", "0");
}

static void visit_all(struct list groups, bool sends)
{
	left = found = 0;
	for (size_t i = 0; i < groups.count; i++)
		visit_groups(open_group(AT_FDCWD, groups.items[i]), 0, signal_group, &sends);
}

static void signal_groups(struct orders *orders)
{
	size_t count;
	unsigned *spared;
	struct list groups;

	number = (int)take_number(orders, SIGRTMAX);
	spared = take_numbers(orders, PIDS_MAX - 1, &count);
	groups = take_list(orders);
	if (!all_taken(orders))
		die("damaged orders");
	for (size_t i = 0; i < count; i++)
		pass((pid_t)spared[i]);
	/* a signalled process may have forked just before */
	for (int look = 0; number && look < LOOKS; look++) {
		visit_all(groups, true);
		if (!found)
			break;
	}
	memset(passed, 0, sizeof passed);
	for (size_t i = 0; i < count; i++)
		pass((pid_t)spared[i]);
	visit_all(groups, false);
	printf("%zu\n", left);
}

/* Priorities. */

static void hurry_process(pid_t pid)
{
	struct dirent *entry;
	char path[64];
	DIR *list;

	snprintf(path, sizeof path, "/proc/%d/task", pid);
	list = opendir(path);
	while (list && (entry = readdir(list))) {
		struct sched_param plain = {.sched_priority = 0};
		pid_t thread = (pid_t)atoi(entry->d_name);

		if (thread <= 0)
			continue;
		/* by the call: musl has no function that does it */
		syscall(SYS_sched_setscheduler, thread, SCHED_OTHER, &plain);
		setpriority(PRIO_PROCESS, (id_t)thread, 0);
	}
	if (list)
		closedir(list);
}

static void hurry_group(int group, void *context)
{
	size_t count;
	pid_t *pids = list_processes(group, &count);

	(void)context;
	for (size_t i = 0; pids && i < count; i++)
		hurry_process(pids[i]);
	free(pids);
}

static void hurry_groups(struct orders *orders)
{
	struct list groups = take_list(orders);

	if (!all_taken(orders))
		die("damaged orders");
	for (size_t i = 0; i < groups.count; i++)
		visit_groups(open_group(AT_FDCWD, groups.items[i]), 0, hurry_group, NULL);
}

/* Removal. */

/* Removes what is in the cgroup of an open directory, as far as nothing lives there; closes it. */
static void remove_below(int group, int depth)
{
	struct dirent *entry;
	DIR *list = group >= 0 && depth < DEPTH_MAX ? fdopendir(group) : NULL;

	if (!list) {
		close_quietly(group);
		return;
	}
	while ((entry = readdir(list))) {
		if (entry->d_type != DT_DIR || entry->d_name[0] == '.')
			continue;
		/* most have nothing below */
		if (unlinkat(dirfd(list), entry->d_name, AT_REMOVEDIR) == 0)
			continue;
		remove_below(open_group(dirfd(list), entry->d_name), depth + 1);
		unlinkat(dirfd(list), entry->d_name, AT_REMOVEDIR);
	}
	closedir(list);
}

/* Whether a cgroup is gone. */
static bool remove_group(const char *path)
{
	if (rmdir(path) == 0 || errno == ENOENT)
		return true;
	remove_below(open_group(AT_FDCWD, path), 0);
	return rmdir(path) == 0 || errno == ENOENT;
}

/* Waits until nothing lives in a cgroup, or for a time. */
static void await_empty(const char *path, long long deadline)
{
	char name[4096], text[256];
	int events;

	snprintf(name, sizeof name, "%s/cgroup.events", path);
	events = open(name, O_RDONLY | O_CLOEXEC);
	while (events >= 0 && now_ms() < deadline) {
		struct pollfd change = {.fd = events, .events = POLLPRI};
		ssize_t n = pread(events, text, sizeof text - 1, 0);

		text[n > 0 ? n : 0] = 0;
		if (!strstr(text, "populated 1"))
			break;
		poll(&change, 1, (int)(deadline - now_ms()));
	}
	close_quietly(events);
}

static void remove_groups(struct orders *orders)
{
	struct list groups = take_list(orders);
	long long deadline = now_ms() + REMOVAL_MS;

	if (!all_taken(orders))
		die("damaged orders");
	for (size_t i = 0; i < groups.count; i++) {
		char name[4096];

		if (remove_group(groups.items[i]))
			continue;
		/* a helper that looks at paths in an agent's view may have come late */
		snprintf(name, sizeof name, "%s/cgroup.kill", groups.items[i]);
		write_file(AT_FDCWD, name, "1");
		await_empty(groups.items[i], deadline);
		if (!remove_group(groups.items[i]))
			printf("%zu\n", i);
	}
}

int main(int argc, char **argv)
{
	struct orders orders = orders_of_arguments(argc, argv);
	int orders_fd = take_descriptor(&orders);
	struct rlimit files;

	if (!all_taken(&orders)) {
		fputs("usage: sweep ORDERS_FD\n", stderr);
		return 2;
	}
	stand_beside("ctx-sweep");
	if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
		files.rlim_cur = files.rlim_max;
		setrlimit(RLIMIT_NOFILE, &files);
	}
	orders = read_orders(orders_fd);
	if (take_if(&orders, "signal"))
		signal_groups(&orders);
	else if (take_if(&orders, "hurry"))
		hurry_groups(&orders);
	else if (take_if(&orders, "remove"))
		remove_groups(&orders);
	else
		die("damaged orders");
	return 0;
}
