/*
 * walk: measures, bounds and removes trees that agents may hold, lock and change meanwhile.
 *
 *     walk measure UID SECONDS TOP NAMES_FD ANSWER_FD
 *     walk bound UID SECONDS TOP NAMES_FD ANSWER_FD PROJECT
 *     walk remove UID SECONDS TOP NAMES_FD ANSWER_FD
 *
 * NAMES_FD has a list (orders.h) of the paths of trees below the directory TOP, and what is above
 * a tree is the daemon's alone. Nothing outside of a tree is ever reached: each directory is
 * opened from the one above it, no link is followed and no mount entered.
 *
 * All write a line for each tree to ANSWER_FD as soon as they are done with it, so that who kills
 * this program has the lines before. Trees that were not reached in SECONDS have no line.
 *
 * measure writes the bytes that a tree takes, its entries, and "+" if there may be more: SECONDS
 * are over, a directory was moved while it was looked at, or it could not be read. Each entry
 * counts ENTRY_SIZE, and a file of several names its part for each.
 *
 * bound does the same, and gives all that it finds to a project of the filesystem's quotas, each
 * directory before what is in it: what is made there from then on inherits it.
 *
 * remove removes it, a file, too, and writes "done", or "more" if SECONDS are over; "stuck" if
 * something cannot be removed.
 *
 * All run as UID. Where the daemon is root they may read all, and bound or remove all; elsewhere a
 * directory that is closed to its owner is opened up, by measure for a moment.
 *
 * An agent chooses depth, size and names, and changes them meanwhile. So the memory for a level
 * is small and fixed: where the list of its entries goes on, and which directory it is. Only the
 * first and the last levels are open; the way back to another one is "..", which must lead to
 * where it came from.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <linux/fs.h>
#include <stddef.h>
#include <sys/ioctl.h>

#include "common.h"
#include "filter.h"
#include "orders.h"

#define ENTRY_SIZE 512		/* runtime/authority/disk.py */
#define LEVELS_MAX (1 << 20)
#define OPEN_FIRST 16		/* levels that stay open, from the top */
#define OPEN_LAST 32		/* and from where the walk is */
#define LOOK_AT_CLOCK 64	/* entries */

#define BENEATH (RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS)

/* linux/dirent.h of getdents64(2), which no header has */
struct entry {
	uint64_t inode, next;
	uint16_t length;
	uint8_t type;
	char name[];
};

struct level {
	int fd;			/* -1 while it is closed */
	bool removed;		/* something, since the list was begun */
	dev_t device;
	ino_t inode, tried;	/* TRIED: the directory below that was entered last */
	uint64_t next;		/* where the list goes on */
};

static struct level *levels;
static size_t depth, room;	/* DEPTH levels; the walk is in the last */
_Alignas(8) static char list[1024];
static size_t listed, at;	/* bytes of the list, and how many are done */

static bool removing, partial;
static uint32_t project;	/* 0 for none */
static unsigned long long size, entries;
static long long deadline;
static unsigned steps;

static bool is_late(void)
{
	return ++steps % LOOK_AT_CLOCK == 0 && now_ms() >= deadline;
}

static void close_level(struct level *level)
{
	close_quietly(level->fd);
	level->fd = -1;
}

static void give_to_project(int fd, bool directory)
{
	struct fsxattr now;

	if (ioctl(fd, FS_IOC_FSGETXATTR, &now) < 0) {
		partial = true;
		return;
	}
	if (now.fsx_projid == project && (!directory || now.fsx_xflags & FS_XFLAG_PROJINHERIT))
		return;
	now.fsx_projid = project;
	if (directory)
		now.fsx_xflags |= FS_XFLAG_PROJINHERIT;
	if (ioctl(fd, FS_IOC_FSSETXATTR, &now) < 0)
		partial = true;
}

static bool add_level(int fd)
{
	struct stat st;

	if (depth == room) {
		size_t more = room ? 2 * room : 1024;
		struct level *grown = more > LEVELS_MAX ? NULL
							: reallocarray(levels, more, sizeof *levels);

		if (!grown)
			return false;
		levels = grown;
		room = more;
	}
	if (fstat(fd, &st) < 0)
		return false;
	if (project)
		give_to_project(fd, true);
	if (!removing)
		size += (unsigned long long)st.st_blocks * 512 + ENTRY_SIZE;
	levels[depth++] = (struct level){.fd = fd, .device = st.st_dev, .inode = st.st_ino};
	if (depth > OPEN_FIRST + OPEN_LAST)
		close_level(&levels[depth - OPEN_LAST - 1]);
	listed = at = 0;
	return true;
}

/* Goes to the directory above; to the next one that is open if it is no longer there. */
static void leave_level(void)
{
	struct level *below = &levels[--depth], *here;
	struct stat st;

	if (!depth) {
		close_level(below);
		return;
	}
	here = below - 1;
	if (here->fd < 0) {
		here->fd = openat(below->fd, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		if (here->fd >= 0 && (fstat(here->fd, &st) < 0 || st.st_dev != here->device ||
				      st.st_ino != here->inode))
			close_level(here);
		while (here->fd < 0) {
			partial = true;
			here = &levels[--depth - 1];
		}
	}
	close_level(below);
	lseek(here->fd, (off_t)here->next, SEEK_SET);
	listed = at = 0;
}

/* The next entry of the directory in which the walk is; NULL at the end. */
static struct entry *next_entry(void)
{
	struct level *here = &levels[depth - 1];
	struct entry *entry;
	long n;

	if (at == listed) {
		n = syscall(SYS_getdents64, here->fd, list, sizeof list);
		if (n < 0 && errno != ENOENT)
			partial = true;
		if (n <= 0)
			return NULL;
		listed = (size_t)n;
		at = 0;
	}
	entry = (struct entry *)(list + at);
	at += entry->length;
	return entry;
}

/* Opens a directory that its owner closed to itself: chmod(2) follows links, a descriptor not. */
static int open_up(int fd, const char *name, uint64_t resolve)
{
	int path = open_path(fd, name, O_PATH | O_DIRECTORY | O_NOFOLLOW, resolve), opened;
	char way[64];
	struct stat st;

	if (path < 0 || fstat(path, &st) < 0) {
		close_quietly(path);
		return -1;
	}
	snprintf(way, sizeof way, "/proc/self/fd/%d", path);
	(void)!chmod(way, 0700);
	opened = open_path(fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, resolve);
	if (!removing)
		(void)!chmod(way, st.st_mode & 07777);
	close_quietly(path);
	return opened;
}

static int open_directory(int fd, const char *name, uint64_t resolve)
{
	int opened = open_path(fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, resolve);
	struct stat st;

	if (opened < 0 && errno == EACCES)
		return open_up(fd, name, resolve);
	if (opened >= 0 && removing && geteuid() && fstat(opened, &st) == 0 &&
	    (st.st_mode & 0300) != 0300)
		(void)!fchmod(opened, 0700);
	return opened;
}

static bool is_directory(int fd, const struct entry *entry)
{
	struct stat st;

	if (entry->type != DT_UNKNOWN)
		return entry->type == DT_DIR;
	return fstatat(fd, entry->name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(st.st_mode);
}

static void take_file(struct level *here, const char *name)
{
	struct stat st;

	if (removing) {
		if (unlinkat(here->fd, name, 0) == 0)
			here->removed = true;
		else if (errno != ENOENT)
			partial = true;
	} else if (fstatat(here->fd, name, &st, AT_SYMLINK_NOFOLLOW) == 0) {
		size += ((unsigned long long)st.st_blocks * 512 + ENTRY_SIZE) /
			(st.st_nlink ? st.st_nlink : 1);
		if (project && S_ISREG(st.st_mode)) {
			/* what took its place may be a FIFO, or a device */
			int fd = open_path(here->fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK,
					   BENEATH | RESOLVE_NO_XDEV);

			if (fd >= 0)
				give_to_project(fd, false);
			else
				partial |= errno != ENOENT;
			close_quietly(fd);
		}
	}
}

/* BEFORE is where the list must go on to have this entry again. */
static void take_directory(struct level *here, const struct entry *entry, uint64_t before)
{
	int fd;

	if (removing) {
		if (unlinkat(here->fd, entry->name, AT_REMOVEDIR) == 0) {
			here->removed = true;
			return;
		}
		if (errno == ENOENT)
			return;
		if (here->tried == entry->inode) {	/* it was emptied as far as possible */
			partial = true;
			return;
		}
		here->tried = entry->inode;
	}
	fd = open_directory(here->fd, entry->name, BENEATH | RESOLVE_NO_XDEV);
	if (fd < 0) {
		partial |= errno != ENOENT && errno != ENOTDIR && errno != ELOOP;
		return;
	}
	/* when it is empty, it is removed by its name: so it has to be listed again */
	here->next = removing ? before : entry->next;
	if (!add_level(fd)) {
		partial = true;
		close(fd);
		lseek(here->fd, (off_t)entry->next, SEEK_SET);
		listed = at = 0;
	}
}

/* Walks through a tree, and closes it; returns false if the time is over before the end. */
static bool walk(int fd)
{
	uint64_t before = 0;

	partial = false;
	depth = 0;
	size = entries = 0;
	if (!add_level(fd)) {
		partial = true;
		close(fd);
		return true;
	}
	while (depth) {
		struct level *here = &levels[depth - 1];
		struct entry *entry;

		if (is_late()) {
			while (depth)
				close_level(&levels[--depth]);
			return false;
		}
		if (at == listed)
			before = (uint64_t)lseek(here->fd, 0, SEEK_CUR);
		entry = next_entry();
		if (!entry && here->removed) {
			/* some filesystems count entries, and so skip some when others go */
			here->removed = false;
			here->tried = 0;
			lseek(here->fd, 0, SEEK_SET);
		} else if (!entry) {
			leave_level();
		} else if (!strcmp(entry->name, ".") || !strcmp(entry->name, "..")) {
			before = entry->next;
		} else {
			uint64_t next = entry->next;

			entries++;
			if (is_directory(here->fd, entry))
				take_directory(here, entry, before);
			else
				take_file(here, entry->name);
			before = next;
		}
	}
	return true;
}

/* The user that walks, and what that may beyond. */
static void take_rights(uid_t uid)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct sets[_LINUX_CAPABILITY_U32S_3] = {{0}};
	struct ids ids = {.uid = uid, .gid = (gid_t)uid};

	if (forbid_new_privileges() < 0)
		die("no_new_privs: %m");
	if (geteuid())
		return;
	sets[0].permitted = sets[0].effective = 1U << CAP_DAC_READ_SEARCH;
	if (removing)
		sets[0].permitted |= 1U << CAP_DAC_OVERRIDE;
	if (removing || project)
		sets[0].permitted |= 1U << CAP_FOWNER;
	sets[0].effective = sets[0].permitted;
	if (prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) < 0 || empty_bounding_set() < 0 ||
	    become_groups(&ids) < 0 || become_user(&ids) < 0 ||
	    syscall(SYS_capset, &header, sets) < 0)
		die("the rights of uid %u: %m", uid);
}

#define MAY(call) FILTER_UNLESS(SYS_##call, 1), FILTER_ALLOW

/* From here on there are no calls but those of a walk: none reaches a network or a process. */
static void take_calls(void)
{
	static struct sock_filter filter[] = {
		FILTER_LOAD(arch),
		FILTER_UNLESS(FILTER_ARCHITECTURE, 1),
		BPF_STMT(BPF_JMP | BPF_JA, 1),
		FILTER_REFUSE(EPERM),
		FILTER_LOAD(nr),
		MAY(getdents64), MAY(newfstatat), MAY(fstat), MAY(lseek), MAY(openat2), MAY(openat),
		MAY(close), MAY(unlinkat), MAY(fchmod), MAY(fchmodat),
#ifdef SYS_chmod
		MAY(chmod),
#endif
		MAY(write), MAY(writev), MAY(geteuid), MAY(clock_gettime), MAY(brk), MAY(mmap),
		MAY(munmap), MAY(mremap), MAY(exit_group), MAY(ioctl), MAY(rt_sigreturn),
		FILTER_REFUSE(EPERM),
	};
	struct sock_fprog program = {sizeof filter / sizeof *filter, filter};

	if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0)
		die("the filter of system calls: %m");
}

/* Returns false if the time is over before the end. */
static bool measure(int top, const char *name, int answer)
{
	int fd = open_directory(top, name, BENEATH);
	bool whole = true;

	if (fd >= 0)
		whole = walk(fd);
	else
		size = entries = 0, partial = errno != ENOENT && errno != ENOTDIR;
	if (dprintf(answer, "%llu %llu%s\n", size, entries, partial || !whole ? "+" : "") < 0)
		die("the answer: %m");
	return whole;
}

/* The same. What is emptied nobody has, so its own removal waits for nobody. */
static bool take_away(int top, const char *name, int answer)
{
	int fd = open_directory(top, name, BENEATH), flags = fd < 0 ? 0 : AT_REMOVEDIR;
	bool whole = fd < 0 || walk(fd);
	const char *how = "more";

	if (whole)
		how = unlinkat(top, name, flags) == 0 || errno == ENOENT ? "done" : "stuck";
	if (dprintf(answer, "%s\n", how) < 0)
		die("the answer: %m");
	return whole;
}

static void walk_all(uid_t uid, const char *path, int names, int answer)
{
	int top = open(path, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	struct orders orders = read_orders(names);
	struct list trees = take_list(&orders);
	bool whole = true;

	if (top < 0)
		die("%s: %m", path);
	if (!all_taken(&orders))
		die("the names of the trees are damaged");
	take_rights(uid);
	take_calls();
	for (size_t i = 0; whole && i < trees.count; i++)
		whole = (removing ? take_away : measure)(top, trees.items[i], answer);
}

int main(int argc, char **argv)
{
	struct orders orders = orders_of_arguments(argc, argv);
	int names, answer;
	bool bounding;
	const char *top;
	uid_t uid;

	removing = take_if(&orders, "remove");
	bounding = !removing && take_if(&orders, "bound");
	if (!removing && !bounding && !take_if(&orders, "measure"))
		orders.damaged = true;
	uid = take_id(&orders);
	deadline = now_ms() + 1000 * (long long)take_number(&orders, INT_MAX);
	top = take_word(&orders);
	names = take_descriptor(&orders);
	answer = take_descriptor(&orders);
	if (bounding)
		project = take_id(&orders);
	if (!all_taken(&orders)) {
		fputs("usage: walk measure UID SECONDS TOP NAMES_FD ANSWER_FD\n"
		      "       walk bound UID SECONDS TOP NAMES_FD ANSWER_FD PROJECT\n"
		      "       walk remove UID SECONDS TOP NAMES_FD ANSWER_FD\n", stderr);
		return 2;
	}
	walk_all(uid, top, names, answer);
	return 0;
}
