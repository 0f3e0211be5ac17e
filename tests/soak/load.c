/*
 * load: many at work without malice, and how long each of their requests took.
 *
 *     load CTX SECONDS WRITERS LOOKERS MAKERS AGENTS
 *
 * A process for each: writers write meta.json of load-0 to load-(AGENTS-1), lookers stat
 * what is there and what is not, makers make and remove an agent. Prints, for each kind,
 * "KIND REQUESTS REFUSED P50 P99 SLOWEST" (microseconds), and "stuck N" at the end: those
 * that were not answered within ten seconds of it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PATIENCE 10
#define STEPS 8	/* of a histogram, for each doubling */
#define CELLS (40 * STEPS)

struct worker {
	long long count, refused, slowest;
	unsigned cells[CELLS];
};

static const char *const KINDS[] = {"write", "look", "make"};
static const char *root;
static long long until;
static int agents;

static long long now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

static int cell_of(long long took)
{
	int bits = 0;
	long long rest = took;

	while (rest >= 2 * STEPS) {
		rest >>= 1;
		bits++;
	}
	return bits ? bits * STEPS + (int)rest : (int)rest;
}

static long long middle(int cell)
{
	int bits = cell < 2 * STEPS ? 0 : cell / STEPS - 1;

	return bits ? (long long)(cell - bits * STEPS) << bits : cell;
}

static void note(struct worker *worker, long long began, long result)
{
	long long took = now() - began;
	int cell = cell_of(took);

	worker->count++;
	worker->refused += result < 0;
	worker->cells[cell < CELLS ? cell : CELLS - 1]++;
	if (took > worker->slowest)
		worker->slowest = took;
}

static long write_meta(int agent, unsigned round)
{
	char path[512], text[64];
	int fd, n;
	long result;

	snprintf(path, sizeof path, "%s/agent/load-%d.d/meta.json", root, agent);
	n = snprintf(text, sizeof text, "{\"round\":%u}\n", round);
	fd = open(path, O_WRONLY | O_TRUNC | O_CLOEXEC);
	if (fd < 0)
		return -1;
	result = write(fd, text, (size_t)n);
	return close(fd) < 0 || result < 0 ? -1 : 0;
}

static void work(int kind, int number, struct worker *worker)
{
	char path[512];
	struct stat found;

	for (unsigned round = 0; now() < until; round++) {
		long long began = now();
		long result;

		if (kind == 0) {
			result = write_meta(number % agents, round);
		} else if (kind == 1) {
			if (round % 2)
				snprintf(path, sizeof path, "%s/agent/load-%d.d/status", root,
					 (number + (int)round) % agents);
			else
				snprintf(path, sizeof path, "%s/agent/none-%d-%u", root, number,
					 round);
			result = stat(path, &found);
			if (result < 0 && errno == ENOENT && round % 2 == 0)
				result = 0;
		} else {
			snprintf(path, sizeof path, "%s/agent/made-%d.d", root, number);
			result = mkdir(path, 0755);
			note(worker, began, result);
			began = now();
			result = rmdir(path);
		}
		note(worker, began, result);
		usleep(1000);
	}
}

static void print(int kind, struct worker *workers, int number)
{
	static unsigned cells[CELLS];
	struct worker all = {0};
	long long seen = 0, half = -1, high = -1;

	memset(cells, 0, sizeof cells);
	for (int i = 0; i < number; i++) {
		all.count += workers[i].count;
		all.refused += workers[i].refused;
		if (workers[i].slowest > all.slowest)
			all.slowest = workers[i].slowest;
		for (int c = 0; c < CELLS; c++)
			cells[c] += workers[i].cells[c];
	}
	for (int c = 0; c < CELLS; c++) {
		seen += cells[c];
		if (half < 0 && seen * 2 >= all.count)
			half = middle(c);
		if (high < 0 && seen * 100 >= all.count * 99)
			high = middle(c);
	}
	printf("%s %lld %lld %lld %lld %lld\n", KINDS[kind], all.count, all.refused, half, high,
	       all.slowest);
}

int main(int argc, char **argv)
{
	int numbers[3], total = 0, left, first = 0;
	struct worker *workers;

	if (argc != 7) {
		fprintf(stderr, "usage: load CTX SECONDS WRITERS LOOKERS MAKERS AGENTS\n");
		return 2;
	}
	root = argv[1];
	agents = atoi(argv[6]);
	until = now() + (long long)(atof(argv[2]) * 1e6);
	for (int kind = 0; kind < 3; kind++)
		total += numbers[kind] = atoi(argv[3 + kind]);
	workers = mmap(NULL, (size_t)total * sizeof *workers, PROT_READ | PROT_WRITE,
		       MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (workers == MAP_FAILED)
		return 1;
	for (int kind = 0, i = 0; kind < 3; kind++) {
		for (int n = 0; n < numbers[kind]; n++, i++) {
			if (fork())
				continue;
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			work(kind, n, &workers[i]);
			_exit(0);
		}
	}
	for (left = total; left && now() < until + PATIENCE * 1000000LL;) {
		if (waitpid(-1, NULL, WNOHANG) > 0)
			left--;
		else
			usleep(10000);
	}
	for (int kind = 0; kind < 3; kind++) {
		print(kind, workers + first, numbers[kind]);
		first += numbers[kind];
	}
	printf("stuck %d\n", left);
	return 0;
}
