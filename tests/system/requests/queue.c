/*
 * queue: hundreds of threads that queue for the kernel's locks on the filesystem's inodes.
 *
 *     queue OPERATION THREADS DIRECTORY...
 *
 * Each thread does one thing without pause, for ever, with the directory /ctx/agent and with the
 * files of the agents whose DIRECTORY is named, their ctl above all. OPERATION is one of FUSE, or
 * "pages" (do_pages). When as many rounds are over as there are threads, one line is printed:
 * "attacks", and what came of the requests until then: errnos' names, or "ok".
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static char *const *targets;
static long targets_count;
static const char *root;
static atomic_bool met[256];
static atomic_long rounds;
/* where they wait for each other: those that run keep the next ones from being made */
static pthread_barrier_t all;

/* What a thread works with. */
struct place {
	char shared[512], made[512], agent[512], ctl[512], status[512];
	int directory, own, file;
	long number;
};

static void note(long result)
{
	atomic_store(&met[result < 0 ? errno & 255 : 0], 1);
}

static void do_fsyncdir(struct place *at)
{
	note(fsync(at->directory));
	note(fsync(at->own));
}

static void do_fsync(struct place *at) { note(fsync(at->file)); }

static void do_setxattr(struct place *at)
{
	note(setxattr(at->agent, "user.a", "x", 1, 0));
	note(setxattr(at->ctl, "user.a", "x", 1, 0));
}

static void do_removexattr(struct place *at)
{
	note(removexattr(at->agent, "user.a"));
	note(removexattr(at->ctl, "user.a"));
}

static void do_getxattr(struct place *at)
{
	char value[64];

	note(getxattr(at->shared, "user.a", value, sizeof value));
	note(getxattr(at->ctl, "security.capability", value, sizeof value));
}

static void do_listxattr(struct place *at)
{
	char names[64];

	note(listxattr(at->shared, names, sizeof names));
	note(listxattr(at->ctl, names, sizeof names));
}

static void do_setattr(struct place *at)
{
	note(truncate(at->ctl, 0));
	note(ftruncate(at->file, 0));
	note(chmod(at->ctl, 0777));
	note(utimensat(AT_FDCWD, at->ctl, NULL, 0));
	note(utimensat(AT_FDCWD, at->agent, NULL, 0));
}

/* Where the end of a file is, the kernel asks with its lock. */
static void do_getattr(struct place *at)
{
	struct statx found;

	note(lseek(at->file, 0, SEEK_END));
	note(statx(at->directory, "", AT_EMPTY_PATH | AT_STATX_FORCE_SYNC, STATX_ALL, &found));
	note(statx(AT_FDCWD, at->ctl, AT_STATX_FORCE_SYNC, STATX_ALL, &found));
}

/* Setting flags opens the directory with its lock. */
static void do_opendir(struct place *at)
{
	int flags = 0;

	note(ioctl(at->own, FS_IOC_SETFLAGS, &flags));
	note(ioctl(at->directory, FS_IOC_SETFLAGS, &flags));
	close(open(at->shared, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
}

static void do_readdir(struct place *at)
{
	char names[32768];

	lseek(at->directory, 0, SEEK_SET);
	note(getdents64(at->directory, names, sizeof names));
}

static void do_lookup(struct place *at)
{
	struct stat st;

	note(stat(at->made, &st));
}

static void do_mkdir(struct place *at) { note(mkdir(at->made, 0755)); note(rmdir(at->made)); }

static void do_rmdir(struct place *at) { note(rmdir(at->made)); note(rmdir(at->agent)); }

static void do_create(struct place *at) { note(open(at->made, O_CREAT | O_WRONLY, 0644)); }

static void do_mknod(struct place *at) { note(mknod(at->made, S_IFIFO | 0644, 0)); }

static void do_symlink(struct place *at) { note(symlink("/", at->made)); }

static void do_link(struct place *at) { note(link(at->ctl, at->made)); }

static void do_unlink(struct place *at) { note(unlink(at->made)); note(unlink(at->ctl)); }

static void do_rename(struct place *at)
{
	note(rename(at->agent, at->made));
	note(rename(at->ctl, at->made));
}

static void do_open(struct place *at)
{
	int fd = open(at->ctl, O_WRONLY | O_TRUNC | O_CLOEXEC);

	note(fd);
	if (fd >= 0)
		close(fd);
}

static void do_write(struct place *at) { note(pwrite(at->file, "none\n", 5, 0)); }

/* Half of them write to ctl from a page of a file in artifact/ that the daemon has to bring; the
 * others write that file. */
static void do_pages(struct place *at)
{
	static _Thread_local int file = -1;
	static _Thread_local char *page, bytes[1 << 16] = "none\n";
	char path[600];

	if (file < 0) {
		snprintf(path, sizeof path, "%s/artifact/page-%ld", at->agent, at->number / 2 % 8);
		file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
		note(pwrite(file, bytes, sizeof bytes, 0));
		page = mmap(NULL, sizeof bytes, PROT_READ, MAP_PRIVATE, file, 0);
	}
	if (at->number % 2) {
		note(pwrite(file, bytes, sizeof bytes, 0));
	} else if (page != MAP_FAILED) {
		posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
		madvise(page, sizeof bytes, MADV_DONTNEED);
		note(pwrite(at->file, page + 4096 * (at->number / 2 % 16), 5, 0));
	}
}

static void do_read(struct place *at)
{
	char text[64];

	note(pread(at->file, text, sizeof text, 0));
}

static void do_flush(struct place *at) { note(close(dup(at->file))); }

static void do_poll(struct place *at)
{
	note(poll(&(struct pollfd){.fd = at->file, .events = POLLIN}, 1, 0));
}

static void do_readlink(struct place *at)
{
	char text[512], path[1024];

	snprintf(path, sizeof path, "%s/session", at->agent);
	note(readlink(path, text, sizeof text));
}

static void do_statfs(struct place *at)
{
	struct statfs told;

	note(statfs(at->shared, &told));
}

static const struct operation {
	const char *name;
	void (*round)(struct place *at);
} OPERATIONS[] = {
	{"fsyncdir", do_fsyncdir}, {"fsync", do_fsync}, {"setxattr", do_setxattr},
	{"removexattr", do_removexattr}, {"getxattr", do_getxattr}, {"listxattr", do_listxattr},
	{"setattr", do_setattr}, {"getattr", do_getattr}, {"opendir", do_opendir},
	{"readdir", do_readdir}, {"lookup", do_lookup}, {"mkdir", do_mkdir}, {"rmdir", do_rmdir},
	{"create", do_create}, {"mknod", do_mknod}, {"symlink", do_symlink}, {"link", do_link},
	{"unlink", do_unlink}, {"rename", do_rename}, {"open", do_open}, {"write", do_write},
	{"read", do_read}, {"flush", do_flush}, {"poll", do_poll}, {"readlink", do_readlink},
	{"statfs", do_statfs},
	{"pages", do_pages},
};
static const struct operation *mine;

static void *run(void *own)
{
	long number = (long)own;
	const char *target = targets[number % targets_count];
	struct place at;

	at.number = number;
	snprintf(at.shared, sizeof at.shared, "%s/agent", root);
	snprintf(at.made, sizeof at.made, "%s/agent/queue-%d-%ld", root, getpid(), number);
	snprintf(at.agent, sizeof at.agent, "%s", target);
	snprintf(at.ctl, sizeof at.ctl, "%s/ctl", target);
	at.directory = open(at.shared, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	at.own = open(at.agent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	at.file = open(at.ctl, O_RDWR | O_CLOEXEC);
	snprintf(at.status, sizeof at.status, "%s/status", target);
	if (at.file < 0)
		at.file = open(at.status, O_RDONLY | O_CLOEXEC);
	if (at.directory < 0 || at.own < 0 || at.file < 0)
		exit(4);
	pthread_barrier_wait(&all);
	for (;;) {
		mine->round(&at);
		atomic_fetch_add(&rounds, 1);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	struct rlimit files;
	pthread_attr_t small;
	pthread_t thread;

	if (argc < 4)
		return 2;
	for (size_t i = 0; i < COUNT(OPERATIONS); i++)
		if (!strcmp(argv[1], OPERATIONS[i].name))
			mine = &OPERATIONS[i];
	root = getenv("CTX_ROOT");
	targets = argv + 3;
	targets_count = argc - 3;
	if (!root || !mine)
		return 2;
	getrlimit(RLIMIT_NOFILE, &files);
	files.rlim_cur = files.rlim_max;
	setrlimit(RLIMIT_NOFILE, &files);
	pthread_barrier_init(&all, NULL, atoi(argv[2]));
	pthread_attr_init(&small);
	pthread_attr_setstacksize(&small, 1 << 17);
	for (long own = 0; own < atoi(argv[2]); own++)
		if (pthread_create(&thread, &small, run, (void *)own))
			return 3;
	while (atomic_load(&rounds) < atoi(argv[2]))
		usleep(1000);
	printf("attacks");
	for (int error = 0; error < 256; error++)
		if (atomic_load(&met[error]))
			printf(" %s", error ? strerrorname_np(error) : "ok");
	puts("");
	fflush(stdout);
	for (;;)
		pause();
}
