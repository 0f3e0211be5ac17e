/* Names, files and histories. */
#include "hostile.h"

#include <dirent.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <linux/falloc.h>
#include <linux/fs.h>
#include <sys/ioctl.h>

static void do_stat(int argc, char **argv)
{
	struct stat st;

	(void)argc;
	tell_result(stat(argv[0], &st));
}

static void do_lstat(int argc, char **argv)
{
	struct stat st;

	(void)argc;
	tell_result(lstat(argv[0], &st));
}

static void do_chdir(int argc, char **argv)
{
	(void)argc;
	tell_result(chdir(argv[0]));
}

static void do_inotify(int argc, char **argv)
{
	(void)argc;
	tell_result(inotify_add_watch(inotify_init1(IN_CLOEXEC), argv[0], IN_ALL_EVENTS));
}

static void do_readlink(int argc, char **argv)
{
	char target[4096];
	ssize_t n = readlink(argv[0], target, sizeof target - 1);

	(void)argc;
	if (tell_result(n) >= 0)
		tell(":%.*s", (int)n, target);
}

/* "ok:" and the names in order, without those that begin with a dot. */
static int is_shown(const struct dirent *entry)
{
	return entry->d_name[0] != '.';
}

static void do_list(int argc, char **argv)
{
	struct dirent **names;
	int count = scandir(argv[0], &names, is_shown, alphasort);

	(void)argc;
	if (tell_result(count) < 0)
		return;
	tell(":");
	for (int i = 0; i < count; i++)
		tell("%s%s", i ? "," : "", names[i]->d_name);
}

/* PATH NAME: whether a directory lists it */
static void do_names(int argc, char **argv)
{
	DIR *directory = opendir(argv[0]);
	const char *found = "no";
	struct dirent *entry;

	(void)argc;
	if (!directory) {
		tell_result(-1);
		return;
	}
	while ((entry = readdir(directory)))
		if (!strcmp(entry->d_name, argv[1]))
			found = "yes";
	tell("%s", found);
}

/* "ok:" and the first bytes; the errno of open or read. */
static void do_read(int argc, char **argv)
{
	char text[200];
	int fd = open(argv[0], O_RDONLY | O_CLOEXEC);
	ssize_t n;

	(void)argc;
	if (fd < 0) {
		tell_result(-1);
		return;
	}
	n = read(fd, text, sizeof text);
	if (tell_result(n) >= 0)
		tell(":%.*s", (int)n, text);
}

static int flags_of(const char *words)
{
	static const struct { const char *name; int flag; } known[] = {
		{"rdonly", O_RDONLY}, {"wronly", O_WRONLY}, {"rdwr", O_RDWR},
		{"append", O_APPEND}, {"trunc", O_TRUNC}, {"creat", O_CREAT},
		{"excl", O_EXCL}, {"path", O_PATH}, {"nonblock", O_NONBLOCK},
		{"directory", O_DIRECTORY}, {"tmpfile", O_TMPFILE},
	};
	int flags = O_CLOEXEC;

	for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
		const char *found = strstr(words, known[i].name);
		size_t n = strlen(known[i].name);

		if (found && (found == words || found[-1] == ',') && (!found[n] || found[n] == ','))
			flags |= known[i].flag;
	}
	return flags;
}

/* PATH COUNT: how often it can be seen, while others look too */
static void do_hammer(int argc, char **argv)
{
	int seen = 0;
	struct stat st;

	(void)argc;
	for (int i = 0; i < atoi(argv[1]); i++)
		seen += stat(argv[0], &st) == 0;
	tell("seen=%d", seen);
}

/* PATH COUNT TARGET: how often a link leads elsewhere */
static void do_follow(int argc, char **argv)
{
	char target[4096];
	int wrong = 0;

	(void)argc;
	for (int i = 0; i < atoi(argv[1]); i++) {
		ssize_t n = readlink(argv[0], target, sizeof target - 1);

		target[n > 0 ? n : 0] = 0;
		wrong += strcmp(target, argv[2]) != 0;
	}
	tell("wrong=%d", wrong);
}

/* PATH GO: opens it, and reads it before and after there is a file GO */
static void do_hold(int argc, char **argv)
{
	char byte, path[4096];
	int fd = open(argv[0], O_RDONLY | O_CLOEXEC);
	struct stat st;

	(void)argc;
	tell_step("before", fd < 0 ? -1 : pread(fd, &byte, 1, 0));
	snprintf(path, sizeof path, "%s.used", argv[1]);
	put(path, O_CREAT, "used\n");
	while (stat(argv[1], &st) < 0)
		usleep(5000);
	tell_step("after", pread(fd, &byte, 1, 0));
}

/* PATH of a link to a FIFO: as somebody who would let its readers go */
static void do_release(int argc, char **argv)
{
	char target[4096];
	ssize_t n = readlink(argv[0], target, sizeof target - 1);

	(void)argc;
	if (tell_step("readlink", n) < 0)
		return;
	target[n] = 0;
	tell_step("open", open(target, O_WRONLY | O_NONBLOCK | O_CLOEXEC));
	tell_step("chmod", chmod(target, 0666));
	tell_step("unlink", unlink(target));
}

/* FLAGS PATH */
static void do_open(int argc, char **argv)
{
	(void)argc;
	tell_result(open(argv[1], flags_of(argv[0]), 0666));
}

/* PATH TEXT [FLAGS]: as echo does, the errno of whatever fails first */
static void do_write(int argc, char **argv)
{
	char text[4096];

	snprintf(text, sizeof text, "%s\n", argv[1]);
	tell_result(put(argv[0], argc > 2 ? flags_of(argv[2]) & ~O_ACCMODE : O_TRUNC, text));
}

static void do_truncate(int argc, char **argv)
{
	(void)argc;
	tell_result(truncate(argv[0], 0));
}

static void do_unlink(int argc, char **argv)
{
	(void)argc;
	tell_result(unlink(argv[0]));
}

static void do_rmdir(int argc, char **argv)
{
	(void)argc;
	tell_result(rmdir(argv[0]));
}

static void do_mkdir(int argc, char **argv)
{
	(void)argc;
	tell_result(mkdir(argv[0], 0777));
}

static void do_rename(int argc, char **argv)
{
	(void)argc;
	tell_result(rename(argv[0], argv[1]));
}

static void do_exchange(int argc, char **argv)
{
	(void)argc;
	tell_result(renameat2(AT_FDCWD, argv[0], AT_FDCWD, argv[1], RENAME_EXCHANGE));
}

static void do_link(int argc, char **argv)
{
	(void)argc;
	tell_result(link(argv[0], argv[1]));
}

static void do_symlink(int argc, char **argv)
{
	(void)argc;
	tell_result(symlink(argv[0], argv[1]));
}

/* fifo|socket|char|block|file PATH */
static void do_mknod(int argc, char **argv)
{
	mode_t mode = !strcmp(argv[0], "fifo") ? S_IFIFO : !strcmp(argv[0], "socket") ? S_IFSOCK :
		      !strcmp(argv[0], "char") ? S_IFCHR : !strcmp(argv[0], "block") ? S_IFBLK :
		      S_IFREG;

	(void)argc;
	/* 1:3 is /dev/null, wherever it is */
	tell_result(mknod(argv[1], mode | 0666, mode == S_IFREG ? 0 : (1 << 8) | 3));
}

static void do_bind(int argc, char **argv)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);

	(void)argc;
	snprintf(address.sun_path, sizeof address.sun_path, "%s", argv[0]);
	tell_result(bind(fd, (struct sockaddr *)&address, sizeof address));
}

/* MODE PATH: and the mode that is there after */
static void do_chmod(int argc, char **argv)
{
	struct stat st;

	(void)argc;
	if (tell_result(chmod(argv[1], (mode_t)strtol(argv[0], NULL, 8))) >= 0 &&
	    stat(argv[1], &st) == 0)
		tell(":%o", st.st_mode & 07777);
}

/* UID PATH */
static void do_chown(int argc, char **argv)
{
	(void)argc;
	tell_result(lchown(argv[1], (uid_t)atol(argv[0]), (gid_t)-1));
}

/* Everything that changes a byte which is there, on a file that one may append to. */
static void do_history(int argc, char **argv)
{
	static const char line[] = "{\"role\":\"user\",\"content\":\"appended\"}\n";
	const char *how = argv[0], *path = argv[1];
	int fd, other[2];
	off_t at = 0;
	void *map;

	(void)argc;
	if (!strcmp(how, "plain") || !strcmp(how, "copy") || !strcmp(how, "splice")) {
		/* not for appending: over the first bytes */
		if (tell_step("open", fd = open(path, O_WRONLY)) < 0)
			return;
		if (!strcmp(how, "plain")) {
			tell_step(how, pwrite(fd, line, sizeof line - 1, 0));
		} else if (!strcmp(how, "copy")) {
			int source = open("/hostile/hostile", O_RDONLY);

			tell_step(how, copy_file_range(source, NULL, fd, &at, 4096, 0));
		} else {
			if (pipe(other) == 0)
				(void)!write(other[1], line, sizeof line - 1);
			tell_step(how, splice(other[0], NULL, fd, &at, sizeof line - 1, 0));
		}
		return;
	}
	fd = open(path, O_RDWR | O_APPEND);
	if (tell_step("open", fd) < 0)
		return;
	if (!strcmp(how, "pwrite")) {
		tell_step(how, pwrite(fd, line, sizeof line - 1, 0));
	} else if (!strcmp(how, "noappend")) {
		tell_step("fcntl", fcntl(fd, F_SETFL, 0));
		tell_step("pwrite", pwrite(fd, line, sizeof line - 1, 0));
		tell_step("close", close(fd));
	} else if (!strcmp(how, "mmap")) {
		map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		tell_step(how, map == MAP_FAILED ? -1 : 0);
	} else if (!strcmp(how, "ftruncate")) {
		tell_step(how, ftruncate(fd, 0));
	} else if (!strcmp(how, "allocate")) {
		tell_step(how, fallocate(fd, 0, 0, 1 << 20));
	} else if (!strcmp(how, "punch")) {
		tell_step(how, fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 10));
	} else if (!strcmp(how, "zero")) {
		tell_step(how, fallocate(fd, FALLOC_FL_ZERO_RANGE, 0, 10));
	} else if (!strcmp(how, "collapse")) {
		tell_step(how, fallocate(fd, FALLOC_FL_COLLAPSE_RANGE, 0, 4096));
	} else if (!strcmp(how, "clone")) {
		int source = open("/hostile/hostile", O_RDONLY);

		tell_step(how, ioctl(fd, FICLONE, source));
	} else if (!strcmp(how, "flags")) {	/* chattr: as lsattr and chattr do */
		int flags = 0;

		tell_step("get", ioctl(fd, FS_IOC_GETFLAGS, &flags));
		tell_step("set", ioctl(fd, FS_IOC_SETFLAGS, &flags));
	} else if (!strcmp(how, "reopen")) {
		char link[64];

		snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
		tell_step(how, open(link, O_WRONLY | O_TRUNC));
	} else {
		tell(" unknown:%s", how);
	}
}

/* Standard output: the end of it that the runtime keeps. */
static void do_stdout(int argc, char **argv)
{
	int fd;

	(void)argc;
	(void)argv;
	tell_step("ftruncate", ftruncate(1, 0));
	tell_step("lseek", lseek(1, 0, SEEK_SET));
	fd = open("/proc/self/fd/1", O_WRONLY | O_TRUNC | O_CLOEXEC);
	tell_step("reopen", fd);
	tell_step("truncated", fd < 0 ? -1 : ftruncate(fd, 0));
	tell_step("pwrite", pwrite(1, "x", 1, 0));
	fd = open("/proc/self/fd/1", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	tell_step("steal", fd);
}

/* PATH KIND append|replace: one line that a parser has to survive */
static void do_hostile_json(int argc, char **argv)
{
	const char *kind = argv[1];
	char *text = NULL;
	int flags = argc > 2 && !strcmp(argv[2], "append") ? O_APPEND : O_TRUNC;

	if (!strcmp(kind, "deep")) {
		text = malloc(60002);
		memset(text, '[', 60000);
		strcpy(text + 60000, "\n");
	} else if (!strcmp(kind, "deep-object")) {
		text = malloc(60002);
		for (size_t i = 0; i + 5 < 60000; i += 5)
			memcpy(text + i, "{\"a\":", 5);
		strcpy(text + 59995, "\n");
	} else if (!strcmp(kind, "number")) {
		text = malloc(60020);
		strcpy(text, "{\"a\":");
		memset(text + 5, '9', 60000);
		strcpy(text + 60005, "}\n");
	} else if (!strcmp(kind, "huge")) {
		size_t size = (1 << 20) + 100;

		text = malloc(size + 2);
		memset(text, 'x', size);
		memcpy(text, "{\"role\":\"user\",\"content\":\"", 26);
		strcpy(text + size - 2, "\"}\n");
	}
	tell_result(text ? put(argv[0], flags, text) : -1);
}

/* PATH HEX: bytes that no argument can hold, as one write */
static void do_bytes(int argc, char **argv)
{
	char data[2048];
	size_t n = 0;
	int fd = open(argv[0], O_WRONLY | O_TRUNC | O_CLOEXEC);

	(void)argc;
	for (const char *p = argv[1]; p[0] && p[1] && n < sizeof data; p += 2) {
		char byte[3] = {p[0], p[1], 0};

		data[n++] = (char)strtol(byte, NULL, 16);
	}
	if (fd < 0 || write(fd, data, n) < 0) {
		tell_result(-1);
		return;
	}
	tell_result(close(fd));
}

const struct way FILE_WAYS[] = {
	{"stat", 1, do_stat}, {"lstat", 1, do_lstat}, {"chdir", 1, do_chdir},
	{"inotify", 1, do_inotify}, {"readlink", 1, do_readlink}, {"list", 1, do_list},
	{"names", 2, do_names}, {"read", 1, do_read}, {"release", 1, do_release}, {"hammer", 2, do_hammer}, {"follow", 3, do_follow},
	{"hold", 2, do_hold}, {"open", 2, do_open}, {"write", 2, do_write},
	{"truncate", 1, do_truncate}, {"unlink", 1, do_unlink}, {"rmdir", 1, do_rmdir},
	{"mkdir", 1, do_mkdir}, {"rename", 2, do_rename}, {"exchange", 2, do_exchange},
	{"link", 2, do_link}, {"symlink", 2, do_symlink}, {"mknod", 2, do_mknod},
	{"bind", 1, do_bind}, {"chmod", 2, do_chmod}, {"chown", 2, do_chown},
	{"history", 2, do_history}, {"stdout", 0, do_stdout}, {"json", 2, do_hostile_json},
	{"bytes", 2, do_bytes}, {NULL, 0, NULL},
};
