/* Processes: others' and one's own. */
#include "hostile.h"

#include <ctype.h>
#include <dirent.h>
#include <linux/io_uring.h>
#include <linux/keyctl.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/uio.h>
#include <sys/wait.h>

/* PID SIGNAL */
static void do_kill(int argc, char **argv)
{
	(void)argc;
	tell_result(kill((pid_t)atol(argv[0]), atoi(argv[1])));
}

/* PID */
static void do_ptrace(int argc, char **argv)
{
	pid_t pid = (pid_t)atol(argv[0]);

	(void)argc;
	tell_step("attach", ptrace(PTRACE_ATTACH, pid, NULL, NULL));
	tell_step("seize", ptrace(PTRACE_SEIZE, pid, NULL, NULL));
}

/* PID: memory, and what is open, of another process */
static void do_memory(int argc, char **argv)
{
	pid_t pid = (pid_t)atol(argv[0]);
	char byte = 0;
	struct iovec here = {&byte, 1}, there = {(void *)(uintptr_t)0x400000, 1};
	long fd;

	(void)argc;
	tell_step("read", process_vm_readv(pid, &here, 1, &there, 1, 0));
	tell_step("write", process_vm_writev(pid, &here, 1, &there, 1, 0));
	fd = syscall(SYS_pidfd_open, pid, 0);
	tell_step("pidfd", fd);
	tell_step("getfd", fd < 0 ? -1 : syscall(SYS_pidfd_getfd, fd, 0, 0));
}

/* The names of all processes that can be seen, once each. */
static void do_processes(int argc, char **argv)
{
	DIR *proc = opendir("/proc");
	char seen[4096] = ",";
	struct dirent *entry;

	(void)argc;
	(void)argv;
	while (proc && (entry = readdir(proc))) {
		char path[300], name[64] = "", word[80];
		FILE *file;

		if (!isdigit((unsigned char)entry->d_name[0]))
			continue;
		snprintf(path, sizeof path, "/proc/%s/comm", entry->d_name);
		file = fopen(path, "r");
		if (!file)
			continue;
		if (fgets(name, sizeof name, file))
			name[strcspn(name, "\n")] = 0;
		fclose(file);
		snprintf(word, sizeof word, ",%s,", name);
		if (!strstr(seen, word))
			snprintf(seen + strlen(seen), sizeof seen - strlen(seen), "%s,", name);
	}
	tell("%s", seen);
}

/* TEXT: whether it is in the environment or command line of anything that can be seen */
static void do_environments(int argc, char **argv)
{
	static const char *const files[] = {"environ", "cmdline"};
	DIR *proc = opendir("/proc");
	struct dirent *entry;
	int looked = 0, found = 0;

	(void)argc;
	while (proc && (entry = readdir(proc))) {
		if (!isdigit((unsigned char)entry->d_name[0]) || atol(entry->d_name) == getpid())
			continue;
		for (size_t i = 0; i < 2; i++) {
			static char data[1 << 16];
			char path[300];
			ssize_t n;
			int fd;

			snprintf(path, sizeof path, "/proc/%s/%s", entry->d_name, files[i]);
			fd = open(path, O_RDONLY | O_CLOEXEC);
			n = fd < 0 ? -1 : read(fd, data, sizeof data);
			if (fd >= 0)
				close(fd);
			if (n <= 0)
				continue;
			looked++;
			/* its own command line names the text, that of its starter too */
			if (i == 0 && memmem(data, (size_t)n, argv[0], strlen(argv[0])))
				found++;
		}
	}
	tell("%s:%d", looked ? "looked" : "blind", found);
}

/* Descriptors that the program was started with. */
static void do_descriptors(int argc, char **argv)
{
	(void)argc;
	(void)argv;
	tell("%s", inherited);
}

/* Ids, capabilities and no_new_privs, as /proc tells them. */
static void do_ids(int argc, char **argv)
{
	char line[256], word[64];
	FILE *status = fopen("/proc/self/status", "r");

	(void)argc;
	(void)argv;
	while (status && fgets(line, sizeof line, status)) {
		static const char *const wanted[] = {"Uid:", "CapPrm:", "CapEff:", "CapAmb:", "NoNewPrivs:"};

		for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
			if (!strncmp(line, wanted[i], strlen(wanted[i])) &&
			    sscanf(line + strlen(wanted[i]), "%63s", word) == 1)
				tell("%s%s,", wanted[i], word);
	}
}

/* PATH ARGUMENT...: what a program says, with its standard error */
static void do_exec(int argc, char **argv)
{
	char text[512];
	int ends[2];
	ssize_t n;

	(void)argc;
	if (pipe(ends) < 0)
		return;
	if (fork() == 0) {
		dup2(ends[1], 1);
		dup2(ends[1], 2);
		execv(argv[0], argv);
		dprintf(1, "%s", error_name(errno));
		_exit(1);
	}
	close(ends[1]);
	while ((n = read(ends[0], text, sizeof text)) > 0)
		tell("%.*s", (int)n, text);
	wait(NULL);
}

static void do_setuid(int argc, char **argv)
{
	uid_t uid = (uid_t)atol(argv[0]);

	(void)argc;
	tell_step("setuid", setuid(uid));
	tell_step("setresuid", setresuid(uid, uid, uid));
	tell_step("setgroups", syscall(SYS_setgroups, 1, &uid));
}

static void do_cores(int argc, char **argv)
{
	struct rlimit none = {0, 0}, some = {1 << 20, 1 << 20};

	(void)argc;
	(void)argv;
	getrlimit(RLIMIT_CORE, &none);
	tell("limit=%lu", (unsigned long)none.rlim_max);
	tell_step("setrlimit", setrlimit(RLIMIT_CORE, &some));
	getrlimit(RLIMIT_CORE, &none);
	tell(" after=%lu", (unsigned long)none.rlim_max);
}

static void do_terminal(int argc, char **argv)
{
	(void)argc;
	(void)argv;
	tell_step("tty", open("/dev/tty", O_RDWR));
	tell_step("stdin", ioctl(0, TIOCSTI, "x"));
	tell_step("stdout", ioctl(1, TIOCSTI, "x"));
}

/* keys: left where another process of the same uid might find them */
static const struct { const char *name; long ring; } RINGS[] = {
	{"session", KEY_SPEC_SESSION_KEYRING},
	{"user", KEY_SPEC_USER_KEYRING},
	{"user-session", KEY_SPEC_USER_SESSION_KEYRING},
};

static void leave_keys(const char *secret)
{
	for (size_t i = 0; i < sizeof RINGS / sizeof *RINGS; i++)
		syscall(SYS_add_key, "user", "hostile:secret", secret, strlen(secret), RINGS[i].ring);
}

/* A key in RING, as its contents; errno 0 and nothing told if there is none. */
static bool tell_key(long ring)
{
	char text[200];
	long key = syscall(SYS_keyctl, KEYCTL_SEARCH, ring, "user", "hostile:secret", 0);
	long n = key < 0 ? -1 : syscall(SYS_keyctl, KEYCTL_READ, key, text, sizeof text, 0);

	if (n >= 0)
		tell("%.*s", (int)n, text);
	return n >= 0;
}

/* What others left in keyrings: one's own, and those whose numbers the kernel tells. */
static void do_keys(int argc, char **argv)
{
	FILE *listed = fopen("/proc/keys", "r");
	char line[512];

	(void)argc;
	(void)argv;
	for (size_t i = 0; i < sizeof RINGS / sizeof *RINGS; i++)
		if (tell_key(RINGS[i].ring))
			return;
	while (listed && fgets(line, sizeof line, listed)) {
		long number = strtol(line, NULL, 16);

		if (syscall(SYS_keyctl, KEYCTL_LINK, number, KEY_SPEC_PROCESS_KEYRING, 0, 0) < 0)
			continue;
		if (tell_key(KEY_SPEC_PROCESS_KEYRING))
			return;
		syscall(SYS_keyctl, KEYCTL_UNLINK, number, KEY_SPEC_PROCESS_KEYRING, 0, 0);
	}
	tell("none");
}

/* KEY: of System V shared memory */
static void do_shm(int argc, char **argv)
{
	(void)argc;
	tell_result(shmget((key_t)atol(argv[0]), 1, 0));
}

/*
 * READY SHM ABSTRACT PORT: what others would like to have, and leaves it where
 * only processes of its own cell should find it; stays. READY is a file to make
 * when all is there.
 */
static void do_victim(int argc, char **argv)
{
	int fd;

	(void)argc;
	leave_keys("the sibling's key");
	shmget((key_t)atol(argv[1]), 4096, IPC_CREAT | 0666);
	fd = open("/dev/shm/hostile", O_CREAT | O_WRONLY, 0666);
	(void)!write(fd, "the sibling's memory\n", 21);
	listen_everywhere(argv[2], argv[3]);
	alarm(0);
	(void)!put(argv[0], O_CREAT, "ready\n");
	for (;;)
		pause();
}

/* WAY ARGUMENT...: by a thread that is not the first */
struct work {
	int argc;
	char **argv;
};

static void *in_thread(void *data)
{
	struct work *work = data;

	run(work->argc, work->argv);
	return NULL;
}

static void do_thread(int argc, char **argv)
{
	struct work work = {argc, argv};
	pthread_t thread;

	pthread_create(&thread, NULL, in_thread, &work);
	pthread_join(thread, NULL);
}

/* PATH TEXT: opened and written by a worker thread of the kernel (io_uring(7)) */
static long by_uring(struct io_uring_sqe *wanted)
{
	struct io_uring_params params = {0};
	int ring = (int)syscall(SYS_io_uring_setup, 4, &params);
	struct io_uring_sqe *entries;
	struct io_uring_cqe *done;
	unsigned *tail, *index;
	long result;
	char *sq, *cq;

	if (ring < 0)
		return -errno;
	sq = mmap(NULL, params.sq_off.array + params.sq_entries * sizeof(unsigned),
		  PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING);
	cq = mmap(NULL, params.cq_off.cqes + params.cq_entries * sizeof *done,
		  PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_CQ_RING);
	entries = mmap(NULL, params.sq_entries * sizeof *entries, PROT_READ | PROT_WRITE,
		       MAP_SHARED, ring, IORING_OFF_SQES);
	if (sq == MAP_FAILED || cq == MAP_FAILED || entries == MAP_FAILED)
		return -errno;
	tail = (unsigned *)(sq + params.sq_off.tail);
	index = (unsigned *)(sq + params.sq_off.array);
	entries[0] = *wanted;
	entries[0].flags |= IOSQE_ASYNC;	/* never by the calling thread itself */
	index[*tail & (params.sq_entries - 1)] = 0;
	__atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
	if (syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0)
		return -errno;
	done = (struct io_uring_cqe *)(cq + params.cq_off.cqes);
	result = done->res;
	close(ring);
	return result;
}

static long uring_step(const char *what, struct io_uring_sqe *wanted)
{
	long result = by_uring(wanted);

	errno = result < 0 ? (int)-result : 0;
	return tell_step(what, result < 0 ? -1 : result) < 0 ? -1 : result;
}

static void do_uring(int argc, char **argv)
{
	struct io_uring_sqe open_it = {
		.opcode = IORING_OP_OPENAT, .fd = AT_FDCWD,
		.addr = (uintptr_t)argv[0], .open_flags = O_WRONLY,
	};
	long fd = uring_step("open", &open_it);
	struct io_uring_sqe write_it = {
		.opcode = IORING_OP_WRITE, .fd = (int)fd,
		.addr = (uintptr_t)argv[1], .len = (unsigned)strlen(argv[1]),
	};

	(void)argc;
	if (fd < 0)
		return;
	uring_step("write", &write_it);
	tell_step("close", close((int)fd));
}

/* NAME: stays as a process that left its session, its parent and its group */
static void do_daemonized(int argc, char **argv)
{
	(void)argc;
	if (fork() == 0) {
		setsid();
		if (fork() == 0) {
			alarm(0);
			for (int fd = 0; fd < 3; fd++)
				close(fd);
			prctl(PR_SET_NAME, argv[0]);
			for (int number = 1; number < 32; number++)
				signal(number, SIG_IGN);
			for (;;)
				pause();
		}
		_exit(0);
	}
	wait(NULL);
	tell("ok");
}

/* A process that stops itself, and does not want to hear. */
static void do_stopped(int argc, char **argv)
{
	(void)argc;
	(void)argv;
	if (fork() == 0) {
		alarm(0);
		signal(SIGTERM, SIG_IGN);
		for (;;)
			raise(SIGSTOP);
	}
	tell("ok");
}

const struct way PROCESS_WAYS[] = {
	{"kill", 2, do_kill}, {"ptrace", 1, do_ptrace}, {"memory", 1, do_memory},
	{"processes", 0, do_processes}, {"environments", 1, do_environments},
	{"descriptors", 0, do_descriptors}, {"ids", 0, do_ids}, {"exec", 1, do_exec},
	{"setuid", 1, do_setuid}, {"cores", 0, do_cores}, {"terminal", 0, do_terminal},
	{"keys", 0, do_keys}, {"shm", 1, do_shm}, {"victim", 4, do_victim},
	{"thread", 1, do_thread}, {"uring", 2, do_uring}, {"daemonized", 1, do_daemonized},
	{"stopped", 0, do_stopped}, {NULL, 0, NULL},
};
