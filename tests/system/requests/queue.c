/*
 * queue: hundreds of threads that queue for the kernel's locks on the filesystem's inodes.
 *
 *     queue OPERATION THREADS DIRECTORY...
 *
 * Each thread does one thing without pause, for ever, with the directory /ctx/agent and with the
 * files of the agents whose DIRECTORY is named, their ctl above all. When as many rounds are over
 * as there are threads, one line is printed: "attacks", and what came of the requests until then:
 * errnos' names, or "ok".
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
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
	char shared[512], agent[512], ctl[512], status[512];
	int directory, own, file;
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

static void do_open(struct place *at)
{
	int fd = open(at->ctl, O_WRONLY | O_TRUNC | O_CLOEXEC);

	note(fd);
	if (fd >= 0)
		close(fd);
}

static const struct operation {
	const char *name;
	void (*round)(struct place *at);
} OPERATIONS[] = {
	{"fsyncdir", do_fsyncdir}, {"fsync", do_fsync}, {"setxattr", do_setxattr},
	{"removexattr", do_removexattr}, {"getxattr", do_getxattr}, {"listxattr", do_listxattr},
	{"setattr", do_setattr}, {"getattr", do_getattr}, {"open", do_open},
};
static const struct operation *only;

static void *run(void *own)
{
	long number = (long)own;
	const char *target = targets[number % targets_count];
	struct place at;

	snprintf(at.shared, sizeof at.shared, "%s/agent", root);
	snprintf(at.agent, sizeof at.agent, "%s", target);
	snprintf(at.ctl, sizeof at.ctl, "%s/ctl", target);
	at.directory = open(at.shared, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	at.own = open(at.agent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	at.file = open(at.ctl, O_RDWR | O_CLOEXEC);
	snprintf(at.status, sizeof at.status, "%s/status", target);
	if (at.file < 0)
		at.file = open(at.status, O_RDONLY | O_CLOEXEC);
	pthread_barrier_wait(&all);
	for (;;) {
		only->round(&at);
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
			only = &OPERATIONS[i];
	root = getenv("CTX_ROOT");
	targets = argv + 3;
	targets_count = argc - 3;
	if (!root || !only)
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
