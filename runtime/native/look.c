/*
 * look: finds out what paths lead to, for whoever wrote them.
 *
 *     look SPEC_FD ANSWER_FD VIEW
 *
 * A path that an agent or an operator wrote is looked up once, here, with the
 * rights of whoever wrote it and in the view where it means something. VIEW is
 * "-" for the host's, or a pidfd of a cell's keeper: nothing of that cell is
 * entered, run or loaded, its tree is walked from its root.
 *
 * Agents share their owner's uid and may have put a link anywhere that this uid
 * may write. So each component is opened for itself, and a link is followed if
 * it is uid 0's, its text by the same rules. Nobody but the host's root can make
 * one: this program is in the user namespace of the host whichever view it looks
 * at, and sees owners as they are there. Links of procfs lead to where some
 * process is, and are followed for nobody.
 *
 * SPEC_FD holds strings, each ended by a NUL: uid, gid, groups (separated by
 * commas, "-" for none, "=" for all three to stay as they are), the daemon's own
 * directories (separated by colons), and the paths, absolute and plain. ANSWER_FD
 * gets five strings for each of them:
 *
 *     ERROR   an errno, 0 if it was found
 *     WHY     link: PATH is a link of somebody's, and TEXT where it leads;
 *             kernel: PATH is in procfs or cgroupfs; daemon: in one of the
 *             daemon's own directories; else "-"
 *     ID      DEVICE:INODE of what was found, else "-"
 *     PATH    without links; of what is refused, how far it went
 *     TEXT    of a link, else empty
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "die.h"

#define LINKS_MAX 40	/* as the kernel's own (path_resolution(7)) */
#define ANSWER_MAX (8 << 20)

struct object {
	dev_t device;
	ino_t inode;
};

struct answer {
	int error;
	const char *why;
	struct stat st;
	char path[2 * PATH_MAX];
	char text[PATH_MAX];
};

static int root = -1;
static char *forbidden[16];
static struct object forbidden_objects[16];
static size_t forbidden_count;

static char *read_all(int fd, size_t *length)
{
	size_t capacity = 65536, used = 0;
	char *data = malloc(capacity);

	for (;;) {
		ssize_t n;

		if (!data)
			die("%s", strerror(ENOMEM));
		n = read(fd, data + used, capacity - used);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			die("the paths: %s", strerror(errno));
		if (n == 0)
			break;
		used += (size_t)n;
		if (used == capacity)
			data = realloc(data, capacity *= 2);
	}
	*length = used;
	return data;
}

/* The root of a cell, by the pidfd of its keeper. */
static int open_root(int pidfd)
{
	char path[64], line[256];
	long pid = 0;
	FILE *info;
	int fd;

	snprintf(path, sizeof path, "/proc/self/fdinfo/%d", pidfd);
	info = fopen(path, "re");
	while (info && fgets(line, sizeof line, info))
		(void)!sscanf(line, "Pid: %ld", &pid);
	if (info)
		fclose(info);
	snprintf(path, sizeof path, "/proc/%ld/root", pid);
	fd = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
	/* if it lives, its pid was nobody else's */
	if (fd < 0 || syscall(SYS_pidfd_send_signal, pidfd, 0, NULL, 0) < 0)
		die("the parent's cell: %s", strerror(errno));
	return fd;
}

static void take_ids(const char *uid, const char *gid, char *groups)
{
	gid_t list[1024], group = (gid_t)strtoul(gid, NULL, 10);
	uid_t user = (uid_t)strtoul(uid, NULL, 10);
	char *state = NULL;
	size_t count = 0;

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		die("no_new_privs: %s", strerror(errno));
	if (!strcmp(groups, "="))
		return;
	for (char *word = strtok_r(groups, ",", &state); word && *word != '-' && count < 1024;
	     word = strtok_r(NULL, ",", &state))
		list[count++] = (gid_t)strtoul(word, NULL, 10);
	if (setgroups(count, list) < 0 || setresgid(group, group, group) < 0 ||
	    setresuid(user, user, user) < 0)
		die("the creator's identity: %s", strerror(errno));
}

/* As seen from here, so that another name in another view is the same. */
static void note_forbidden(char *list)
{
	char *state = NULL;

	for (char *word = strtok_r(list, ":", &state); word && forbidden_count < 16;
	     word = strtok_r(NULL, ":", &state)) {
		struct stat st;

		if (stat(word, &st) == 0) {
			forbidden_objects[forbidden_count].device = st.st_dev;
			forbidden_objects[forbidden_count].inode = st.st_ino;
		}
		forbidden[forbidden_count++] = word;
	}
}

static bool is_daemons(const char *path, const struct stat *st)
{
	for (size_t i = 0; i < forbidden_count; i++) {
		size_t n = strlen(forbidden[i]);

		if (!strncmp(path, forbidden[i], n) && (path[n] == 0 || path[n] == '/'))
			return true;
		if (forbidden_objects[i].inode && st->st_dev == forbidden_objects[i].device &&
		    st->st_ino == forbidden_objects[i].inode)
			return true;
	}
	return false;
}

/* A path below the root that has no links in it, or not any more. */
static int open_plain(const char *path)
{
	struct open_how how = {.flags = O_PATH | O_CLOEXEC | O_NOFOLLOW,
			       .resolve = RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS |
					  RESOLVE_BENEATH};

	return (int)syscall(SYS_openat2, root, *path ? path + 1 : ".", &how, sizeof how);
}

static int refuse(struct answer *answer, int error, const char *why)
{
	answer->error = error;
	answer->why = why;
	return -1;
}

/* One component of what is left; false at the end. */
static bool take_component(char *left, char *name)
{
	size_t skipped = strspn(left, "/"), n = strcspn(left + skipped, "/");

	memcpy(name, left + skipped, n);
	name[n] = 0;
	memmove(left, left + skipped + n, strlen(left + skipped + n) + 1);
	return n > 0;
}

/* Puts the text of a link before what is left; false if that gets too long. */
static bool follow(char *left, size_t size, const char *text)
{
	size_t n = strlen(text), rest = strlen(left);

	if (n + 1 + rest + 1 > size)
		return false;
	memmove(left + n + 1, left, rest + 1);
	memcpy(left, text, n);
	left[n] = '/';
	return true;
}

static bool is_kernels(int fd)
{
	struct statfs fs;

	return fstatfs(fd, &fs) == 0 &&
	       (fs.f_type == PROC_SUPER_MAGIC || fs.f_type == CGROUP_SUPER_MAGIC ||
		fs.f_type == CGROUP2_SUPER_MAGIC);
}

/* Where a walk is, and what it looks at. */
struct place {
	int here, next;
};

static void leave(struct place *place)
{
	if (place->here >= 0)
		close(place->here);
	if (place->next >= 0)
		close(place->next);
	place->here = place->next = -1;
}

/* Somewhere else, which has been opened; false with errno if that failed. */
static bool go(struct place *place, int fd, struct stat *st)
{
	int error = errno;

	leave(place);
	place->here = fd;
	errno = error;
	return fd >= 0 && fstat(fd, st) == 0;
}

/* Walks to the end of a path: 0, and -1 with the reason in the answer. */
static int walk(const char *source, struct answer *answer, struct place *place)
{
	char left[2 * PATH_MAX], name[2 * PATH_MAX];
	char *path = answer->path;
	dev_t device = 0;
	int links = 0;

	if (strlen(source) >= PATH_MAX)
		return refuse(answer, ENAMETOOLONG, "-");
	strcpy(left, source);
	if (!go(place, dup(root), &answer->st))
		return refuse(answer, errno, "-");
	while (take_component(left, name)) {
		size_t length = strlen(path);
		struct stat st;
		ssize_t n;

		if (!strcmp(name, "."))
			continue;
		if (!strcmp(name, "..")) {
			/* never by the kernel: the root of a cell is no bound to it here */
			char *slash = strrchr(path, '/');

			if (slash)
				*slash = 0;
			if (!go(place, open_plain(path), &answer->st))
				return refuse(answer, errno, "-");
			device = 0;
			continue;
		}
		if (length + 1 + strlen(name) >= PATH_MAX)
			return refuse(answer, ENAMETOOLONG, "-");
		sprintf(path + length, "/%s", name);
		if (!S_ISDIR(answer->st.st_mode))
			return refuse(answer, ENOTDIR, "-");
		place->next = openat(place->here, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
		if (place->next < 0 || fstat(place->next, &st) < 0)
			return refuse(answer, errno, "-");
		/* another filesystem begins at another device, but for binds of the same */
		if ((st.st_dev != device || S_ISLNK(st.st_mode)) && is_kernels(place->next))
			return refuse(answer, EACCES, "kernel");
		device = st.st_dev;
		if (S_ISLNK(st.st_mode)) {
			n = readlinkat(place->next, "", answer->text, sizeof answer->text - 1);
			if (n < 0)
				return refuse(answer, errno, "-");
			answer->text[n] = 0;
			if (st.st_uid != 0)
				return refuse(answer, EACCES, "link");
			if (++links > LINKS_MAX)
				return refuse(answer, ELOOP, "-");
			if (!follow(left, sizeof left, answer->text))
				return refuse(answer, ENAMETOOLONG, "-");
			if (answer->text[0] == '/') {
				path[0] = 0;
				if (!go(place, dup(root), &answer->st))
					return refuse(answer, errno, "-");
			} else {
				path[length] = 0;
				close(place->next);
				place->next = -1;
			}
			answer->text[0] = 0;
			continue;
		}
		if (is_daemons(path, &st))
			return refuse(answer, EACCES, "daemon");
		close(place->here);
		place->here = place->next;
		place->next = -1;
		answer->st = st;
	}
	return 0;
}

static void look(const char *source, struct answer *answer)
{
	struct place place = {-1, -1};
	struct stat st;
	int fd, walked;

	answer->error = 0;
	answer->why = "-";
	answer->path[0] = answer->text[0] = 0;
	walked = walk(source, answer, &place);
	leave(&place);
	if (walked < 0)
		return;
	/* A directory that was moved meanwhile is not where its name says. */
	fd = open_plain(answer->path);
	if (fd < 0 || fstat(fd, &st) < 0 || st.st_dev != answer->st.st_dev ||
	    st.st_ino != answer->st.st_ino)
		refuse(answer, EAGAIN, "-");
	if (fd >= 0)
		close(fd);
}

int main(int argc, char **argv)
{
	static struct answer answer;
	char *items[4], *data, *at, *end;
	size_t length;
	FILE *out;

	if (argc != 4)
		die("usage: look SPEC_FD ANSWER_FD VIEW");
	data = read_all(atoi(argv[1]), &length);
	at = data;
	end = data + length;
	for (size_t i = 0; i < 4; i++) {
		if (at == end || end[-1])
			die("the runtime's paths are damaged");
		items[i] = at;
		at += strlen(at) + 1;
	}
	out = fdopen(atoi(argv[2]), "w");
	root = strcmp(argv[3], "-") ? open_root(atoi(argv[3]))
				    : open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (!out || root < 0)
		die("%s", strerror(errno));
	note_forbidden(items[3]);
	take_ids(items[0], items[1], items[2]);
	for (; at < end; at += strlen(at) + 1) {
		look(at, &answer);
		fprintf(out, "%d%c%s%c", answer.error, 0, answer.why, 0);
		if (answer.error)
			fprintf(out, "-%c", 0);
		else
			fprintf(out, "%llu:%llu%c", (unsigned long long)answer.st.st_dev,
				(unsigned long long)answer.st.st_ino, 0);
		fprintf(out, "%s%c%s%c", *answer.path ? answer.path : "/", 0, answer.text, 0);
		if (ftell(out) > ANSWER_MAX)
			die("the paths are too long together");
	}
	return fclose(out) == 0 ? 0 : 125;
}
