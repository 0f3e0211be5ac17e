/*
 * host: what the machine does around the agents.
 *
 *     host reuse PID CGROUP       a process with this number, in this cgroup; it stays
 *     host careless PROGRAM ...   starts a program from a terminal, with a keyring that
 *                                 holds a key, a secret in its environment and a file open
 *     host silent DIRECTORY       mounts a filesystem there that never answers; it stays
 *     host human                  leaves a key in its user's keyring; it stays
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/keyctl.h>
#include <linux/sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static int reuse(pid_t pid, const char *cgroup)
{
	int fd = open(cgroup, O_PATH | O_DIRECTORY | O_CLOEXEC);
	struct clone_args arguments = {
		.flags = CLONE_INTO_CGROUP,
		.exit_signal = SIGCHLD,
		.set_tid = (uintptr_t)&pid,
		.set_tid_size = 1,
		.cgroup = (unsigned long long)fd,
	};
	long made = syscall(SYS_clone3, &arguments, sizeof arguments);

	if (made < 0)
		die("clone3");
	if (made == 0)
		for (;;)
			pause();
	puts("reused");
	fflush(stdout);
	waitpid((pid_t)made, NULL, 0);
	return 0;
}

static int careless(char **command)
{
	/* the terminal's other end stays open as long as the program lives */
	int terminal = posix_openpt(O_RDWR | O_NOCTTY), secret;

	if (terminal < 0 || grantpt(terminal) < 0 || unlockpt(terminal) < 0)
		die("a terminal");
	/* of a session of its own, it may be so already; the first that is opened is the
	 * controlling terminal */
	if ((setsid() < 0 && getsid(0) != getpid()) || open(ptsname(terminal), O_RDWR) < 0)
		die("the terminal");
	if (syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, "careless") < 0 ||
	    syscall(SYS_add_key, "user", "hostile:secret", "the daemon's key", 16,
		    KEY_SPEC_SESSION_KEYRING) < 0)
		die("a key");
	setenv("HOSTILE_SECRET", "the daemon's secret", 1);
	secret = open("/etc/passwd", O_RDONLY);
	if (dup2(secret, 77) < 0)
		die("/etc/passwd");
	execv(command[0], command);
	die(command[0]);
	return 1;
}

static int silent(const char *directory)
{
	int fuse = open("/dev/fuse", O_RDWR | O_CLOEXEC);
	char options[200];

	snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other",
		 fuse);
	if (mount("silent", directory, "fuse", 0, options) < 0)
		die(directory);
	puts("mounted");
	fflush(stdout);
	pause();
	return 0;
}

static int human(void)
{
	if (syscall(SYS_add_key, "user", "hostile:secret", "the human's key", 15,
		    KEY_SPEC_USER_KEYRING) < 0)
		die("add_key");
	puts("left");
	fflush(stdout);
	pause();
	return 0;
}

int main(int argc, char **argv)
{
	if (argc > 3 && !strcmp(argv[1], "reuse"))
		return reuse((pid_t)atol(argv[2]), argv[3]);
	if (argc > 2 && !strcmp(argv[1], "careless"))
		return careless(argv + 2);
	if (argc > 2 && !strcmp(argv[1], "silent"))
		return silent(argv[2]);
	if (argc > 1 && !strcmp(argv[1], "human"))
		return human();
	fputs("usage: host reuse|careless|silent|human ...\n", stderr);
	return 2;
}
