/*
 * stage: makes an operator's mount sources reachable for an agent's sandbox.
 *
 *     stage SPEC_FD CELL -- PROGRAM ARGUMENT...
 *
 * Runs as root on the host side, before privileges are dropped. In a mount
 * namespace of its own it opens each source with the creator's uid, gid and
 * groups, so that nothing can be named that the creator could not reach, and
 * binds what it opened (never the path a second time) below a private tmpfs,
 * from where the unprivileged sandbox takes it. Nothing shows on the host.
 *
 * CELL is "-", or a pidfd of another agent's keeper: then the sources are paths
 * in the view of that cell. This is how a detached child gets a view made from
 * its parent's without being inside its parent's PID namespace.
 *
 * SPEC_FD holds strings, each ended by a NUL: the directory for the tmpfs, the
 * creator's uid, gid, and groups (separated by commas), the forbidden paths
 * (separated by colons), then for each mount its options (letters: r bind
 * recursively, s nosuid, d nodev, x noexec, t left out if it is not there) and
 * its source.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <mntent.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

static void die(const char *format, ...)
{
	va_list args;

	fputs("ctxfs: ", stderr);
	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
	exit(125);
}

static bool inside(const char *path, const char *directory)
{
	size_t n = strlen(directory);

	return n && !strncmp(path, directory, n) && (path[n] == 0 || path[n] == '/');
}

static void check_source(int fd, const char *source, const char *forbidden, char *path, size_t size)
{
	char link[64], list[8192], *state = NULL;
	struct statfs fs;
	ssize_t n;

	if (fstatfs(fd, &fs) < 0)
		die("mount source %s: %s", source, strerror(errno));
	if (fs.f_type == PROC_SUPER_MAGIC || fs.f_type == CGROUP_SUPER_MAGIC ||
	    fs.f_type == CGROUP2_SUPER_MAGIC)
		die("mount source %s: procfs and cgroupfs cannot be given to an agent", source);
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	n = readlink(link, path, size - 1);
	if (n < 0)
		die("mount source %s: %s", source, strerror(errno));
	path[n] = 0;
	snprintf(list, sizeof list, "%s", forbidden);
	for (char *word = strtok_r(list, ":", &state); word; word = strtok_r(NULL, ":", &state))
		if (inside(path, word))
			die("mount source %s: the daemon's own directories cannot be given to an agent",
			    source);
}

/* Whoever has the descriptor of a mount namespace and is root can join it (setns(2)). */
static void join(int namespace, const char *what)
{
	if (setns(namespace, CLONE_NEWNS) < 0)
		die("%s: %s", what, strerror(errno));
}

/* openat2(2) with the creator's rights and nobody else's. */
static int open_as(const char *source, uid_t uid, gid_t gid, const gid_t *groups, int count)
{
	struct open_how how = {.flags = O_PATH | O_CLOEXEC, .resolve = RESOLVE_NO_MAGICLINKS};
	int fd, error;

	if (setgroups(count, groups) < 0 || setresgid(-1, gid, -1) < 0 || setresuid(-1, uid, -1) < 0)
		die("cannot take the creator's identity: %s", strerror(errno));
	/* A link of procfs would lead where this process is, not the creator. */
	fd = (int)syscall(SYS_openat2, AT_FDCWD, source, &how, sizeof how);
	error = errno;
	if (setresuid(-1, 0, -1) < 0 || setresgid(-1, 0, -1) < 0 || setgroups(0, NULL) < 0)
		die("cannot return to root: %s", strerror(errno));
	errno = error;
	return fd;
}

/*
 * The mount of what is open, as one of no namespace yet: made where it is, to be
 * put where it is wanted (open_tree(2)). With everything below: in a cell, what
 * covers something must go on covering it.
 */
static int clone_mount(int fd, const char *source)
{
	int tree = (int)syscall(SYS_open_tree, fd, "",
				OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH | AT_RECURSIVE);

	if (tree < 0)
		die("mount source %s: %s", source, strerror(errno));
	return tree;
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
		die("mount source %s: %s", source, strerror(errno));
	if (S_ISDIR(st.st_mode)) {
		if (mkdir(point, 0755) < 0)
			die("%s: %s", point, strerror(errno));
	} else {
		int file = open(point, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);

		if (file < 0)
			die("%s: %s", point, strerror(errno));
		close(file);
	}
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	if (tree >= 0 ? syscall(SYS_move_mount, tree, "", AT_FDCWD, point, MOVE_MOUNT_F_EMPTY_PATH) < 0
		      : mount(link, point, NULL, MS_BIND | recursive, NULL) < 0)
		die("mount source %s: %s", source, strerror(errno));
	/* the whole tree below it, not its top alone */
	if (attributes.attr_set && syscall(SYS_mount_setattr, AT_FDCWD, point, AT_RECURSIVE,
					   &attributes, sizeof attributes) < 0)
		die("mount source %s: options: %s", source, strerror(errno));
}

/* Whether a mount below a source is one that no agent may have. */
static bool is_forbidden_type(const char *type)
{
	return !strcmp(type, "proc") || !strcmp(type, "cgroup") || !strcmp(type, "cgroup2");
}

/*
 * Takes procfs and cgroupfs out of what was bound below a point, wherever they
 * are, and covers the daemon's own directories. Read anew after each change.
 */
static void clean_tree(const char *point, const char *source, const char *real,
		       const char *forbidden)
{
	char list[8192], *state = NULL;
	bool found = true;

	while (found) {
		FILE *mounts = setmntent("/proc/self/mounts", "r");
		char last[4096] = "";
		struct mntent *entry;

		if (!mounts)
			die("mount source %s: /proc/self/mounts: %s", source, strerror(errno));
		while ((entry = getmntent(mounts)))
			if (inside(entry->mnt_dir, point) && is_forbidden_type(entry->mnt_type))
				snprintf(last, sizeof last, "%s", entry->mnt_dir);
		endmntent(mounts);
		found = last[0];
		if (found && umount2(last, MNT_DETACH) < 0)
			die("mount source %s: %s: %s", source, last, strerror(errno));
	}
	snprintf(list, sizeof list, "%s", forbidden);
	for (char *word = strtok_r(list, ":", &state); word; word = strtok_r(NULL, ":", &state)) {
		const char *rest = strcmp(real, "/") ? word + strlen(real) : word;
		char path[8192];

		if (strcmp(real, "/") && !inside(word, real))
			continue;
		snprintf(path, sizeof path, "%s%s", point, rest);
		if (access(path, F_OK) == 0 &&
		    mount("none", path, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, "mode=0") < 0)
			die("mount source %s: %s: %s", source, path, strerror(errno));
	}
}

/*
 * Hides every procfs below a point: what a cell's mounts show of its processes
 * is not for others. They cannot be taken out, a cell's mounts are locked.
 */
static void cover_procfs(const char *point, const char *source)
{
	FILE *mounts = setmntent("/proc/self/mounts", "r");
	struct mntent *entry;
	char *covered[256];
	size_t count = 0;

	if (!mounts)
		die("mount source %s: /proc/self/mounts: %s", source, strerror(errno));
	while ((entry = getmntent(mounts)) && count < 256)
		if (inside(entry->mnt_dir, point) && !strcmp(entry->mnt_type, "proc"))
			covered[count++] = strdup(entry->mnt_dir);
	endmntent(mounts);
	for (size_t i = 0; i < count; i++) {
		struct stat st;
		/* what lay below one that is covered by now is not there any more */
		bool there = stat(covered[i], &st) == 0;
		int failed = 0;

		if (there && S_ISDIR(st.st_mode))
			failed = mount("none", covered[i], "tmpfs", MS_RDONLY | MS_NOSUID, "mode=0");
		else if (there)
			failed = mount("/dev/null", covered[i], NULL, MS_BIND, NULL);
		if (failed < 0)
			die("mount source %s: %s: %s", source, covered[i], strerror(errno));
		free(covered[i]);
	}
}

int main(int argc, char **argv)
{
	static char data[1 << 20];
	char *items[2048], *directory, *forbidden, *state = NULL;
	size_t length = 0, count = 0;
	gid_t groups[1024], gid;
	uid_t uid;
	int group_count = 0, fd, own = -1, cell = -1;
	ssize_t n;

	if (argc < 5 || strcmp(argv[3], "--"))
		die("usage: stage SPEC_FD CELL -- PROGRAM ARGUMENT...");
	if (strcmp(argv[2], "-"))
		cell = atoi(argv[2]);
	fd = atoi(argv[1]);
	while ((n = read(fd, data + length, sizeof data - 1 - length)) > 0)
		length += n;
	close(fd);
	for (char *p = data; p < data + length && count < 2048; p += strlen(p) + 1)
		items[count++] = p;
	if (count < 5)
		die("the runtime's mount data is damaged");
	directory = items[0];
	uid = (uid_t)atol(items[1]);
	gid = (gid_t)atol(items[2]);
	for (char *word = strtok_r(items[3], ",", &state); word && group_count < 1024;
	     word = strtok_r(NULL, ",", &state))
		groups[group_count++] = (gid_t)atol(word);
	forbidden = items[4];

	if (unshare(CLONE_NEWNS) < 0)
		die("unshare: %s", strerror(errno));
	/* Slaves, not private: a filesystem mounted anew after a crash of the
	 * daemon must still arrive in the sandbox. */
	if (mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) < 0 ||
	    mount("tmpfs", directory, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755") < 0)
		die("%s: %s", directory, strerror(errno));
	if (cell >= 0 && (own = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC)) < 0)
		die("/proc/self/ns/mnt: %s", strerror(errno));
	for (size_t i = 5; i + 1 < count; i += 2) {
		const char *source = items[i + 1], *options = items[i];
		char point[4096], real[4096];
		int tree = -1;

		snprintf(point, sizeof point, "%s/%zu", directory, (i - 5) / 2);
		if (cell >= 0)
			join(cell, "the parent's cell");
		fd = open_as(source, uid, gid, groups, group_count);
		if (fd < 0 && errno == ENOENT && strchr(options, 't')) {
			if (cell >= 0)
				join(own, "the way back");
			continue;
		}
		if (fd < 0 && errno == ELOOP)
			die("mount source %s: links of procfs, and loops of links, cannot be "
			    "given to an agent", source);
		if (fd < 0)
			die("mount source %s: %s", source, strerror(errno));
		if (cell >= 0) {
			tree = clone_mount(fd, source);
			join(own, "the way back");
		}
		check_source(fd, source, forbidden, real, sizeof real);
		bind_source(fd, tree, source, point, options);
		if (cell < 0)
			clean_tree(point, source, real, forbidden);
		else
			cover_procfs(point, source);
		close(fd);
		if (tree >= 0)
			close(tree);
	}
	if (cell >= 0)
		close(cell);
	execvp(argv[4], argv + 4);
	die("%s: %s", argv[4], strerror(errno));
}
