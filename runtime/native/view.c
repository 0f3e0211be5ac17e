/*
 * view: builds an agent's view, and becomes PID 1 of its cell.
 *
 *     view REPORT_FD ORDERS_FD PROGRAM_FD UID GID GROUPS ARGUMENTS    (orders.h)
 *
 * Takes the ids and drops every capability before it touches anything of the agent's.
 * Then it makes user, mount, PID, IPC, UTS and cgroup namespaces, as any user may, and
 * in them a new root by its orders. It then executes PROGRAM_FD, which was opened before
 * the view existed, with ARGUMENTS from the zeroth on, the descriptors below its own and an
 * empty environment. The initial process waits for it and exits with its status.
 *
 * The author of the view in which this program starts may be hostile to the agent of
 * the new view, and files may change at any time. So this program executes, loads and
 * trusts nothing in a view: it is static and executed by descriptor, opens each source
 * once and binds what it opened, and resolves targets so that no link can leave the
 * new root.
 *
 * ORDERS_FD holds orders: a list of operations, performed in order. Each is a list of
 * its name and arguments.
 *
 *     memory SIZE INODES           bounds of all that is in memory, in bytes and files
 *     network                      a network namespace with only a loopback
 *     bind OPTIONS ID SOURCE TARGET  the object at SOURCE in the initial view, with
 *                                  all mounts below it, nosuid and nodev. OPTIONS are
 *                                  letters or "-": r read-only, R read-only except for
 *                                  the mounts below, x noexec, t skip a missing SOURCE,
 *                                  s later mounts on the host appear too, without these
 *                                  options. ID is "-", or identifies the object on a
 *                                  path without links: DEVICE:INODE, "*" for any.
 *     root SOURCE                  a separate root like that at SOURCE: new directories
 *                                  and links, binds of the mounts in them, read-only
 *                                  binds of files. Changes to one of the two roots do
 *                                  not affect the other.
 *     tmpfs MODE TARGET            an empty directory in memory, a mount of its own
 *     dir MODE TARGET              a directory
 *     symlink TEXT TARGET          a symbolic link
 *     proc TARGET                  procfs with the processes of the cell
 *     dev TARGET                   the harmless devices
 *     lent FD TARGET               a directory whose mount lend cloned
 *     fix TARGET                   makes the filesystem that is mounted there read-only
 *     reach DIRECTORY PATH         what a link leads to: PATH if it is a directory, else the
 *                                  whole DIRECTORY in which it is, or with "-" the file
 *                                  alone. Read-only, at its own place; nothing if it is
 *                                  not there, the agent may not see it, or a link is on
 *                                  the way.
 *     file TEXT TARGET             a read-only file with this text, which covers the file
 *                                  that is there
 *     hide TARGET                  covers a directory with an empty, inaccessible one,
 *                                  and any other file with an empty one; does nothing
 *                                  if nothing is there
 *     expect TARGET TEXT           says TEXT on standard error if the agent may not write
 *                                  TARGET in the end; of a read-only filesystem, that it is one
 *
 * A first bind on "/" becomes the root; otherwise, the root is in memory. Missing targets
 * and their parent directories are created. All that is in memory is one filesystem, so that
 * one bound holds for all of it, and whoever asks for its use need not know where it is.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <linux/mount.h>
/* Some C libraries have a struct statx as well, which does not tell the mount. */
#define statx kernel_statx
#define statx_timestamp kernel_statx_timestamp
#include <linux/stat.h>
#undef statx
#undef statx_timestamp
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/sysmacros.h>

#include "common.h"
#include "orders.h"

/* from sys/mount.h, which in some C libraries conflicts with linux/mount.h */
int umount2(const char *target, int flags);
#define MNT_DETACH 2

#define ROOT_DEPTH_MAX 64	/* far above what mount tables need */

/* Directories used while the view is built. */
static int base = -1, old_root = -1, new_root = -1, hidden = -1, texts = -1;

/* For calls that succeed on every machine that can make sandboxes. */
static int must(int result, const char *what)
{
	if (result < 0)
		die("the agent's view: %s: %m", what);
	return result;
}

struct operation {
	const char *name;
	size_t arguments;
};

static const struct operation operations[] = {
	{"memory", 2}, {"network", 0}, {"bind", 4}, {"root", 1}, {"tmpfs", 2}, {"dir", 2},
	{"symlink", 2}, {"proc", 1}, {"dev", 1}, {"hide", 1}, {"lent", 2}, {"fix", 1},
	{"reach", 2}, {"file", 2}, {"expect", 2},
};

static void check_operation(struct list words)
{
	for (size_t i = 0; words.count && i < sizeof operations / sizeof *operations; i++) {
		if (strcmp(words.items[0], operations[i].name))
			continue;
		if (words.count != operations[i].arguments + 1)
			die("the agent's view: wrong number of arguments for %s", words.items[0]);
		return;
	}
	die("the agent's view: unknown operation %s", words.count ? words.items[0] : "");
}

/* The operations to perform. */
struct plan {
	struct list *operations;
	size_t count;
};

/* The first operation of a name, or NULL. */
static char **find_operation(struct plan plan, const char *name)
{
	for (size_t i = 0; i < plan.count; i++)
		if (!strcmp(plan.operations[i].items[0], name))
			return plan.operations[i].items;
	return NULL;
}

static struct plan read_plan(int fd)
{
	struct orders orders = read_orders(fd);
	struct plan plan;

	plan.operations = take_lists(&orders, &plan.count);
	if (!all_taken(&orders))
		die("the agent's view: the runtime's plan is damaged");
	for (size_t i = 0; i < plan.count; i++)
		check_operation(plan.operations[i]);
	if (!find_operation(plan, "memory"))
		die("the agent's view: no bounds of its memory");
	return plan;
}

static int open_below(int directory, const char *path, unsigned long long resolve)
{
	int fd;

	/* EAGAIN: a rename prevented the check of ".." */
	do
		fd = open_path(directory, path, O_PATH, resolve);
	while (fd < 0 && (errno == EAGAIN || errno == EINTR));
	return fd;
}

/* Opens a path in the unfinished view; it never leads outside. */
static int open_target(const char *path)
{
	return open_below(new_root, path, RESOLVE_IN_ROOT);
}

static int clone_tree(int fd, unsigned flags)
{
	return (int)syscall(SYS_open_tree, fd, "",
			    OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH | flags);
}

static int set_attributes(int tree, unsigned long long set, unsigned flags)
{
	struct mount_attr attributes = {.attr_set = set};

	return (int)syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH | flags, &attributes,
			    sizeof attributes);
}

/* Later mounts in the other view, which have no restrictions, must not appear. */
static int make_private(int tree)
{
	struct mount_attr attributes = {.propagation = MS_PRIVATE};

	return (int)syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH | AT_RECURSIVE, &attributes,
			    sizeof attributes);
}

static int attach(int tree, int target)
{
	return (int)syscall(SYS_move_mount, tree, "", target, "",
			    MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH);
}

/* Makes a new, detached filesystem. OPTIONS are pairs; NULL ends them. */
static int make_filesystem(const char *type, const char *const *options, unsigned attributes)
{
	int context = must((int)syscall(SYS_fsopen, type, FSOPEN_CLOEXEC), type);
	int made;

	for (; *options; options += 2)
		must((int)syscall(SYS_fsconfig, context, FSCONFIG_SET_STRING, options[0], options[1], 0),
		     type);
	must((int)syscall(SYS_fsconfig, context, FSCONFIG_CMD_CREATE, NULL, NULL, 0), type);
	made = must((int)syscall(SYS_fsmount, context, FSMOUNT_CLOEXEC, attributes), type);
	close(context);
	return made;
}

static int make_tmpfs(const char *mode, const char *size, const char *inodes)
{
	const char *const options[] = {"mode", mode, "size", size, "nr_inodes", inodes, NULL};

	return make_filesystem("tmpfs", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
}

/* Makes a directory in memory, and returns a detached mount of it. */
static int make_directory_in_memory(const char *mode)
{
	static unsigned count;
	char name[16];
	int fd, tree;

	snprintf(name, sizeof name, "memory%u", count++);
	must(mkdirat(base, name, (mode_t)strtoul(mode, NULL, 8)), name);
	fd = must(openat(base, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), name);
	tree = must(clone_tree(fd, 0), name);
	close(fd);
	return tree;
}

/* Opens the directory of a target, created if missing; NAME returns the target's name. */
static int open_parent(const char *target, const char **name);

/* Opens a target; if it is missing, creates a directory or an empty file. */
static int make_target(const char *target, bool directory)
{
	int fd = open_target(target), parent;
	const char *name;
	struct stat st;

	if (fd < 0 && errno == ENOENT) {
		parent = open_parent(target, &name);
		if ((directory ? mkdirat(parent, name, 0755) : mknodat(parent, name, S_IFREG | 0444, 0)) < 0)
			die("mount target %s is not there and cannot be made: %m", target);
		fd = open_below(parent, name, RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS);
		close(parent);
	}
	if (fd < 0 || fstat(fd, &st) < 0)
		die("mount target %s: %m", target);
	if (S_ISDIR(st.st_mode) != directory)
		die(directory ? "mount target %s is not a directory, but its source is: name another target"
			      : "mount target %s is a directory, but its source is not: name another target",
		    target);
	return fd;
}

static int open_parent(const char *target, const char **name)
{
	size_t length = strlen(target);
	char *parent = strdup(target);
	char *slash;
	int fd;

	if (!parent)
		die("mount target %s: %m", target);
	while (length > 1 && parent[length - 1] == '/')
		parent[--length] = 0;
	slash = strrchr(parent, '/');
	if (!slash || !slash[1])
		die("mount target %s: %s", target, strerror(EINVAL));
	*name = target + (slash + 1 - parent);
	while (slash > parent && slash[-1] == '/')
		slash--;
	if (slash == parent)
		slash++;
	*slash = 0;
	fd = make_target(parent, true);
	free(parent);
	return fd;
}

static void put(int tree, const char *target, bool directory)
{
	int fd = make_target(target, directory);

	if (attach(tree, fd) < 0)
		die("mount target %s: %m", target);
	close(fd);
	close(tree);
}

/* Clones a source in the initial view with its mounts; -1 if it is missing and may be. */
static int take_source(const char *options, const char *id, const char *source, bool *directory)
{
	unsigned long long attributes = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV;
	bool exact = strcmp(id, "-") != 0;
	int fd = open_below(old_root, source, RESOLVE_IN_ROOT | (exact ? RESOLVE_NO_SYMLINKS : 0));
	struct stat st;
	int tree;

	if (fd < 0 && errno == ENOENT && strchr(options, 't'))
		return -1;
	if (exact && ((fd < 0 && (errno == ELOOP || errno == ENOENT || errno == ENOTDIR)) ||
		      (fd >= 0 && !is_object(fd, id))))
		die(ANOTHER, source);
	if (fd < 0 || fstat(fd, &st) < 0)
		die("mount source %s: %m", source);
	*directory = S_ISDIR(st.st_mode);
	tree = clone_tree(fd, AT_RECURSIVE);
	if (tree < 0)
		die("mount source %s: %m", source);
	close(fd);
	if (strchr(options, 'r'))
		attributes |= MOUNT_ATTR_RDONLY;
	if (strchr(options, 'x'))
		attributes |= MOUNT_ATTR_NOEXEC;
	if ((!strchr(options, 's') && make_private(tree) < 0) ||
	    set_attributes(tree, attributes, AT_RECURSIVE) < 0 ||
	    (strchr(options, 'R') && set_attributes(tree, MOUNT_ATTR_RDONLY, 0) < 0))
		die("mount source %s: options: %m", source);
	return tree;
}

static void bind_source(const char *options, const char *id, const char *source, const char *target)
{
	bool directory;
	int tree = take_source(options, id, source, &directory);

	if (tree < 0)
		return;
	if (!strcmp(target, "/")) {
		if (attach(tree, new_root) < 0)
			die("mount target /: %m");
		close(new_root);
		new_root = tree;
	} else {
		put(tree, target, directory);
	}
}

/* Shows an object of the initial view at its own place, if it is there and nothing hinders. */
static bool show(const char *path, mode_t type)
{
	int fd = open_below(old_root, path, RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS), tree;
	struct stat st;
	bool right = fd >= 0 && fstat(fd, &st) == 0 && (st.st_mode & S_IFMT) == type;

	tree = right ? clone_tree(fd, AT_RECURSIVE) : -1;
	if (fd >= 0)
		close(fd);
	if (tree < 0)
		return false;
	if (make_private(tree) < 0 ||
	    set_attributes(tree, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV |
			   MOUNT_ATTR_NOEXEC, AT_RECURSIVE) < 0)
		die("%s: options: %m", path);
	put(tree, path, type == S_IFDIR);
	return true;
}

static void reach(const char *directory, const char *path)
{
	bool alone = !strcmp(directory, "-");

	if (!show(path, S_IFDIR))
		show(alone ? path : directory, alone ? S_IFREG : S_IFDIR);
}

static void make_file(const char *text, const char *target)
{
	static unsigned count;
	char name[16];
	size_t length = strlen(text);
	int fd, tree;

	snprintf(name, sizeof name, "%u", count++);
	fd = must(openat(texts, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0444), target);
	for (ssize_t n; length; text += n, length -= (size_t)n)
		n = must((int)write(fd, text, length), target);
	tree = must(clone_tree(fd, 0), target);
	must(set_attributes(tree, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0), target);
	close(fd);
	put(tree, target, false);
}

/* Returns the mount and the type of a file. */
static void examine(int fd, struct kernel_statx *st, const char *name)
{
	/* without asking the filesystem, which may not answer any more */
	if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC,
		    STATX_BASIC_STATS | STATX_MNT_ID, st) < 0)
		die("the parent's root: %s: %m", name);
}

static void copy_link(int from, int to, const char *name)
{
	char text[4096];
	ssize_t n = readlinkat(from, "", text, sizeof text - 1);

	if (n >= 0)
		text[n] = 0;
	if (n < 0 || symlinkat(text, to, name) < 0)
		die("the parent's root: %s: %m", name);
}

/* Attaches an open object at a name in a directory; a mount with the mounts below it. */
static void bind_entry(int from, int to, const char *name, bool mounted, bool directory)
{
	unsigned long long attributes = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV;
	int tree = clone_tree(from, mounted ? AT_RECURSIVE : 0), point;

	if (tree < 0 || (directory ? mkdirat(to, name, 0755)
				   : mknodat(to, name, S_IFREG | 0444, 0)) < 0)
		die("the parent's root: %s: %m", name);
	point = open_below(to, name, RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS);
	if (point < 0 || make_private(tree) < 0 ||
	    set_attributes(tree, attributes | (mounted ? 0 : MOUNT_ATTR_RDONLY), AT_RECURSIVE) < 0 ||
	    attach(tree, point) < 0)
		die("the parent's root: %s: %m", name);
	close(point);
	close(tree);
}

/*
 * A program may change the filesystem that is the root of its view, including links
 * such as /lib64, through which programs start. So no two views share a root.
 */
static void copy_root(int from, int to, unsigned long long mount, int depth)
{
	int fd = openat(from, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *entries = fd < 0 ? NULL : fdopendir(fd);
	struct dirent *entry;

	if (!entries || depth > ROOT_DEPTH_MAX)
		die("the parent's root: %s", strerror(entries ? ELOOP : errno));
	while ((entry = readdir(entries))) {
		const char *name = entry->d_name;
		struct kernel_statx st;
		int below, made;

		if (!strcmp(name, ".") || !strcmp(name, ".."))
			continue;
		below = openat(from, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
		if (below < 0 && errno == ENOENT)
			continue;	/* removed meanwhile */
		if (below < 0)
			die("the parent's root: %s: %m", name);
		examine(below, &st, name);
		if (st.stx_mnt_id != mount) {
			bind_entry(below, to, name, true, S_ISDIR(st.stx_mode));
		} else if (S_ISLNK(st.stx_mode)) {
			copy_link(below, to, name);
		} else if (S_ISDIR(st.stx_mode)) {
			if (mkdirat(to, name, st.stx_mode & 0777) < 0)
				die("the parent's root: %s: %m", name);
			made = must(open_below(to, name, RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS), name);
			copy_root(below, made, mount, depth + 1);
			close(made);
		} else if (S_ISREG(st.stx_mode)) {
			bind_entry(below, to, name, false, false);
		}
		close(below);
	}
	closedir(entries);
}

static void make_root(const char *source)
{
	int fd = open_below(old_root, source, RESOLVE_IN_ROOT);
	struct kernel_statx st;

	if (fd < 0)
		die("the parent's root: %m");
	examine(fd, &st, source);
	copy_root(fd, new_root, st.stx_mnt_id, 0);
	close(fd);
}

static void make_directory(const char *mode, const char *target)
{
	int fd = open_target(target);
	const char *name;
	int parent;

	if (fd >= 0) {
		close(fd);
		return;
	}
	parent = open_parent(target, &name);
	if (mkdirat(parent, name, (mode_t)strtoul(mode, NULL, 8)) < 0)
		die("%s: %m", target);
	close(parent);
}

static void make_link(const char *text, const char *target)
{
	char there[4096];
	const char *name;
	int parent = open_parent(target, &name);

	if (symlinkat(text, parent, name) < 0) {
		int error = errno;
		ssize_t n = readlinkat(parent, name, there, sizeof there);

		if (n != (ssize_t)strlen(text) || memcmp(there, text, (size_t)n))
			die("symbolic link %s: %s", target, strerror(error));
	}
	close(parent);
}

/* Protects the files through which uid 0 can change the kernel: the agent may be uid 0. */
static void close_proc(int proc)
{
	static const char *const names[] = {"sys", "sysrq-trigger", "irq", "bus"};

	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		int fd, tree;

		if (faccessat(proc, names[i], W_OK, 0) < 0)
			continue;
		fd = must(open_below(proc, names[i], 0), "procfs");
		tree = must(clone_tree(fd, AT_RECURSIVE), "procfs");
		must(set_attributes(tree, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV,
				    AT_RECURSIVE), "procfs");
		must(attach(tree, fd), "procfs");
		close(tree);
		close(fd);
	}
}

static void mount_proc(const char *target)
{
	static const char *const none[] = {NULL};
	int made = make_filesystem("proc", none,
				   MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
	int proc = must(dup(made), "procfs");

	put(made, target, true);
	close_proc(proc);
	close(proc);
}

/* Clones the mount of a device in the initial view, after checking its number. */
static int take_device(const char *name, unsigned number)
{
	char path[64];
	struct stat st;
	int fd, tree;

	snprintf(path, sizeof path, "dev/%s", name);
	fd = open_below(old_root, path, RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS);
	must(fd, path);
	must(fstat(fd, &st), path);
	if (!S_ISCHR(st.st_mode) || st.st_rdev != makedev(number >> 8, number & 0xff))
		die("/%s is not the device of that name", path);
	tree = must(clone_tree(fd, 0), path);
	close(fd);
	return tree;
}

static void make_devices(const char *target)
{
	static const struct {
		const char *name;
		unsigned number;
	} devices[] = {{"null", 0x103}, {"zero", 0x105}, {"full", 0x107},
		       {"random", 0x108}, {"urandom", 0x109}, {"tty", 0x500}};
	static const char *const links[][2] = {
		{"/proc/self/fd/0", "stdin"}, {"/proc/self/fd/1", "stdout"},
		{"/proc/self/fd/2", "stderr"}, {"/proc/self/fd", "fd"},
		{"/proc/kcore", "core"}, {"pts/ptmx", "ptmx"}};
	static const char *const terminals[] = {"ptmxmode", "0666", "mode", "620",
						"max", "64", NULL};
	int dev = make_directory_in_memory("0755"), pts, made;

	made = must(dup(dev), "dup");
	put(made, target, true);
	for (size_t i = 0; i < sizeof devices / sizeof *devices; i++) {
		int tree = take_device(devices[i].name, devices[i].number), point;

		must(set_attributes(tree, MOUNT_ATTR_NOSUID, 0), "devices");
		must(mknodat(dev, devices[i].name, S_IFREG | 0444, 0), "devices");
		point = must(open_below(dev, devices[i].name, RESOLVE_NO_SYMLINKS), "devices");
		must(attach(tree, point), "devices");
		close(point);
		close(tree);
	}
	for (size_t i = 0; i < sizeof links / sizeof *links; i++)
		must(symlinkat(links[i][0], dev, links[i][1]), "devices");
	must(mkdirat(dev, "shm", 0755), "devices");
	must(mkdirat(dev, "pts", 0755), "devices");
	made = make_filesystem("devpts", terminals, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC);
	pts = must(open_below(dev, "pts", RESOLVE_NO_SYMLINKS), "devices");
	must(attach(made, pts), "devices");
	close(pts);
	close(made);
	close(dev);
}

static void cover(int fd, const char *target)
{
	struct stat st;
	int tree;

	if (fstat(fd, &st) < 0)
		die("hide %s: %m", target);
	if (S_ISDIR(st.st_mode)) {
		tree = clone_tree(hidden, 0);
	} else {
		tree = take_device("null", 0x103);
		if (set_attributes(tree, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0) < 0)
			die("hide %s: %m", target);
	}
	if (tree < 0 || attach(tree, fd) < 0)
		die("hide %s: %m", target);
	close(tree);
}

/*
 * A directory on the path to the target is not accessible to the agent at the moment,
 * so this program cannot look below it. It hides that directory, because the target
 * would appear if somebody made the directory accessible later.
 */
static void hide_closed(const char *target)
{
	char *path = strdup(target);
	int found = -1;

	if (!path)
		die("hide %s: %m", target);
	for (char *slash = path; (slash = strchr(slash + 1, '/'));) {
		int fd;

		*slash = 0;
		fd = open_target(path);
		*slash = '/';
		if (fd < 0)
			break;
		if (found >= 0)
			close(found);
		found = fd;
	}
	if (found >= 0) {
		cover(found, target);
		close(found);
	}
	free(path);
}

static void hide(const char *target)
{
	int fd = open_target(target);

	if (fd < 0 && errno == EACCES) {
		hide_closed(target);
	} else if (fd >= 0) {
		cover(fd, target);
		close(fd);
	} else if (errno != ENOENT && errno != ENOTDIR && errno != ELOOP) {
		die("hide %s: %m", target);
	}
}

static void fix(const char *target)
{
	int fd = open_target(target);

	if (fd < 0 || set_attributes(fd, MOUNT_ATTR_RDONLY, 0) < 0)
		die("%s: %m", target);
	close(fd);
}

static void perform(char **operation)
{
	const char *name = operation[0];

	if (!strcmp(name, "bind"))
		bind_source(operation[1], operation[2], operation[3], operation[4]);
	else if (!strcmp(name, "root"))
		make_root(operation[1]);
	else if (!strcmp(name, "tmpfs"))
		put(make_directory_in_memory(operation[1]), operation[2], true);
	else if (!strcmp(name, "dir"))
		make_directory(operation[1], operation[2]);
	else if (!strcmp(name, "symlink"))
		make_link(operation[1], operation[2]);
	else if (!strcmp(name, "proc"))
		mount_proc(operation[1]);
	else if (!strcmp(name, "dev"))
		make_devices(operation[1]);
	else if (!strcmp(name, "hide"))
		hide(operation[1]);
	else if (!strcmp(name, "lent"))
		put(atoi(operation[1]), operation[2], true);
	else if (!strcmp(name, "fix"))
		fix(operation[1]);
	else if (!strcmp(name, "reach"))
		reach(operation[1], operation[2]);
	else if (!strcmp(name, "file"))
		make_file(operation[1], operation[2]);
}

/*
 * Says what the agent may not write, as the agent. The monitor may take it for the program's, so
 * it does not begin like what the runtime says.
 */
static void tell_unwritable(struct plan plan)
{
	for (size_t i = 0; i < plan.count; i++) {
		char **operation = plan.operations[i].items;

		if (strcmp(operation[0], "expect") || access(operation[1], W_OK) == 0)
			continue;
		if (errno == EROFS)
			dprintf(STDERR_FILENO, "mount: %s is rw, but its filesystem is read-only\n",
				operation[1]);
		else
			dprintf(STDERR_FILENO, "%s\n", operation[2]);
	}
}

static void write_map(int self, const char *file, const char *text)
{
	/* while this process is not dumpable, these files belong to root */
	must(prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl");
	must(write_file(self, file, text), file);
	must(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl");
}

static void write_maps(int self, uid_t uid, uid_t outer_uid, gid_t gid, gid_t outer_gid)
{
	char text[64];

	snprintf(text, sizeof text, "%u %u 1\n", uid, outer_uid);
	write_map(self, "uid_map", text);
	write_map(self, "setgroups", "deny");
	snprintf(text, sizeof text, "%u %u 1\n", gid, outer_gid);
	write_map(self, "gid_map", text);
}

/*
 * Brings the loopback up; the kernel then gives it its addresses. The agent's group may ping it,
 * unless this machine has no such setting here.
 */
static void raise_loopback(void)
{
	struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
	int fd = must(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), "loopback");

	must(ioctl(fd, SIOCSIFFLAGS, &request), "loopback");
	close(fd);
	write_file(AT_FDCWD, "/proc/sys/net/ipv4/ping_group_range", "0 0");
}

/* Segments of shmget(2) have no file. Before Linux 5.19, nobody but root may bound them. */
static void bound_shared_memory(const char *size)
{
	char pages[32];

	snprintf(pages, sizeof pages, "%llu", strtoull(size, NULL, 10) / (unsigned)sysconf(_SC_PAGESIZE));
	write_file(AT_FDCWD, "/proc/sys/kernel/shmall", pages);
}

/*
 * Builds the new root and makes it the only one. At first, the old and the new root
 * are beside each other in a separate directory, so that the old root stays reachable
 * and nothing in it is covered.
 */
static void build(struct plan plan)
{
	char **bounds = find_operation(plan, "memory");
	int point, root, tree;

	/* It is mounted on top of "/" and no path leads to it, until it becomes "/". */
	base = make_tmpfs("0755", bounds[1], bounds[2]);
	root = must(open("/", O_PATH | O_DIRECTORY | O_CLOEXEC), "/");
	must(attach(base, root), "/");
	must(fchdir(base), "chdir");
	must(mkdir("old", 0755), "mkdir");
	must(mkdir("new", 0755), "mkdir");
	must(mkdir("hidden", 0), "mkdir");
	must(mkdir("texts", 0700), "mkdir");
	must((int)syscall(SYS_pivot_root, ".", "old"), "pivot_root");
	old_root = must(open("old", O_PATH | O_DIRECTORY | O_CLOEXEC), "old root");
	texts = must(open("texts", O_PATH | O_DIRECTORY | O_CLOEXEC), "texts");
	close(root);
	/* One mount for everything hidden. Not a plain directory, which its owner can change. */
	tree = make_tmpfs("0", "4k", "1");
	must(set_attributes(tree, MOUNT_ATTR_RDONLY, 0), "hidden");
	point = must(open("hidden", O_PATH | O_DIRECTORY | O_CLOEXEC), "hidden");
	must(attach(tree, point), "hidden");
	close(point);
	hidden = tree;
	point = must(open("new", O_PATH | O_DIRECTORY | O_CLOEXEC), "new root");
	new_root = make_directory_in_memory("0755");
	must(attach(new_root, point), "new root");
	close(point);

	for (size_t i = 0; i < plan.count; i++)
		perform(plan.operations[i].items);

	must(fchdir(new_root), "new root");
	must((int)syscall(SYS_pivot_root, ".", "."), "pivot_root");
	/* The old root is now on top of the new one: unmount it with everything below. */
	must(umount2(".", MNT_DETACH), "old root");
	must(chdir("/"), "chdir");
	close(base);
	close(hidden);
	close(texts);
	close(old_root);
	close(new_root);
}

/* The monitor keeps the mounts until the end of the cell is recorded, and so it ends sooner. */
static void hand_over_mounts(int self, int report)
{
	int mounts = openat(self, "ns/mnt", O_RDONLY | O_CLOEXEC);

	if (mounts >= 0)
		send_message(report, "mounts", strlen("mounts"), &mounts, 1);
	close(mounts);
}

static void become_program(struct plan plan, const struct ids *ids, int report, int program,
			   char **argv)
{
	int self = must(open("/proc/self", O_PATH | O_DIRECTORY | O_CLOEXEC), "/proc/self");

	umask(0);
	/* devpts needs a uid 0 in the user namespace (devpts(5)) */
	write_maps(self, 0, ids->uid, 0, ids->gid);
	hand_over_mounts(self, report);
	if (find_operation(plan, "network"))
		raise_loopback();
	bound_shared_memory(find_operation(plan, "memory")[1]);
	build(plan);
	/* A second user namespace, in which the agent has its own ids again. The first
	 * one owns the mounts, so that no process in here may change them. */
	must(unshare(CLONE_NEWUSER), "user namespace");
	write_maps(self, ids->uid, 0, ids->gid, 0);
	close(self);
	must(give_up_capabilities(), "capabilities");
	must(setsid(), "setsid");
	umask(022);
	tell_unwritable(plan);
	must(close_from((unsigned)program, CLOSE_ON_EXEC), "close_range");
	execute(program, argv);
	die("the cell's PID 1: %m");
}

int main(int argc, char **argv)
{
	unsigned long flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS |
			      CLONE_NEWCGROUP | SIGCHLD;
	struct orders orders = orders_of_arguments(argc, argv);
	int report = take_descriptor(&orders);
	int plan_fd = take_descriptor(&orders), program = take_descriptor(&orders);
	struct ids ids = take_ids(&orders);
	struct list arguments = take_list(&orders);
	struct plan plan;
	pid_t pid;

	if (!all_taken(&orders) || !arguments.count)
		die("usage: view REPORT_FD ORDERS_FD PROGRAM_FD UID GID GROUPS ARGUMENTS");
	prctl(PR_SET_NAME, "view");
	prctl(PR_SET_DUMPABLE, 0);
	must(become_groups(&ids), "setgroups");
	must(become(&ids), "the agent's ids");
	plan = read_plan(plan_fd);
	if (find_operation(plan, "network"))
		flags |= CLONE_NEWNET;
	pid = (pid_t)syscall(SYS_clone, flags, NULL, NULL, NULL, 0UL);
	if (pid < 0)
		die("no namespaces for the agent: %m");
	if (pid == 0)
		become_program(plan, &ids, report, program, arguments.items);
	/* Readers that wait for the end of these descriptors need not wait for this process. */
	close_from(0, 0);
	return await_child(pid);
}
