/*
 * stage: makes an operator's mount sources reachable for an agent's sandbox.
 *
 *     stage SPEC_FD -- PROGRAM ARGUMENT...
 *
 * Runs as root on the host side, before privileges are dropped. In a mount
 * namespace of its own it opens each source with the creator's uid, gid and
 * groups, so that nothing can be named that the creator could not reach, and
 * binds what it opened (never the path a second time) below a private tmpfs,
 * from where the unprivileged sandbox takes it. Nothing shows on the host.
 *
 * SPEC_FD holds strings, each ended by a NUL: the directory for the tmpfs, the
 * creator's uid, gid, and groups (separated by commas), the forbidden paths
 * (separated by colons), then for each mount its options (letters: r bind
 * recursively, s nosuid, d nodev, x noexec) and its source.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
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

static void check_source(int fd, const char *source, const char *forbidden)
{
	char link[64], path[4096], list[8192], *state = NULL;
	struct statfs fs;
	ssize_t n;

	if (fstatfs(fd, &fs) < 0)
		die("mount source %s: %s", source, strerror(errno));
	if (fs.f_type == PROC_SUPER_MAGIC || fs.f_type == CGROUP_SUPER_MAGIC ||
	    fs.f_type == CGROUP2_SUPER_MAGIC)
		die("mount source %s: procfs and cgroupfs cannot be given to an agent", source);
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	n = readlink(link, path, sizeof path - 1);
	if (n < 0)
		die("mount source %s: %s", source, strerror(errno));
	path[n] = 0;
	snprintf(list, sizeof list, "%s", forbidden);
	for (char *word = strtok_r(list, ":", &state); word; word = strtok_r(NULL, ":", &state))
		if (inside(path, word))
			die("mount source %s: the daemon's own directories cannot be given to an agent",
			    source);
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

static void bind_source(int fd, const char *source, const char *point, const char *options)
{
	/* remounting clears what it does not name: start from what is there */
	static const struct { unsigned long have, flag; } kept[] = {
		{ST_RDONLY, MS_RDONLY}, {ST_NOSUID, MS_NOSUID}, {ST_NODEV, MS_NODEV},
		{ST_NOEXEC, MS_NOEXEC}, {ST_NOATIME, MS_NOATIME}, {ST_RELATIME, MS_RELATIME},
	};
	unsigned long flags = MS_BIND | MS_REMOUNT, recursive = strchr(options, 'r') ? MS_REC : 0;
	struct statvfs fs;
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
	if (mount(link, point, NULL, MS_BIND | recursive, NULL) < 0)
		die("mount source %s: %s", source, strerror(errno));
	if (statvfs(point, &fs) < 0)
		die("mount source %s: %s", source, strerror(errno));
	for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
		if (fs.f_flag & kept[i].have)
			flags |= kept[i].flag;
	flags |= (strchr(options, 's') ? MS_NOSUID : 0) | (strchr(options, 'd') ? MS_NODEV : 0) |
		 (strchr(options, 'x') ? MS_NOEXEC : 0);
	if (mount(NULL, point, NULL, flags, NULL) < 0)
		die("mount source %s: %s", source, strerror(errno));
}

int main(int argc, char **argv)
{
	static char data[1 << 20];
	char *items[2048], *directory, *forbidden, *state = NULL;
	size_t length = 0, count = 0;
	gid_t groups[1024], gid;
	uid_t uid;
	int group_count = 0, fd;
	ssize_t n;

	if (argc < 4 || strcmp(argv[2], "--"))
		die("usage: stage SPEC_FD -- PROGRAM ARGUMENT...");
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
	for (size_t i = 5; i + 1 < count; i += 2) {
		char point[4096];

		snprintf(point, sizeof point, "%s/%zu", directory, (i - 5) / 2);
		fd = open_as(items[i + 1], uid, gid, groups, group_count);
		if (fd < 0 && errno == ELOOP)
			die("mount source %s: links of procfs, and loops of links, cannot be "
			    "given to an agent", items[i + 1]);
		if (fd < 0)
			die("mount source %s: %s", items[i + 1], strerror(errno));
		check_source(fd, items[i + 1], forbidden);
		bind_source(fd, items[i + 1], point, items[i]);
		close(fd);
	}
	execvp(argv[3], argv + 3);
	die("%s: %s", argv[3], strerror(errno));
}
