/* For LD_PRELOAD: a program whose CLOCK_REALTIME and CLOCK_MONOTONIC are ahead of the machine's by as
 * many nanoseconds as the file CTXTEST_CLOCKS has, a number of eight bytes for each. Other clocks, such
 * as CLOCK_BOOTTIME, are the machine's.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
#include <dlfcn.h>

#define SECOND 1000000000LL

static const volatile int64_t *ahead;

__attribute__((constructor)) static void begin(void)
{
	const char *path = getenv("CTXTEST_CLOCKS");
	int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
	void *found = fd < 0 ? MAP_FAILED : mmap(NULL, 16, PROT_READ, MAP_SHARED, fd, 0);

	if (found == MAP_FAILED)
		_exit(125);
	close(fd);
	ahead = found;
}

static void add(struct timespec *t, int64_t nanoseconds)
{
	int64_t all = t->tv_sec * SECOND + t->tv_nsec + nanoseconds;

	t->tv_sec = all / SECOND;
	t->tv_nsec = all % SECOND;
}

int clock_gettime(clockid_t clock, struct timespec *t)
{
	if (syscall(SYS_clock_gettime, clock, t))
		return -1;
	if (ahead && (clock == CLOCK_REALTIME || clock == CLOCK_MONOTONIC))
		add(t, ahead[clock == CLOCK_MONOTONIC]);
	return 0;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone)
{
	struct timespec now;

	(void)zone;
	clock_gettime(CLOCK_REALTIME, &now);
	t->tv_sec = now.tv_sec;
	t->tv_usec = now.tv_nsec / 1000;
	return 0;
}

time_t time(time_t *t)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	if (t)
		*t = now.tv_sec;
	return now.tv_sec;
}

/* the kernel waits by its own clock */
int sem_clockwait(sem_t *restrict semaphore, clockid_t clock, const struct timespec *restrict until)
{
	int (*wait)(sem_t *, clockid_t, const struct timespec *) = dlsym(RTLD_NEXT, "sem_clockwait");
	struct timespec there = *until;

	if (clock == CLOCK_MONOTONIC)
		add(&there, -ahead[1]);
	return wait(semaphore, clock, &there);
}
