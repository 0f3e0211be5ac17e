/*
 * filter: the system calls that no program in a cell has (seccomp(2)).
 *
 * Namespaces and modes do not keep these apart, or do not keep the kernel from
 * acting on them by itself:
 *
 *     any other ABI     its numbers mean other calls, and would pass by all that
 *                       follows: what is not of this architecture has no calls
 *                       at all (ENOSYS), 32-bit programs included
 *     io_uring          does what the filter refuses, in the kernel (ENOSYS)
 *     io_setup          many requests of one thread at once, which wait in the daemon
 *                       without a process that would pay for them (ENOSYS)
 *     keyrings          belong to the uid, which agents share (ENOSYS)
 *     vsock             leads to whatever runs this machine (EAFNOSUPPORT)
 *     leases            whoever owns a file delays all who open it (EPERM)
 *     PID 1 of the cell its limits, priority, scheduler and processors are of one
 *                       uid with the program, and prlimit(2) and setpriority(2)
 *                       ask for nothing more (EPERM). By number: PID 1 is number
 *                       1 for all who can name it, but for its parent's cell,
 *                       which may end it as well. Whoever is PID 1 of a namespace
 *                       that it made is refused too, unless it says 0 for itself.
 *                       All processes of a uid at once are PID 1 as well.
 *     core dumps        where core_pattern is a pipe, a crash runs a program of the
 *                       host's as root, outside of every agent, whatever the limit
 *                       is but 1 (core(5)): which keeper.c sets, and which stays
 *                       (0: many want no core, and must not be told that they failed)
 *
 * Nothing is killed: whoever asks is told, and goes on without.
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

/* of newer kernels than the headers may be: the same numbers everywhere */
#define FILTER_IO_URING_SETUP 425
#define FILTER_IO_URING_REGISTER 427
#define FILTER_SETLEASE 1024	/* F_SETLEASE */
#define FILTER_SETDELEG 1040	/* F_SETDELEG of Linux 6.19: leases of directories */
#define FILTER_IOPRIO_WHO_USER 3
#define FILTER_X32 0x40000000U	/* __X32_SYSCALL_BIT */

/*
 * A jump of one byte reaches no further than 255 instructions, so that each call
 * has its own refusals behind it. The numbers come first, with nothing loaded but
 * them, so that the kernel knows of most calls beforehand that they are allowed.
 */
#define FILTER_ALLOW BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
#define FILTER_REFUSE(number) BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (number))
#define FILTER_LOAD(field) \
	BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
/* what the kernel takes as an int: what is above has no meaning to it either */
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
/* (WHICH, WHO): PID 1 or its group, and everything of a uid */
#define FILTER_OF_MANY(call, user) \
	FILTER_UNLESS(call, 7), FILTER_LOAD_INT(0), \
	FILTER_UNLESS(user, 1), FILTER_REFUSE(EPERM), \
	FILTER_LOAD_INT(1), \
	FILTER_UNLESS(1, 1), FILTER_REFUSE(EPERM), FILTER_ALLOW

/* PID 1, and a new limit of core dumps; what the limit is may be asked (the third is NULL) */
#define FILTER_PRLIMIT \
	FILTER_UNLESS(SYS_prlimit64, 11), FILTER_LOAD_INT(0), \
	FILTER_UNLESS(1, 1), FILTER_REFUSE(EPERM), \
	FILTER_LOAD_INT(1), FILTER_UNLESS(RLIMIT_CORE, 5), \
	FILTER_LOAD_INT(2), FILTER_UNLESS(0, 2), \
	FILTER_LOAD_HIGH(2), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, 0), \
	FILTER_REFUSE(0), FILTER_ALLOW

/*
 * For this process and all that it becomes and starts, which needs
 * no_new_privs. False with errno where the kernel has no filters.
 */
static bool filter_calls(void)
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
		FILTER_NONE(SYS_add_key, ENOSYS),
		FILTER_NONE(SYS_request_key, ENOSYS),
		FILTER_NONE(SYS_keyctl, ENOSYS),
		FILTER_VALUE(SYS_socket, 0, AF_VSOCK, EAFNOSUPPORT),
		FILTER_VALUE(SYS_socketpair, 0, AF_VSOCK, EAFNOSUPPORT),
		FILTER_VALUES(SYS_fcntl, 1, FILTER_SETLEASE, FILTER_SETDELEG, EPERM),
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

	/* a fresh one: what the daemon was started with is none of the agent's */
	syscall(SYS_keyctl, 1 /* KEYCTL_JOIN_SESSION_KEYRING */, NULL);
	return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

#endif
