/* System calls that no program in a cell has, by all the ways into the kernel. */
#include "hostile.h"

#include <linux/vm_sockets.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>

/* As the C library does it: what the kernel answers, as errno. */
static long told(long answer)
{
	if (answer >= 0 || answer < -4095)
		return answer;
	errno = (int)-answer;
	return -1;
}

#if defined(__x86_64__)
/* The calls of a 32-bit program, which any program may make (int 0x80). */
static long call32(long number, long a, long b, long c)
{
	long answer;

	__asm__ volatile("int $0x80"
			 : "=a"(answer)
			 : "a"(number), "b"(a), "c"(b), "d"(c)
			 : "memory", "r8", "r9", "r10", "r11");
	return told((int)answer);
}

static void do_call32(int argc, char **argv)
{
	(void)argc;
	(void)argv;
	tell_step("getpid", call32(20, 0, 0, 0));
	tell_step("vsock", call32(359, AF_VSOCK, SOCK_STREAM, 0));
	tell_step("pair", call32(360, AF_VSOCK, SOCK_STREAM, 0));
	tell_step("lease", call32(221, 0, F_SETLEASE, F_RDLCK));
	tell_step("uring", call32(425, 4, 0, 0));
	tell_step("keys", call32(288, 0, 0, 0));
	tell_step("limits", call32(340, 1, RLIMIT_NOFILE, 0));
	tell_step("type", call32(54, 0, TIOCSTI, 0));
	tell_step("paste", call32(54, 0, TIOCLINUX, 0));
	tell_step("line", call32(54, 0, TIOCSETD, 0));
}

/* Those of the x32 ABI: the same way in, other numbers. */
static void do_callx32(int argc, char **argv)
{
	const long x32 = 0x40000000;

	(void)argc;
	(void)argv;
	tell_step("getpid", syscall(x32 + SYS_getpid));
	tell_step("vsock", syscall(x32 + SYS_socket, AF_VSOCK, SOCK_STREAM, 0));
	tell_step("lease", syscall(x32 + SYS_fcntl, 0, F_SETLEASE, F_RDLCK));
	tell_step("uring", syscall(x32 + 425, 4, NULL));
	tell_step("type", syscall(x32 + 514, 0, TIOCSTI, "x"));	/* its own number of ioctl(2) */
	tell_step("plain", syscall(x32 + SYS_ioctl, 0, TIOCSTI, "x"));
}
#else
static void do_call32(int argc, char **argv)
{
	(void)argc;
	(void)argv;
	tell("getpid=ENOSYS vsock=ENOSYS pair=ENOSYS lease=ENOSYS uring=ENOSYS keys=ENOSYS "
	     "limits=ENOSYS type=ENOSYS paste=ENOSYS line=ENOSYS");
}

static void do_callx32(int argc, char **argv)
{
	(void)argc;
	(void)argv;
	tell("getpid=ENOSYS vsock=ENOSYS lease=ENOSYS uring=ENOSYS type=ENOSYS plain=ENOSYS");
}
#endif

/* What types into a terminal, pastes there, or makes it useless; also with more in the half of the
 * number that the kernel does not look at. */
static void do_terminals(int argc, char **argv)
{
	const long more = 1L << 32;

	(void)argc;
	(void)argv;
	tell_step("type", ioctl(0, TIOCSTI, "x"));
	tell_step("wide", syscall(SYS_ioctl, 0, more | TIOCSTI, "x"));
	tell_step("paste", ioctl(0, TIOCLINUX, "\3"));
	tell_step("widepaste", syscall(SYS_ioctl, 0, more | TIOCLINUX, "\3"));
	tell_step("line", ioctl(0, TIOCSETD, &(int){27}));
	tell_step("wideline", syscall(SYS_ioctl, 0, more | TIOCSETD, &(int){27}));
}

static void do_rings(int argc, char **argv)
{
	char params[256] = {0};
	unsigned long queue = 0;

	(void)argc;
	(void)argv;
	tell_step("setup", syscall(SYS_io_uring_setup, 4, params));
	tell_step("enter", syscall(SYS_io_uring_enter, 0, 1, 1, 0, NULL, 0));
	tell_step("register", syscall(SYS_io_uring_register, 0, 0, NULL, 0));
	tell_step("aio", syscall(SYS_io_setup, 1, &queue));
}

/* Pages that a program fills when it likes (userfaultfd(2)): 1 is for faults of its own alone. */
static void do_faults(int argc, char **argv)
{
	(void)argc;
	(void)argv;
	tell_step("call", syscall(SYS_userfaultfd, O_CLOEXEC));
	tell_step("own", syscall(SYS_userfaultfd, O_CLOEXEC | 1));
	tell_step("device", open("/dev/userfaultfd", O_RDWR | O_CLOEXEC));
}

/* Half of what the kernel looks at comes from elsewhere: it takes an int. */
static void do_vsocks(int argc, char **argv)
{
	int pair[2];

	(void)argc;
	(void)argv;
	tell_step("socket", socket(AF_VSOCK, SOCK_STREAM, 0));
	tell_step("wide", syscall(SYS_socket, AF_VSOCK | 1L << 32, SOCK_STREAM, 0));
	tell_step("pair", socketpair(AF_VSOCK, SOCK_STREAM, 0, pair));
	tell_step("unix", socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
}

/* PATH: of a file of its own */
static void do_lease(int argc, char **argv)
{
	int fd = open(argv[0], O_RDONLY | O_CREAT | O_CLOEXEC, 0600);
	int directory = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	struct { uint32_t flags; uint16_t type, pad; } delegation = {.type = F_RDLCK};

	(void)argc;
	tell_step("read", fcntl(fd, F_SETLEASE, F_RDLCK));
	tell_step("wide", syscall(SYS_fcntl, fd, F_SETLEASE | 1L << 32, F_RDLCK));
	tell_step("directory", syscall(SYS_fcntl, directory, 1040, &delegation));
	tell_step("lock", fcntl(fd, F_GETFL));
}

static void do_keyrings(int argc, char **argv)
{
	(void)argc;
	(void)argv;
	tell_step("session", syscall(SYS_keyctl, 1, NULL));
	tell_step("add", syscall(SYS_add_key, "user", "name", "value", 5, -3));
	tell_step("request", syscall(SYS_request_key, "user", "name", NULL, 0));
}

/* PID 1, or as if it were: its limits, its priority, its processors. */
static void do_first(int argc, char **argv)
{
	struct rlimit none = {1, 1};
	struct sched_param parameter = {0};
	cpu_set_t processors;
	uint32_t attributes[12] = {sizeof attributes, SCHED_BATCH};

	(void)argc;
	(void)argv;
	sched_getaffinity(0, sizeof processors, &processors);
	tell_step("limits", prlimit(1, RLIMIT_CPU, &none, NULL));
	tell_step("wide", syscall(SYS_prlimit64, 1 | 1L << 32, RLIMIT_NOFILE, &none, NULL));
	tell_step("affinity", sched_setaffinity(1, sizeof processors, &processors));
	tell_step("scheduler", sched_setscheduler(1, SCHED_IDLE, &parameter));
	tell_step("parameter", sched_setparam(1, &parameter));
	tell_step("attributes", syscall(SYS_sched_setattr, 1, attributes, 0));
	tell_step("nice", setpriority(PRIO_PROCESS, 1, 19));
	tell_step("group", setpriority(PRIO_PGRP, 1, 19));
	tell_step("join", setpgid(0, 1));
	tell_step("user", setpriority(PRIO_USER, getuid(), 19));
	tell_step("users", setpriority(PRIO_USER, 0, 19));
	tell_step("io", syscall(SYS_ioprio_set, 1, 1, 3 << 13));
	tell_step("iogroup", syscall(SYS_ioprio_set, 2, 1, 3 << 13));
	tell_step("iouser", syscall(SYS_ioprio_set, 3, getuid(), 3 << 13));
}

/* Whether PID 1 is as it was when this program's own group changes, and who may write of it. */
static void do_untouched(int argc, char **argv)
{
	int nice = getpriority(PRIO_PROCESS, 0), its = getpriority(PRIO_PROCESS, 1);
	cpu_set_t first, own;

	(void)argc;
	(void)argv;
	setpriority(PRIO_PGRP, 0, nice + 3);
	sched_getaffinity(1, sizeof first, &first);
	sched_getaffinity(0, sizeof own, &own);
	tell("own=%+d nice=%+d scheduler=%d affinity=%s", getpriority(PRIO_PROCESS, 0) - nice,
	     getpriority(PRIO_PROCESS, 1) - its, sched_getscheduler(1),
	     CPU_EQUAL(&first, &own) ? "same" : "other");
	tell_step("oom", put("/proc/1/oom_score_adj", 0, "1000"));
	tell_step("autogroup", put("/proc/1/autogroup", 0, "19"));
}

const struct way CALL_WAYS[] = {
	{"call32", 0, do_call32}, {"callx32", 0, do_callx32}, {"rings", 0, do_rings},
	{"faults", 0, do_faults}, {"vsocks", 0, do_vsocks}, {"lease", 1, do_lease},
	{"keyrings", 0, do_keyrings}, {"terminals", 0, do_terminals},
	{"first", 0, do_first}, {"untouched", 0, do_untouched},
	{NULL, 0, NULL},
};
