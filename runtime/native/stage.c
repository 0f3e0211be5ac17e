/*
 * stage: makes an operator's mount sources reachable for an agent's sandbox.
 *
 *     stage ORDERS_FD CELL STEP
 *
 * Runs as root on the host, before privileges are dropped. In its own mount
 * namespace, it opens each source with the creator's uid, gid and groups, so that
 * a source can only be a path that the creator can reach. It binds what it opened
 * (and never uses the path again) below a private tmpfs, from which the
 * unprivileged sandbox takes it. The host sees none of these mounts.
 *
 * Without root, the creator's uid runs this program, and a user namespace lets it
 * mount. In there the mounts of the host are locked (mount_namespaces(7)), so it
 * covers forbidden mounts, which root would remove. A process cannot return from
 * a cell either: a separate process enters the cell and sends what it opened.
 *
 * CELL is "-", or a pidfd of another agent's keeper: then the sources are paths in
 * the view of that cell. So a detached child gets a view made from its parent's
 * without being in the parent's PID namespace.
 *
 * ORDERS_FD holds orders (orders.h): the directory for the tmpfs; the creator's uid, gid
 * and groups; the forbidden paths, a list; paths that are permitted although they are in
 * forbidden ones, a list; and the mounts, a list of lists: options
 * (letters: r bind recursively, s nosuid, d nodev, x noexec, t skip a missing source),
 * ID and the source. ID is "-", or identifies the source at the time of writing (look.c):
 * DEVICE:INODE, or "*" for any object. With an ID, no link is followed.
 *
 * STEP, a list, is the next program and its arguments.
 */
#define _GNU_SOURCE
#include <linux/mount.h>
#include <linux/nsfs.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/statfs.h>

#include "common.h"
#include "ordinary.h"
#include "orders.h"

/* from sys/mount.h, which in some C libraries conflicts with linux/mount.h */
int mount(const char *source, const char *target, const char *type, unsigned long flags,
	  const void *data);
int umount2(const char *target, int flags);
#define MNT_DETACH 2

static bool rootless;

#define MOUNTS_MAX (256 << 20)	/* bytes of /proc/self/mountinfo */
#define MOUNT_POINT_FIELD 5

/* A source: the open object and, from a cell, its mount (clone_mount). */
struct opened {
	int fd;
	int tree;
	int error;
};

/* A requested mount. */
struct wanted {
	const char *options, *id, *source;
};

static struct list forbidden, permitted;

static bool is_in_any(const char *path, struct list directories)
{
	for (size_t i = 0; i < directories.count; i++)
		if (is_inside(path, directories.items[i]))
			return true;
	return false;
}

static void check_source(int fd, const char *source, char *path, size_t size)
{
	char link[64];
	struct statfs fs;
	ssize_t n;

	if (fstatfs(fd, &fs) < 0)
		die("mount source %s: %m", source);
	if (is_kernels(fs.f_type))
		die("mount source %s: procfs and cgroupfs cannot be given to an agent", source);
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	n = readlink(link, path, size - 1);
	if (n < 0)
		die("mount source %s: %m", source);
	path[n] = 0;
	if (is_in_any(path, forbidden) && !is_in_any(path, permitted))
		die("mount source %s: the daemon's own directories cannot be given to an agent", source);
}

/* Joins a mount namespace by its descriptor, as root may (setns(2)). */
static void join(int namespace, const char *what)
{
	if (setns(namespace, CLONE_NEWNS) < 0)
		die("%s: %m", what);
}

/* Opens with exactly the creator's rights. */
static int open_as(const struct wanted *wanted, const struct ids *as)
{
	uint64_t resolve = *wanted->id == '-' ? 0 : RESOLVE_NO_SYMLINKS;
	int fd, error;

	if (rootless)
		return open_path(AT_FDCWD, wanted->source, O_PATH, resolve);
	if (become_groups(as) < 0 || setresgid(-1, as->gid, -1) < 0 || setresuid(-1, as->uid, -1) < 0)
		die("cannot take the creator's identity: %m");
	fd = open_path(AT_FDCWD, wanted->source, O_PATH, resolve);
	error = errno;
	if (setresuid(-1, 0, -1) < 0 || setresgid(-1, 0, -1) < 0 || setgroups(0, NULL) < 0)
		die("cannot return to root: %m");
	errno = error;
	return fd;
}

/*
 * Clones the mount of an open object, detached from every namespace, to be attached
 * elsewhere (open_tree(2)). Includes all mounts below: in a cell, mounts that cover
 * something must continue to cover it.
 */
static int clone_mount(int fd, const char *source)
{
	int tree = (int)syscall(SYS_open_tree, fd, "",
				OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH | AT_RECURSIVE);

	if (tree < 0)
		die("mount source %s: %m", source);
	return tree;
}

/* Opens a source, and from a cell clones its mount. */
static struct opened open_source(const struct wanted *wanted, const struct ids *as, bool in_cell)
{
	struct opened found = {.tree = -1};

	found.fd = open_as(wanted, as);
	found.error = found.fd < 0 ? errno : 0;
	if (found.fd >= 0 && in_cell)
		found.tree = clone_mount(found.fd, wanted->source);
	return found;
}

static void close_opened(const struct opened *found)
{
	close_quietly(found->fd);
	close_quietly(found->tree);
}

static void send_opened(int channel, const struct opened *found)
{
	const int fds[2] = {found->fd, found->tree};

	if (send_message(channel, &found->error, sizeof found->error, fds, found->fd < 0 ? 0 : 2) < 0)
		die("the parent's cell: sendmsg: %m");
}

static struct opened receive_opened(int channel)
{
	struct opened found = {-1, -1, 0};
	int fds[DESCRIPTORS_MAX];
	size_t count;

	/* it printed the reason */
	if (receive_message(channel, &found.error, sizeof found.error, fds, &count) !=
	    sizeof found.error)
		exit(EXIT_FAILED);
	if (count == 2) {
		found.fd = fds[0];
		found.tree = fds[1];
	}
	return found;
}

/*
 * Joins the mount namespace of a pidfd's process with the right to mount: in the user
 * namespace that owns the mount namespace. That is not the process's own user namespace
 * but its parent, in which the view was made (view.c).
 */
static void enter_view(int pidfd)
{
	int namespace = open_of_process(pidfd, "ns/mnt", O_RDONLY), owner;

	if (namespace < 0)
		die("the parent's cell: %m");
	owner = ioctl(namespace, NS_GET_USERNS);
	if (owner < 0 || setns(owner, CLONE_NEWUSER) < 0 || setns(namespace, CLONE_NEWNS) < 0)
		die("the parent's cell: %m");
}

/* Starts a process that sends the sources in a cell, one after the other. */
static int start_fetcher(int cell, const struct wanted *wanted, size_t count, pid_t *fetcher)
{
	int ends[2];

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
		die("socketpair: %m");
	*fetcher = fork();
	if (*fetcher < 0)
		die("fork: %m");
	if (*fetcher > 0) {
		close(ends[1]);
		return ends[0];
	}
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	enter_view(cell);
	for (size_t i = 0; i < count; i++) {
		struct opened found = open_source(&wanted[i], NULL, true);

		send_opened(ends[1], &found);
		close_opened(&found);
	}
	exit(0);
}

static void bind_source(int fd, int tree, const char *source, const char *point,
			const char *options)
{
	struct mount_attr attributes = {
		.attr_set = (strchr(options, 's') ? MOUNT_ATTR_NOSUID : 0) |
			    (strchr(options, 'd') ? MOUNT_ATTR_NODEV : 0) |
			    (strchr(options, 'x') ? MOUNT_ATTR_NOEXEC : 0),
	};
	unsigned long recursive = strchr(options, 'r') ? MS_REC : 0;
	struct stat st;
	char link[64];

	if (fstat(fd, &st) < 0)
		die("mount source %s: %m", source);
	if (S_ISDIR(st.st_mode)) {
		if (mkdir(point, 0755) < 0)
			die("%s: %m", point);
	} else {
		int file = open(point, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);

		if (file < 0)
			die("%s: %m", point);
		close(file);
	}
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	if (tree >= 0 ? syscall(SYS_move_mount, tree, "", AT_FDCWD, point, MOVE_MOUNT_F_EMPTY_PATH) < 0
		      : mount(link, point, NULL, MS_BIND | recursive, NULL) < 0) {
		/* a process that cannot unmount must not see what a mount covers */
		if (rootless && errno == EINVAL && !recursive)
			die("mount source %s: without root, the mounts below it cannot be left out: "
			    "use rbind", source);
		die("mount source %s: %m", source);
	}
	/* for the whole tree, not only its top */
	if (attributes.attr_set && syscall(SYS_mount_setattr, AT_FDCWD, point, AT_RECURSIVE,
					   &attributes, sizeof attributes) < 0)
		die("mount source %s: options: %m", source);
}

/* Whether a mount below a source is forbidden to agents. */
static bool is_forbidden_type(const char *type)
{
	return !strcmp(type, "proc") || !strcmp(type, "cgroup") || !strcmp(type, "cgroup2");
}

/* Other agents must not see a cell's processes in its mounts. */
static bool is_procfs(const char *type)
{
	return !strcmp(type, "proc");
}

/* Undoes the octal escapes of a path in /proc, in place. */
static void unescape(char *text)
{
	char *to = text;

	for (const char *from = text; *from; to++) {
		bool escaped = *from == '\\' && from[1] && from[2] && from[3];

		*to = escaped ? (char)((from[1] - '0') << 6 | (from[2] - '0') << 3 | (from[3] - '0'))
			      : *from;
		from += escaped ? 4 : 1;
	}
	*to = 0;
}

/*
 * Returns the mount points of some filesystem types below a directory, in order. Not
 * with getmntent(3): C libraries differ in escapes, and the source, which anybody may
 * have chosen, comes before the mount point there. In mountinfo it comes last (proc(5)).
 */
static char **find_mounts(const char *directory, bool (*wanted)(const char *), size_t *count)
{
	int fd = open("/proc/self/mountinfo", O_RDONLY | O_CLOEXEC);
	size_t length;
	char *rest = fd < 0 ? NULL : read_all(fd, MOUNTS_MAX, &length), *line;
	char **found = NULL;

	if (!rest)
		die("/proc/self/mountinfo: %m");
	close(fd);
	*count = 0;
	while ((line = strsep(&rest, "\n")) && *line) {
		char *type = strstr(line, " - "), *point = line;

		for (int field = 1; point && field < MOUNT_POINT_FIELD; field++)
			if ((point = strchr(point, ' ')))
				point++;
		if (!type || !point || point > type)
			die("/proc/self/mountinfo: %s", strerror(EBADMSG));
		type += strlen(" - ");
		type[strcspn(type, " ")] = 0;
		point[strcspn(point, " ")] = 0;
		unescape(point);
		if (!is_inside(point, directory) || !wanted(type))
			continue;
		found = realloc(found, (*count + 1) * sizeof *found);
		if (!found)
			die("mount sources: %m");
		found[(*count)++] = point;
	}
	return found;
}

/* Covers every filesystem of some types below a directory where mounts are locked and
 * cannot be removed. */
static void cover_mounts(const char *directory, bool (*hidden)(const char *))
{
	size_t count;
	char **covered = find_mounts(directory, hidden, &count);

	for (size_t i = 0; i < count; i++) {
		struct stat st;
		/* a mount below a covered one is not reachable any more */
		bool there = stat(covered[i], &st) == 0;
		int failed = 0;

		if (there && S_ISDIR(st.st_mode))
			failed = mount("none", covered[i], "tmpfs", MS_RDONLY | MS_NOSUID, "mode=0");
		else if (there)
			failed = mount("/dev/null", covered[i], NULL, MS_BIND, NULL);
		if (failed < 0)
			die("mount sources: %s: %m", covered[i]);
	}
}

/* Removes every procfs and cgroupfs from the bound trees. One that its path does not
 * reach is below a mount that covers it, and stays there. */
static void remove_mounts(const char *directory)
{
	size_t count, removed;

	do {
		char **found = find_mounts(directory, is_forbidden_type, &count);

		removed = 0;
		for (size_t i = count; i-- > 0;) {	/* the last mounted is on top */
			if (umount2(found[i], MNT_DETACH) == 0)
				removed++;
			else if (errno != EINVAL && errno != ENOENT)
				die("mount sources: %s: %m", found[i]);
		}
	} while (removed);
}

/* Covers the daemon's own directories in what was bound at a point. */
static void cover_own(const char *point, const char *source, const char *real)
{
	for (size_t i = 0; i < forbidden.count; i++) {
		const char *word = forbidden.items[i];
		const char *rest = strcmp(real, "/") ? word + strlen(real) : word;
		char path[8192];

		if (strcmp(real, "/") && !is_inside(word, real))
			continue;
		snprintf(path, sizeof path, "%s%s", point, rest);
		if (access(path, F_OK) == 0 &&
		    mount("none", path, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, "mode=0") < 0)
			die("mount source %s: %s: %m", source, path);
	}
}

/* Reports why a required source cannot be opened. */
__attribute__((noreturn)) static void refuse(const struct wanted *wanted, int error)
{
	if (*wanted->id != '-' && (error == ELOOP || error == ENOENT || error == ENOTDIR))
		die(ANOTHER, wanted->source);
	if (error == ELOOP)
		die("mount source %s: links of procfs, and loops of links, cannot be "
		    "given to an agent", wanted->source);
	die("mount source %s: %s", wanted->source, strerror(error));
}

/* Binds a source at a point, and covers the forbidden mounts in it. */
static void place(const struct wanted *wanted, const struct opened *found, const char *point,
		  bool in_cell)
{
	char real[4096];

	if (*wanted->id != '-' && !is_object(found->fd, wanted->id))
		die(ANOTHER, wanted->source);
	check_source(found->fd, wanted->source, real, sizeof real);
	bind_source(found->fd, found->tree, wanted->source, point, wanted->options);
	if (!in_cell)
		cover_own(point, wanted->source, real);
}

static struct wanted *take_mounts(struct orders *orders, size_t *count)
{
	struct list *lists = take_lists(orders, count);
	struct wanted *mounts = calloc(*count + 1, sizeof *mounts);

	if (!mounts)
		die("the runtime's mount data: %m");
	for (size_t i = 0; i < *count; i++) {
		char **items = lists[i].items;

		if (lists[i].count != 3)
			die("the runtime's mount data is damaged");
		mounts[i] = (struct wanted){items[0], items[1], items[2]};
	}
	free(lists);
	return mounts;
}

int main(int argc, char **argv)
{
	struct orders arguments = orders_of_arguments(argc, argv), orders;
	int spec = take_descriptor(&arguments), cell = take_descriptor_or_none(&arguments);
	struct list step = take_list(&arguments);
	int own = -1, channel = -1;
	const char *directory;
	struct wanted *mounts;
	pid_t fetcher = 0;
	struct ids as;
	size_t count;

	if (!all_taken(&arguments) || !step.count)
		die("usage: stage ORDERS_FD CELL STEP");
	orders = read_orders(spec);
	directory = take_word(&orders);
	as = take_ids(&orders);
	forbidden = take_list(&orders);
	permitted = take_list(&orders);
	mounts = take_mounts(&orders, &count);
	if (!all_taken(&orders))
		die("the runtime's mount data is damaged");

	rootless = geteuid() != 0;
	/* the creator must not have root's groups */
	if (!rootless && as.same_groups)
		die("the runtime's mount data is damaged");
	if (!rootless && clear_capabilities_with_uid() < 0)
		die("the creator's identity: securebits: %m");
	if (rootless && cell >= 0)
		channel = start_fetcher(cell, mounts, count, &fetcher);
	if (rootless)
		enter_user_namespace();
	if (unshare(CLONE_NEWNS) < 0)
		die("unshare: %m");
	/* Slaves, not private: after a crash of the daemon, a filesystem that is
	 * mounted again must reach the sandbox. */
	if (mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) < 0 ||
	    mount("tmpfs", directory, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755") < 0)
		die("%s: %m", directory);
	if (cell >= 0 && (own = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC)) < 0)
		die("/proc/self/ns/mnt: %m");
	for (size_t i = 0; i < count; i++) {
		bool goes_in = cell >= 0 && channel < 0;
		struct opened found;
		char point[4096];

		snprintf(point, sizeof point, "%s/%zu", directory, i);
		/* from the view of the cell, if any; root enters it and returns */
		if (goes_in)
			join(cell, "the parent's cell");
		found = channel >= 0 ? receive_opened(channel)
				     : open_source(&mounts[i], &as, cell >= 0);
		if (goes_in)
			join(own, "the way back");
		if (found.fd < 0 && found.error == ENOENT && strchr(mounts[i].options, 't'))
			continue;
		if (found.fd < 0)
			refuse(&mounts[i], found.error);
		place(&mounts[i], &found, point, cell >= 0);
		close_opened(&found);
	}
	/* once for all sources, since each search reads all mounts of the host */
	if (cell >= 0)
		cover_mounts(directory, is_procfs);
	else if (rootless)
		cover_mounts(directory, is_forbidden_type);
	else
		remove_mounts(directory);
	if (cell >= 0)
		close(cell);
	if (fetcher > 0)
		waitpid(fetcher, NULL, 0);
	execvp(step.items[0], step.items);
	die("%s: %m", step.items[0]);
}
