/*
 * Functions that several programs share. Unless its comment says otherwise, a function
 * that fails returns -1 (or NULL) with errno.
 */
#ifndef CTXFS_COMMON_H
#define CTXFS_COMMON_H

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/keyctl.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <linux/sched.h>
#include <linux/securebits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* The exit status of a native program that failed before or in its task. */
#define EXIT_FAILED 125
#define DESCRIPTORS_MAX 64	/* in one message */

/*
 * Ends the program with a reason, which may contain %m of printf(3). Operators read it
 * on a terminal, so control characters in paths are escaped.
 */
__attribute__((format(printf, 1, 2), noreturn)) static inline void die(const char *format, ...)
{
	char text[8192];
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof text, format, args);
	va_end(args);
	fputs("ctxfs: ", stderr);
	for (const unsigned char *c = (const unsigned char *)text; *c; c++)
		fprintf(stderr, *c >= ' ' && *c <= '~' ? "%c" : "\\x%02x", *c);
	fputc('\n', stderr);
	exit(EXIT_FAILED);
}

/* Files. */

/* Reads the rest of FD and adds a NUL; the caller frees it; EFBIG above MAX. */
static inline char *read_all(int fd, size_t max, size_t *length)
{
	size_t capacity = 4096;
	char *data = NULL, *more;
	ssize_t n = 1;

	*length = 0;
	while (n > 0 || errno == EINTR) {
		if (!data || *length == capacity) {
			capacity *= 4;
			more = realloc(data, capacity + 1);
			if (!more)
				break;
			data = more;
		}
		n = read(fd, data + *length, capacity - *length);
		if (n == 0) {
			data[*length] = 0;
			return data;
		}
		if (n > 0 && (*length += (size_t)n) > max) {
			errno = EFBIG;
			break;
		}
	}
	free(data);
	return NULL;
}

/* Closes a descriptor unless it is negative, and keeps errno. */
static inline void close_quietly(int fd)
{
	int error = errno;

	if (fd >= 0)
		close(fd);
	errno = error;
}

/* Writes with one write(2), as files of the kernel require. */
static inline int write_file(int directory, const char *path, const char *text)
{
	int fd = openat(directory, path, O_WRONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : write(fd, text, strlen(text));

	close_quietly(fd);
	return n < 0 ? -1 : 0;
}

/* CLOSE_RANGE_CLOEXEC of linux/close_range.h, missing in older headers */
#define CLOSE_ON_EXEC (1U << 2)

static inline int close_from(unsigned first, unsigned flags)
{
	return (int)syscall(SYS_close_range, first, ~0U, flags);
}

/*
 * openat2(2) that follows no link of procfs: such a link would lead to where this
 * process is, not to where the process is that named the path.
 */
static inline int open_path(int directory, const char *path, int flags, uint64_t resolve)
{
	struct open_how how = {.flags = (uint64_t)(flags | O_CLOEXEC),
			       .resolve = resolve | RESOLVE_NO_MAGICLINKS};

	return (int)syscall(SYS_openat2, directory, path, &how, sizeof how);
}

/* Opens NAME in /proc/PID of the process of a pidfd. */
static inline int open_of_process(int pidfd, const char *name, int flags)
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
	snprintf(path, sizeof path, "/proc/%ld/%s", pid, name);
	fd = open(path, flags | O_CLOEXEC);
	/* if it still lives, its pid was not reused */
	if (fd >= 0 && syscall(SYS_pidfd_send_signal, pidfd, 0, NULL, 0) < 0) {
		close_quietly(fd);
		fd = -1;
	}
	return fd;
}

static inline bool is_inside(const char *path, const char *directory)
{
	size_t n = strlen(directory);

	return n && !strncmp(path, directory, n) && (path[n] == 0 || path[n] == '/');
}

/* True for f_type of procfs and cgroupfs, which no agent may be given. */
static inline bool is_kernels(long type)
{
	return type == PROC_SUPER_MAGIC || type == CGROUP_SUPER_MAGIC || type == CGROUP2_SUPER_MAGIC;
}

/* The message for a mount source that is_object() does not recognize. */
#define ANOTHER "ESTALE: mount source %s: the path no longer leads to the file or directory " \
		"that it led to: write the line again"

/* Whether FD is the object of ID, which is DEVICE:INODE (look.c), or "*" for any
 * object. */
static inline bool is_object(int fd, const char *id)
{
	unsigned long long device, inode;
	struct stat st;

	if (!strcmp(id, "*"))
		return true;
	return sscanf(id, "%llu:%llu", &device, &inode) == 2 && fstat(fd, &st) == 0 &&
	       (unsigned long long)st.st_dev == device && (unsigned long long)st.st_ino == inode;
}

/* Messages with descriptors (SCM_RIGHTS). */

union rights {
	char space[CMSG_SPACE(DESCRIPTORS_MAX * sizeof(int))];
	struct cmsghdr align;
};

static inline int send_message(int channel, const void *data, size_t length, const int *fds,
			       size_t count)
{
	union rights control = {0};
	struct iovec part = {(void *)(uintptr_t)data, length};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};

	if (count) {
		struct cmsghdr *header;

		message.msg_control = &control;
		message.msg_controllen = CMSG_SPACE(count * sizeof *fds);
		header = CMSG_FIRSTHDR(&message);
		header->cmsg_level = SOL_SOCKET;
		header->cmsg_type = SCM_RIGHTS;
		header->cmsg_len = CMSG_LEN(count * sizeof *fds);
		memcpy(CMSG_DATA(header), fds, count * sizeof *fds);
	}
	return (int)sendmsg(channel, &message, MSG_NOSIGNAL);
}

/*
 * FDS has room for DESCRIPTORS_MAX; they are close-on-exec. A message that does not fit
 * is lost: E2BIG.
 */
static inline ssize_t receive_message(int channel, void *data, size_t size, int *fds, size_t *count)
{
	union rights control;
	struct iovec part = {data, size};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control,
				 .msg_controllen = sizeof control};
	ssize_t n;

	do
		n = recvmsg(channel, &message, MSG_CMSG_CLOEXEC);
	while (n < 0 && errno == EINTR);
	*count = 0;
	if (n < 0)
		return -1;
	for (struct cmsghdr *h = CMSG_FIRSTHDR(&message); h; h = CMSG_NXTHDR(&message, h)) {
		if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
			continue;
		*count = (h->cmsg_len - CMSG_LEN(0)) / sizeof *fds;
		memcpy(fds, CMSG_DATA(h), *count * sizeof *fds);
	}
	if (!(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)))
		return n;
	while (*count)
		close(fds[--*count]);
	errno = E2BIG;
	return -1;
}

/* Processes. */

static inline long long now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

/* For helpers of the daemon: only the daemon handles a terminal's Ctrl-C. */
static inline void stand_beside(const char *name)
{
	prctl(PR_SET_NAME, name);
	setsid();
}

/* fork(2) into a cgroup, with FLAGS and SIGNAL of clone3(2). */
static inline pid_t fork_into(const char *cgroup, uint64_t flags, int signal)
{
	int fd = open(cgroup, O_PATH | O_DIRECTORY | O_CLOEXEC);
	struct clone_args args = {
		.flags = CLONE_INTO_CGROUP | flags,
		.exit_signal = (unsigned)signal,
		.cgroup = (unsigned)fd,
	};
	pid_t pid = fd < 0 ? -1 : (pid_t)syscall(SYS_clone3, &args, sizeof args);

	close_quietly(fd);
	return pid;
}

/* Waits for a child, and returns its exit status as sh(1) does. */
static inline int await_child(pid_t child)
{
	int status;

	while (waitpid(child, &status, 0) < 0)
		if (errno != EINTR)
			return EXIT_FAILED;
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* execveat(2) of an open program, since a file at a path could be replaced. Its
 * environment is empty. Returns only on failure. */
static inline void execute(int program, char **argv)
{
	char *const environment[] = {NULL};

	syscall(SYS_execveat, program, "", argv, environment, AT_EMPTY_PATH);
}

/* Ids and capabilities. */

struct ids {
	uid_t uid;
	gid_t gid;
	bool same_groups;	/* unchanged, for users who may not change them */
	gid_t *groups;
	size_t group_count;
};

/*
 * From here on, a change of the effective uid from 0 to another clears the effective
 * capabilities, which SECBIT_NO_SETUID_FIXUP of whoever started the daemon would prevent
 * (capabilities(7)). Fails if that bit is locked.
 */
static inline int clear_capabilities_with_uid(void)
{
	int bits = prctl(PR_GET_SECUREBITS, 0, 0, 0, 0);

	if (bits < 0 || !(bits & SECBIT_NO_SETUID_FIXUP))
		return bits < 0 ? -1 : 0;
	return prctl(PR_SET_SECUREBITS, bits & ~SECBIT_NO_SETUID_FIXUP, 0, 0, 0);
}

/*
 * A new session keyring: no agent may have the daemon's. To be called with the daemon's
 * ids: a keyring is on the account of a uid, and that of an agent's is small (keyrings(7)).
 * The failure of a kernel, or of a container, without keyrings is none.
 */
static inline int leave_keyring(void)
{
	if (syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, NULL) >= 0)
		return 0;
	return errno == ENOSYS || errno == EPERM ? 0 : -1;
}

static inline int become_groups(const struct ids *ids)
{
	return ids->same_groups ? 0 : setgroups(ids->group_count, ids->groups);
}

/* Empties the bounding set as far as permitted. */
static inline int empty_bounding_set(void)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct sets[_LINUX_CAPABILITY_U32S_3];

	if (syscall(SYS_capget, &header, sets) < 0)
		return -1;
	if (!(sets[0].effective & 1U << CAP_SETPCAP))
		return 0;
	for (unsigned long number = 0; prctl(PR_CAPBSET_READ, number, 0, 0, 0) >= 0; number++)
		if (prctl(PR_CAPBSET_DROP, number, 0, 0, 0) < 0)
			return -1;
	return 0;
}

/* Empties every set from which exec could take a capability. */
static inline int give_up_capabilities(void)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct none[_LINUX_CAPABILITY_U32S_3] = {{0}};

	if (empty_bounding_set() < 0 || prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) < 0)
		return -1;
	return (int)syscall(SYS_capset, &header, none);
}

static inline int forbid_new_privileges(void)
{
	return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
}

/* Permanent. Set the groups before: this drops the right to change them. */
static inline int become_user(const struct ids *ids)
{
	if (setresgid(ids->gid, ids->gid, ids->gid) < 0)
		return -1;
	return setresuid(ids->uid, ids->uid, ids->uid);
}

/* landlock_ruleset_attr as of Linux 6.12, missing in older headers */
struct ruleset {
	uint64_t access_fs, access_net, scoped;
};
#define ACCESS_FS_MAKE_BLOCK (1ULL << 11)
#define SCOPE_ABSTRACT_UNIX_SOCKET (1ULL << 0)
#define SCOPE_SIGNAL (1ULL << 1)

/*
 * Enters a domain with these rules (landlock(7)); needs no_new_privs. 0 if there are no such rules:
 * a kernel without this feature fails in one of several ways, a container's filter with EPERM.
 */
static inline int enter_domain(struct ruleset ruleset)
{
	size_t size = ruleset.scoped ? sizeof ruleset : sizeof ruleset.access_fs;
	int fd = (int)syscall(SYS_landlock_create_ruleset, &ruleset, size, 0);

	if (fd < 0)
		return errno == ENOSYS || errno == EOPNOTSUPP || errno == EINVAL ||
		       errno == E2BIG || errno == EPERM ? 0 : -1;
	return syscall(SYS_landlock_restrict_self, fd, 0) == 0 && close(fd) == 0 ? 1 : -1;
}

/* Takes an agent's uid and gid permanently, and drops every capability and every way to one. */
static inline int become(const struct ids *ids)
{
	/* the bounding set first: changing the ids drops the right to change it */
	if (forbid_new_privileges() < 0 || empty_bounding_set() < 0)
		return -1;
	if (become_user(ids) < 0)
		return -1;
	return give_up_capabilities();
}

#endif
