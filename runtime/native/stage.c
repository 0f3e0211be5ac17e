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
 * Without root it is the creator's uid that runs this, and a user namespace lets
 * it mount. The mounts of the host are locked in there (mount_namespaces(7)):
 * what no agent may have is covered where root would take it out. And nobody comes
 * back from a cell: a process of its own goes in and sends what it opened.
 *
 * CELL is "-", or a pidfd of another agent's keeper: then the sources are paths
 * in the view of that cell. This is how a detached child gets a view made from
 * its parent's without being inside its parent's PID namespace.
 *
 * SPEC_FD holds strings, each ended by a NUL: the directory for the tmpfs, the
 * creator's uid, gid, and groups (separated by commas), the forbidden paths
 * (separated by colons), then for each mount its options (letters: r bind
 * recursively, s nosuid, d nodev, x noexec, t left out if it is not there), ID
 * and its source. ID is "-", or what the source was when it was written (look.c):
 * DEVICE:INODE, or "*" for whatever is there by now. With an ID no link is followed.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/magic.h>
#include <linux/nsfs.h>
#include <linux/openat2.h>
#include <mntent.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "die.h"

#define ANOTHER "mount source %s: is another object than when the line was written: " \
		"write the line again"

static bool rootless;

/* One source: what is there and, from a cell, the mount of it (clone_mount). */
struct opened {
	int fd;
	int tree;
	int error;
};

/* Whose rights a source is opened with. */
struct creator {
	uid_t uid;
	gid_t gid;
	gid_t groups[1024];
	int group_count;
};

static bool inside(const char *path, const char *directory)
{
	size_t n = strlen(directory);

	return n && !strncmp(path, directory, n) && (path[n] == 0 || path[n] == '/');
}

/* Whether this is what was there when its name was written down. */
static void check_object(int fd, const char *source, const char *id)
{
	unsigned long long device, inode;
	struct stat st;

	if (sscanf(id, "%llu:%llu", &device, &inode) == 2 &&
	    (fstat(fd, &st) < 0 || (unsigned long long)st.st_dev != device ||
	     (unsigned long long)st.st_ino != inode))
		die(ANOTHER, source);
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
static int open_as(const char *source, const char *id, const struct creator *as)
{
	struct open_how how = {.flags = O_PATH | O_CLOEXEC, .resolve = RESOLVE_NO_MAGICLINKS};
	int fd, error;

	if (*id != '-')
		how.resolve |= RESOLVE_NO_SYMLINKS;

	if (rootless)
		return (int)syscall(SYS_openat2, AT_FDCWD, source, &how, sizeof how);
	if (setgroups(as->group_count, as->groups) < 0 || setresgid(-1, as->gid, -1) < 0 ||
	    setresuid(-1, as->uid, -1) < 0)
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

/* From the view of a cell if there is one; root goes in and comes back. */
static struct opened open_source(const char *source, const char *id, const struct creator *as,
				 int cell, int own)
{
	struct opened found = {.tree = -1};

	if (cell >= 0)
		join(cell, "the parent's cell");
	found.fd = open_as(source, id, as);
	found.error = found.fd < 0 ? errno : 0;
	if (found.fd >= 0 && cell >= 0)
		found.tree = clone_mount(found.fd, source);
	if (cell >= 0)
		join(own, "the way back");
	return found;
}

static void send_opened(int channel, const struct opened *found)
{
	union {
		char space[CMSG_SPACE(2 * sizeof(int))];
		struct cmsghdr align;
	} control = {0};
	struct iovec data = {(void *)&found->error, sizeof found->error};
	struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};

	if (found->fd >= 0) {
		struct cmsghdr *header;
		int fds[2] = {found->fd, found->tree};

		message.msg_control = &control;
		message.msg_controllen = sizeof control;
		header = CMSG_FIRSTHDR(&message);
		header->cmsg_level = SOL_SOCKET;
		header->cmsg_type = SCM_RIGHTS;
		header->cmsg_len = CMSG_LEN(sizeof fds);
		memcpy(CMSG_DATA(header), fds, sizeof fds);
	}
	if (sendmsg(channel, &message, MSG_NOSIGNAL) < 0)
		die("the parent's cell: sendmsg: %s", strerror(errno));
}

static struct opened receive_opened(int channel)
{
	struct opened found = {-1, -1, 0};
	union {
		char space[CMSG_SPACE(2 * sizeof(int))];
		struct cmsghdr align;
	} control = {0};
	struct iovec data = {&found.error, sizeof found.error};
	struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &control,
				 .msg_controllen = sizeof control};
	struct cmsghdr *header;

	/* it has said why */
	if (recvmsg(channel, &message, MSG_CMSG_CLOEXEC) != sizeof found.error)
		exit(125);
	header = CMSG_FIRSTHDR(&message);
	if (header && header->cmsg_type == SCM_RIGHTS) {
		int fds[2];

		memcpy(fds, CMSG_DATA(header), sizeof fds);
		found.fd = fds[0];
		found.tree = fds[1];
	}
	return found;
}

/*
 * Joins the mount namespace of the process that a pidfd refers to, as one who may
 * mount there: in the user namespace that owns it, which is not the process's own
 * but the one around it, where bubblewrap made the view.
 */
static void enter_view(int pidfd)
{
	char path[64], line[256];
	int namespace, owner;
	long pid = 0;
	FILE *info;

	snprintf(path, sizeof path, "/proc/self/fdinfo/%d", pidfd);
	info = fopen(path, "re");
	while (info && fgets(line, sizeof line, info))
		(void)!sscanf(line, "Pid: %ld", &pid);
	if (info)
		fclose(info);
	snprintf(path, sizeof path, "/proc/%ld/ns/mnt", pid);
	namespace = open(path, O_RDONLY | O_CLOEXEC);
	/* if it lives, its pid was nobody else's */
	if (namespace < 0 || syscall(SYS_pidfd_send_signal, pidfd, 0, NULL, 0) < 0)
		die("the parent's cell: %s", strerror(errno));
	owner = ioctl(namespace, NS_GET_USERNS);
	if (owner < 0 || setns(owner, CLONE_NEWUSER) < 0 || setns(namespace, CLONE_NEWNS) < 0)
		die("the parent's cell: %s", strerror(errno));
}

/* Starts what sends the sources, as they are in a cell, one after the other. */
static int start_fetcher(int cell, char **items, size_t count, pid_t *fetcher)
{
	int ends[2];

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
		die("socketpair: %s", strerror(errno));
	*fetcher = fork();
	if (*fetcher < 0)
		die("fork: %s", strerror(errno));
	if (*fetcher > 0) {
		close(ends[1]);
		return ends[0];
	}
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	enter_view(cell);
	for (size_t i = 5; i + 2 < count; i += 3) {
		struct opened found = {.tree = -1};

		found.fd = open_as(items[i + 2], items[i + 1], NULL);
		found.error = found.fd < 0 ? errno : 0;
		if (found.fd >= 0)
			found.tree = clone_mount(found.fd, items[i + 2]);
		send_opened(ends[1], &found);
		if (found.fd >= 0) {
			close(found.fd);
			close(found.tree);
		}
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
		      : mount(link, point, NULL, MS_BIND | recursive, NULL) < 0) {
		/* what a mount lies upon is not shown to whoever could not unmount it */
		if (rootless && errno == EINVAL && !recursive)
			die("mount source %s: without root, what is mounted below it comes along: "
			    "rbind", source);
		die("mount source %s: %s", source, strerror(errno));
	}
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

/* What a cell's mounts show of its processes is not for others. */
static bool is_procfs(const char *type)
{
	return !strcmp(type, "proc");
}

/* Where filesystems of some type are mounted below a directory, in order. */
static char **find_mounts(const char *directory, bool (*wanted)(const char *), size_t *count)
{
	FILE *mounts = setmntent("/proc/self/mounts", "r");
	char **found = NULL;
	struct mntent *entry;

	if (!mounts)
		die("/proc/self/mounts: %s", strerror(errno));
	*count = 0;
	while ((entry = getmntent(mounts))) {
		if (!inside(entry->mnt_dir, directory) || !wanted(entry->mnt_type))
			continue;
		found = realloc(found, (*count + 1) * sizeof *found);
		if (!found || !(found[(*count)++] = strdup(entry->mnt_dir)))
			die("mount sources: %s", strerror(ENOMEM));
	}
	endmntent(mounts);
	return found;
}

/* Hides every filesystem of some type below a directory, where mounts are locked
 * and cannot be taken out. */
static void cover_mounts(const char *directory, bool (*hidden)(const char *))
{
	size_t count;
	char **covered = find_mounts(directory, hidden, &count);

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
			die("mount sources: %s: %s", covered[i], strerror(errno));
	}
}

/* Takes procfs and cgroupfs out of all that was bound, wherever they are. What cannot
 * be reached by its name is below something that covers it, and stays there. */
static void remove_mounts(const char *directory)
{
	size_t count, removed;

	do {
		char **found = find_mounts(directory, is_forbidden_type, &count);

		removed = 0;
		for (size_t i = count; i-- > 0;) {	/* what is on top was mounted last */
			if (umount2(found[i], MNT_DETACH) == 0)
				removed++;
			else if (errno != EINVAL && errno != ENOENT)
				die("mount sources: %s: %s", found[i], strerror(errno));
		}
	} while (removed);
}

/* Covers the daemon's own directories in what was bound at a point. */
static void cover_own(const char *point, const char *source, const char *real,
		      const char *forbidden)
{
	char list[8192], *state = NULL;

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

static void write_map(const char *path, const char *format, unsigned id)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);

	if (fd < 0 || dprintf(fd, format, id, id) < 0)
		die("%s: %s", path, strerror(errno));
	close(fd);
}

/* Where an ordinary user may mount, with the ids that it has (user_namespaces(7)). */
static void enter_user_namespace(void)
{
	uid_t uid = geteuid();
	gid_t gid = getegid();

	if (unshare(CLONE_NEWUSER) < 0)
		die("unshare: %s", strerror(errno));
	write_map("/proc/self/setgroups", "deny", 0);
	write_map("/proc/self/uid_map", "%u %u 1", uid);
	write_map("/proc/self/gid_map", "%u %u 1", gid);
}

/* The NUL-ended strings of the specification, all of them. */
static char **read_items(int fd, size_t *count)
{
	size_t capacity = 1 << 16, length = 0, next = 0;
	char *data = malloc(capacity), **items;

	for (;;) {
		ssize_t n = data ? read(fd, data + length, capacity - length) : -1;

		if (n < 0)
			die("the runtime's mount data: %s", strerror(data ? errno : ENOMEM));
		if (n == 0)
			break;
		length += (size_t)n;
		if (length == capacity)
			data = realloc(data, capacity *= 2);
	}
	if (!length || data[length - 1])
		die("the runtime's mount data is damaged");
	for (size_t i = 0; i < length; i++)
		*count += data[i] == 0;
	items = calloc(*count, sizeof *items);
	if (!items || *count < 5)
		die("the runtime's mount data is damaged");
	for (char *p = data; next < *count; p += strlen(p) + 1)
		items[next++] = p;
	return items;
}

int main(int argc, char **argv)
{
	static struct creator as;
	char **items, *directory, *forbidden, *state = NULL;
	size_t count = 0;
	int own = -1, cell = -1, channel = -1;
	pid_t fetcher = 0;

	if (argc < 5 || strcmp(argv[3], "--"))
		die("usage: stage SPEC_FD CELL -- PROGRAM ARGUMENT...");
	if (strcmp(argv[2], "-"))
		cell = atoi(argv[2]);
	items = read_items(atoi(argv[1]), &count);
	close(atoi(argv[1]));
	directory = items[0];
	as.uid = (uid_t)atol(items[1]);
	as.gid = (gid_t)atol(items[2]);
	for (char *word = strtok_r(items[3], ",", &state); word && as.group_count < 1024;
	     word = strtok_r(NULL, ",", &state))
		as.groups[as.group_count++] = (gid_t)atol(word);
	forbidden = items[4];

	rootless = geteuid() != 0;
	if (rootless && cell >= 0)
		channel = start_fetcher(cell, items, count, &fetcher);
	if (rootless)
		enter_user_namespace();
	if (unshare(CLONE_NEWNS) < 0)
		die("unshare: %s", strerror(errno));
	/* Slaves, not private: a filesystem mounted anew after a crash of the
	 * daemon must still arrive in the sandbox. */
	if (mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) < 0 ||
	    mount("tmpfs", directory, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755") < 0)
		die("%s: %s", directory, strerror(errno));
	if (cell >= 0 && (own = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC)) < 0)
		die("/proc/self/ns/mnt: %s", strerror(errno));
	for (size_t i = 5; i + 2 < count; i += 3) {
		const char *options = items[i], *id = items[i + 1], *source = items[i + 2];
		char point[4096], real[4096];
		struct opened found;

		snprintf(point, sizeof point, "%s/%zu", directory, (i - 5) / 3);
		found = channel >= 0 ? receive_opened(channel)
				     : open_source(source, id, &as, cell, own);
		if (found.fd < 0 && found.error == ENOENT && strchr(options, 't'))
			continue;
		if (found.fd < 0 && *id != '-' &&
		    (found.error == ELOOP || found.error == ENOENT || found.error == ENOTDIR))
			die(ANOTHER, source);
		if (found.fd < 0 && found.error == ELOOP)
			die("mount source %s: links of procfs, and loops of links, cannot be "
			    "given to an agent", source);
		if (found.fd < 0)
			die("mount source %s: %s", source, strerror(found.error));
		check_object(found.fd, source, id);
		check_source(found.fd, source, forbidden, real, sizeof real);
		bind_source(found.fd, found.tree, source, point, options);
		if (cell < 0)
			cover_own(point, source, real, forbidden);
		close(found.fd);
		if (found.tree >= 0)
			close(found.tree);
	}
	/* once for all, since every look at them is at all mounts of the host */
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
	execvp(argv[4], argv + 4);
	die("%s: %s", argv[4], strerror(errno));
}
