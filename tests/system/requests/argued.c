/* A process that says that its command line is very long.
 *
 *   argued MIB       of memory that need not be there
 */
#define _GNU_SOURCE
#include <err.h>
#include <linux/prctl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#define FIELDS 52

int main(int argc, char **argv)
{
	char text[4096] = "", *at;
	unsigned long field[FIELDS + 1] = {0}, size;

	if (argc != 2)
		errx(2, "usage: argued MIB");
	size = strtoul(argv[1], NULL, 10) << 20;
	void *page = mmap(NULL, size, PROT_READ,
			  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (page == MAP_FAILED)
		err(1, "mmap");

	/* proc(5): the fields of stat from the third on follow the name */
	FILE *stat = fopen("/proc/self/stat", "r");
	if (!stat || !fgets(text, sizeof text, stat) || !(at = strrchr(text, ')')))
		err(1, "/proc/self/stat");
	at += 4;
	for (int number = 4; number <= FIELDS; number++)
		field[number] = strtoul(at, &at, 10);
	unsigned long begin = (unsigned long)page;
	struct prctl_mm_map map = {
		.start_code = field[26], .end_code = field[27], .start_stack = field[28],
		.start_data = field[45], .end_data = field[46], .start_brk = field[47],
		.brk = (unsigned long)sbrk(0), .arg_start = begin, .arg_end = begin + size,
		.env_start = begin + size, .env_end = begin + size, .exe_fd = -1,
	};
	if (prctl(PR_SET_MM, PR_SET_MM_MAP, &map, sizeof map, 0) < 0)
		err(1, "prctl");
	puts("argued");
	fflush(stdout);
	pause();
}
