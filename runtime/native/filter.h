/*
 * filter: denies system calls to every program in a cell (seccomp(2)).
 *
 * Namespaces and file modes do not isolate the following, or do not keep the kernel
 * from acting by itself:
 *
 *     any other ABI     has other call numbers, which would bypass the rest of the
 *                       filter: calls of another architecture all fail (ENOSYS),
 *                       also in 32-bit programs
 *     io_uring          does in the kernel what the filter refuses (ENOSYS)
 *     io_setup          lets one thread make many requests at once, which wait in the
 *                       daemon without a process that pays for them (ENOSYS)
 *     userfaultfd       lets a program hold a page for as long as it likes, and whatever
 *                       lock the kernel has taken that waits for this page (ENOSYS)
 *     keyrings          belong to the uid, which agents share (ENOSYS); monitor.c gave
 *                       the program a session keyring of its own
 *     vsock             reaches the hypervisor of this machine (EAFNOSUPPORT)
 *     terminals         TIOCSTI types into a terminal as if its user had, TIOCLINUX pastes
 *                       there, and TIOCSETD makes it one that nobody can use (EPERM). The
 *                       kernel takes the request as an int, so the filter does as well.
 *     leases            let the owner of a file delay everyone who opens it (EPERM)
 *     PID 1 of the cell has the program's uid, and prlimit(2), setpriority(2) and calls
 *                       for scheduler and processors check nothing else (EPERM). The
 *                       filter compares the number: PID 1 has number 1 for every
 *                       process that can name it, except in the parent's cell, which
 *                       may end it as well. This also refuses PID 1 of a namespace
 *                       that an agent made, unless it says 0 for itself. A call on
 *                       all processes of a uid includes PID 1.
 *     core dumps        if core_pattern is a pipe, a crash runs a program of the host
 *                       as root, outside of every agent, at every limit except 1
 *                       (core(5)). keeper.c sets 1, and the filter keeps it. (Setting
 *                       0 succeeds: many programs want no core, and must not fail.)
 *
 * The filter kills nothing: the call fails, and the program continues.
 */
#ifndef CTXFS_FILTER_H
#define CTXFS_FILTER_H

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the filter takes the low half of a call's argument to come first"
#elif defined(__x86_64__) && !defined(__ILP32__)
#define FILTER_ARCHITECTURE AUDIT_ARCH_X86_64
#elif defined(__aarch64__) && !defined(__ILP32__)
#define FILTER_ARCHITECTURE AUDIT_ARCH_AARCH64
#else
#error "the filter of system calls knows x86-64 and aarch64"
#endif

/* the headers may be older than these calls; the numbers are the same everywhere */
#define FILTER_IO_URING_SETUP 425
#define FILTER_IO_URING_REGISTER 427
#define FILTER_SETLEASE 1024	/* F_SETLEASE */
#define FILTER_SETDELEG 1040	/* F_SETDELEG of Linux 6.19: leases of directories */
#define FILTER_IOPRIO_WHO_USER 3
#define FILTER_X32 0x40000000U	/* __X32_SYSCALL_BIT */

/*
 * A jump offset has one byte and reaches at most 255 instructions, so the refusals
 * of each call follow that call. The filter first compares only call numbers, so that
 * the kernel can determine in advance that most calls are allowed.
 */
#define FILTER_ALLOW BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
#define FILTER_REFUSE(number) BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (number))
#define FILTER_LOAD(field) \
	BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
/* an argument that the kernel takes as an int: it ignores the upper half, too */
#define FILTER_LOAD_INT(argument) FILTER_LOAD(args[argument])
#define FILTER_LOAD_HIGH(argument) \
	BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[argument]) + 4)
#define FILTER_UNLESS(value, skip) \
	BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)(value), 0, skip)
#define FILTER_BELOW(value, skip) \
	BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, (uint32_t)(value), 0, skip)
/* the whole of a call */
#define FILTER_NONE(call, number) FILTER_UNLESS(call, 1), FILTER_REFUSE(number)
/* a call with one value of an argument, or with one of two */
#define FILTER_VALUE(call, argument, value, number) \
	FILTER_UNLESS(call, 4), FILTER_LOAD_INT(argument), \
	FILTER_UNLESS(value, 1), FILTER_REFUSE(number), FILTER_ALLOW
#define FILTER_VALUES(call, argument, value, other, number) \
	FILTER_UNLESS(call, 6), FILTER_LOAD_INT(argument), \
	FILTER_UNLESS(value, 1), FILTER_REFUSE(number), \
	FILTER_UNLESS(other, 1), FILTER_REFUSE(number), FILTER_ALLOW
#define FILTER_IOCTL \
	FILTER_UNLESS(SYS_ioctl, 8), FILTER_LOAD_INT(1), \
	FILTER_UNLESS(TIOCSTI, 1), FILTER_REFUSE(EPERM), \
	FILTER_UNLESS(TIOCLINUX, 1), FILTER_REFUSE(EPERM), \
	FILTER_UNLESS(TIOCSETD, 1), FILTER_REFUSE(EPERM), FILTER_ALLOW
/* (WHICH, WHO): PID 1 or its group, and everything of a uid */
#define FILTER_OF_MANY(call, user) \
	FILTER_UNLESS(call, 7), FILTER_LOAD_INT(0), \
	FILTER_UNLESS(user, 1), FILTER_REFUSE(EPERM), \
	FILTER_LOAD_INT(1), \
	FILTER_UNLESS(1, 1), FILTER_REFUSE(EPERM), FILTER_ALLOW

/* PID 1, and a new limit of core dumps; reading the limit is allowed (the third is NULL) */
#define FILTER_PRLIMIT \
	FILTER_UNLESS(SYS_prlimit64, 11), FILTER_LOAD_INT(0), \
	FILTER_UNLESS(1, 1), FILTER_REFUSE(EPERM), \
	FILTER_LOAD_INT(1), FILTER_UNLESS(RLIMIT_CORE, 5), \
	FILTER_LOAD_INT(2), FILTER_UNLESS(0, 2), \
	FILTER_LOAD_HIGH(2), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, 0), \
	FILTER_REFUSE(0), FILTER_ALLOW

/*
 * Installs the filter for this process and its descendants; needs no_new_privs.
 * Returns false with errno if the kernel has no filters.
 */
static inline bool filter_calls(void)
{
	static struct sock_filter filter[] = {
		FILTER_LOAD(arch),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, FILTER_ARCHITECTURE, 1, 0),
		FILTER_REFUSE(ENOSYS),
		FILTER_LOAD(nr),
#if defined(__x86_64__)
		FILTER_BELOW(FILTER_X32, 1),
		FILTER_REFUSE(ENOSYS),
#endif
		FILTER_BELOW(FILTER_IO_URING_SETUP, 2),
		BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, FILTER_IO_URING_REGISTER, 1, 0),
		FILTER_REFUSE(ENOSYS),
		FILTER_NONE(SYS_io_setup, ENOSYS),
		FILTER_NONE(SYS_userfaultfd, ENOSYS),
		FILTER_NONE(SYS_add_key, ENOSYS),
		FILTER_NONE(SYS_request_key, ENOSYS),
		FILTER_NONE(SYS_keyctl, ENOSYS),
		FILTER_VALUE(SYS_socket, 0, AF_VSOCK, EAFNOSUPPORT),
		FILTER_VALUE(SYS_socketpair, 0, AF_VSOCK, EAFNOSUPPORT),
		FILTER_VALUES(SYS_fcntl, 1, FILTER_SETLEASE, FILTER_SETDELEG, EPERM),
		FILTER_IOCTL,
		FILTER_PRLIMIT,
		FILTER_VALUE(SYS_setrlimit, 0, RLIMIT_CORE, 0),
		FILTER_VALUE(SYS_sched_setscheduler, 0, 1, EPERM),
		FILTER_VALUE(SYS_sched_setparam, 0, 1, EPERM),
		FILTER_VALUE(SYS_sched_setattr, 0, 1, EPERM),
		FILTER_VALUE(SYS_sched_setaffinity, 0, 1, EPERM),
		FILTER_OF_MANY(SYS_setpriority, PRIO_USER),
		FILTER_OF_MANY(SYS_ioprio_set, FILTER_IOPRIO_WHO_USER),
		FILTER_ALLOW,
	};
	const struct sock_fprog program = {.len = sizeof filter / sizeof *filter, .filter = filter};

	return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

#endif
