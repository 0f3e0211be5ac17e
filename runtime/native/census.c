/*
 * census: tells what runs in agents' cgroups.
 *
 *     census ORDERS_FD
 *
 * What procfs says of a process's memory and command line waits for the lock of its memory,
 * which a process may hold for as long as it likes. So the daemon asks this program (orders.h),
 * and this one has a child look, which it kills when it waits: what was not had is null.
 *
 *     list MS MOST ASKER SPARED PLACES
 *         One line of JSON for each process, as ctxfs(5) has them for processes.
 *     memory MS MOST SPARED PLACES
 *         One line for each place, the bytes and the number of its processes, and the bytes of
 *         files that it has in memory. Memory is PSS, or if that was not had, what is resident.
 *
 * PLACES are lists: the name of an agent, as JSON, the PID of its cell's keeper or 0, and its
 * cgroups. No process in SPARED is told
 * of. After MS milliseconds or MOST processes no more is looked at. ASKER is a process, or 0,
 * in whose PID namespace PIDs are told.
 *
 * A process is identified by a pidfd, and its cgroup is asked for its PIDs again afterwards, so
 * that another process that gets the PID meanwhile is never taken for it.
 */
#define _GNU_SOURCE
#include <linux/magic.h>
#include <linux/nsfs.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statfs.h>

#include "groups.h"
#include "orders.h"

#define MOST_MAX (64 << 10)
#define PIDS_MAX (4 << 20)
#define COMMAND_MAX 1024	/* characters of a command line that are told */
#define NAME_MAX_BYTES 64
#define STALLED_MS 250	/* who waits so long for one process is killed */
#define DEPTH_OF_NAMESPACES 33

struct entry {
	pid_t pid, speaker, told;	/* who tells of its memory; 0 for no number there */
	size_t place;
	int fd;
	char state;
	bool there;
	unsigned long long ticks, start;
	long long pss, resident;
	ssize_t name_length, command_length;
	char name[NAME_MAX_BYTES], command[COMMAND_MAX];
};

struct place {
	struct list words;
	pid_t *pids;
	size_t count;
};

/* What the child that looks shares. */
struct looked {
	size_t next;
	struct entry entries[];
};

static struct looked *looked;
static size_t entry_count;
static struct place *places;
static size_t place_count;
static unsigned *spared;
static size_t spared_count;

/* Processes in cgroups. */

static int compare(const void *a, const void *b)
{
	pid_t one = *(const pid_t *)a, other = *(const pid_t *)b;

	return (one > other) - (one < other);
}

static bool is_spared(pid_t pid)
{
	for (size_t i = 0; i < spared_count; i++)
		if ((pid_t)spared[i] == pid)
			return true;
	return false;
}

static void add_processes(int group, void *context)
{
	struct place *place = context;
	size_t count;
	pid_t *pids = list_processes(group, &count), *all;

	all = pids ? realloc(place->pids, (place->count + count + 1) * sizeof *all) : NULL;
	if (all) {
		place->pids = all;
		for (size_t i = 0; i < count; i++)
			if (!is_spared(pids[i]))
				all[place->count++] = pids[i];
	}
	free(pids);
}

/* Lists what is in a place now, in the order of PIDs. */
static void list_place(struct place *place)
{
	free(place->pids);
	place->pids = NULL;
	place->count = 0;
	for (size_t i = 2; i < place->words.count; i++)
		visit_groups(open_group(AT_FDCWD, place->words.items[i]), 0, add_processes, place);
	if (place->pids)
		qsort(place->pids, place->count, sizeof *place->pids, compare);
}

/* What procfs says of a process. */

static ssize_t read_of(pid_t pid, const char *file, char *text, size_t size)
{
	char path[64];
	ssize_t n;
	int fd;

	snprintf(path, sizeof path, "/proc/%d/%s", pid, file);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return -1;
	n = read(fd, text, size);
	close(fd);
	return n;
}

/* The PIDs of a process from this namespace down to its own. */
static size_t read_numbers(pid_t pid, pid_t *numbers)
{
	char text[4096], *line;
	ssize_t n = read_of(pid, "status", text, sizeof text - 1);
	size_t count = 0;

	text[n > 0 ? n : 0] = 0;
	line = strstr(text, "\nNSpid:");
	for (char *next = line ? line + 7 : text; line && count < DEPTH_OF_NAMESPACES; count++) {
		numbers[count] = (pid_t)strtol(next, &line, 10);
		if (line == next || numbers[count] == 0)
			break;
		next = line;
		if (*next == '\n')
			return count + 1;
	}
	return count;
}

static int open_namespace(pid_t pid)
{
	char path[64];

	snprintf(path, sizeof path, "/proc/%d/ns/pid", pid);
	return open(path, O_RDONLY | O_CLOEXEC);
}

static size_t asker_depth;
static struct stat asker_namespace;

static void know_asker(pid_t asker)
{
	pid_t numbers[DEPTH_OF_NAMESPACES];
	int fd = asker ? open_namespace(asker) : -1;

	if (fd >= 0 && fstat(fd, &asker_namespace) == 0)
		asker_depth = read_numbers(asker, numbers);
	close_quietly(fd);
}

/* What a process is called where the asker is; 0 if it is not there. */
static pid_t number_for_asker(pid_t pid)
{
	pid_t numbers[DEPTH_OF_NAMESPACES];
	size_t count = read_numbers(pid, numbers);
	struct stat found = {0};
	int fd, above;

	if (!asker_depth || count < asker_depth)
		return 0;
	fd = open_namespace(pid);
	for (size_t i = asker_depth; fd >= 0 && i < count; i++) {
		above = ioctl(fd, NS_GET_PARENT);
		close(fd);
		fd = above;
	}
	if (fd < 0)
		return 0;
	fstat(fd, &found);
	close(fd);
	return found.st_ino == asker_namespace.st_ino ? numbers[asker_depth - 1] : 0;
}

/* Reads state, times and start from stat; false if the process is gone. */
static bool read_stat(pid_t pid, char *state, unsigned long long *ticks, unsigned long long *start)
{
	unsigned long long user, system;
	char text[1024], *rest;
	ssize_t n = read_of(pid, "stat", text, sizeof text - 1);

	if (n <= 0)
		return false;
	text[n] = 0;
	rest = strrchr(text, ')');
	if (!rest || sscanf(rest, ") %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu %*d %*d "
				  "%*d %*d %*d %*d %llu", state, &user, &system, start) != 4)
		return false;
	*ticks = user + system;
	return true;
}

/* Once its first thread has ended, one of the others that go on tells of its memory. */
static pid_t find_speaker(pid_t pid)
{
	struct dirent *entry;
	char path[64];
	pid_t found = pid;
	DIR *list;

	snprintf(path, sizeof path, "/proc/%d/task", pid);
	list = opendir(path);
	while (list && found == pid && (entry = readdir(list)))
		if (atoi(entry->d_name) > 0)
			found = atoi(entry->d_name);
	if (list)
		closedir(list);
	return found;
}

/* What is known without the lock of its memory; false if it is gone. */
static bool look(struct entry *entry, bool lists)
{
	unsigned long long unused;
	char text[128];
	ssize_t n;

	entry->fd = (int)syscall(SYS_pidfd_open, entry->pid, 0);
	if (entry->fd < 0 || !read_stat(entry->pid, &entry->state, &entry->ticks, &entry->start))
		return false;
	entry->speaker = entry->pid;
	entry->pss = entry->command_length = -1;
	if (entry->state == 'Z') {
		entry->speaker = find_speaker(entry->pid);
		read_stat(entry->speaker, &entry->state, &unused, &unused);
	}
	n = read_of(entry->speaker, "statm", text, sizeof text - 1);
	text[n > 0 ? n : 0] = 0;
	if (sscanf(text, "%*d %lld", &entry->resident) == 1)
		entry->resident *= sysconf(_SC_PAGESIZE);
	if (lists) {
		entry->name_length = read_of(entry->pid, "comm", entry->name, sizeof entry->name);
		entry->told = number_for_asker(entry->pid);
	}
	return true;
}

/* What waits for the lock of its memory. */
static void look_inside(struct entry *entry, bool lists)
{
	char text[8192], *line;
	ssize_t n;

	if (lists)
		entry->command_length =
			read_of(entry->speaker, "cmdline", entry->command, sizeof entry->command);
	n = read_of(entry->speaker, "smaps_rollup", text, sizeof text - 1);
	if (n < 0)
		return;
	text[n] = 0;
	line = strstr(text, "\nPss:");
	entry->pss = line ? strtoll(line + 5, NULL, 10) << 10 : 0;
}

/* Has children look, one after the other, until all is known or there is no more time. */
static void look_into_all(bool lists, long long deadline)
{
	while (looked->next < entry_count && now_ms() < deadline) {
		struct pollfd ended = {.events = POLLIN};
		size_t before = looked->next;
		long long since = now_ms();
		pid_t child = fork();

		if (child < 0)
			return;
		if (child == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			for (; looked->next < entry_count; looked->next++)
				if (looked->entries[looked->next].there)
					look_inside(&looked->entries[looked->next], lists);
			_exit(0);
		}
		ended.fd = (int)syscall(SYS_pidfd_open, child, 0);
		while (poll(&ended, 1, 10) == 0 && now_ms() < deadline) {
			size_t next = *(volatile size_t *)&looked->next;

			if (next != before) {
				before = next;
				since = now_ms();
			} else if (now_ms() - since > STALLED_MS) {
				break;
			}
		}
		kill(child, SIGKILL);
		await_child(child);
		close_quietly(ended.fd);
		if (looked->next < entry_count)
			looked->next++;	/* this one waits */
	}
}

/* Lines of JSON. */

/* Characters that could do something to a terminal: controls, and what changes directions. */
static const unsigned unprintable[][2] = {
	{0x7f, 0x9f}, {0xad, 0xad}, {0x600, 0x605}, {0x61c, 0x61c}, {0x6dd, 0x6dd},
	{0x70f, 0x70f}, {0x890, 0x891}, {0x8e2, 0x8e2}, {0x180e, 0x180e}, {0x200b, 0x200f},
	{0x2028, 0x202e}, {0x2060, 0x206f}, {0xe000, 0xf8ff}, {0xfeff, 0xfeff},
	{0xfff9, 0xfffb}, {0xfffe, 0xffff}, {0x110bd, 0x110bd}, {0x110cd, 0x110cd},
	{0x13430, 0x1343f}, {0x1bca0, 0x1bca3}, {0x1d173, 0x1d17a}, {0xe0000, 0x10ffff},
};

static bool is_printable(unsigned c)
{
	if (c < ' ')
		return false;
	for (size_t i = 0; i < sizeof unprintable / sizeof *unprintable; i++)
		if (c >= unprintable[i][0] && c <= unprintable[i][1])
			return false;
	return true;
}

/* Decodes a character of UTF-8; returns its length, or 0 if it is damaged or cut off. */
static size_t decode(const unsigned char *text, size_t left, unsigned *c)
{
	size_t length = *text < 0x80 ? 1 : *text < 0xc2 ? 0 : *text < 0xe0 ? 2 : *text < 0xf0 ? 3
		      : *text < 0xf5 ? 4 : 0;
	static const unsigned least[] = {0, 0, 0x80, 0x800, 0x10000};

	if (!length || length > left)
		return 0;
	*c = length == 1 ? *text : *text & (0x7fU >> length);
	for (size_t i = 1; i < length; i++) {
		if ((text[i] & 0xc0) != 0x80)
			return 0;
		*c = *c << 6 | (text[i] & 0x3f);
	}
	if (*c < least[length] || *c > 0x10ffff || (*c >= 0xd800 && *c <= 0xdfff))
		return 0;
	return length;
}

/* Prints what a process says of itself as a string of at most MOST characters. */
static void print_text(const char *data, ssize_t length, size_t most)
{
	const unsigned char *text = (const unsigned char *)data;
	size_t left, told = 0;

	if (length < 0) {
		fputs("null", stdout);
		return;
	}
	while (length && (data[length - 1] == 0 || data[length - 1] == '\n'))
		length--;
	left = (size_t)length;
	putchar('"');
	while (left) {
		unsigned c = ' ';
		size_t used = *text ? decode(text, left, &c) : 1;
		char code[16] = "";
		const char *named = c < ' ' && used ? strchr("\nn\tt\rr", (int)c) : NULL;

		if (!used)
			c = 0xfffd;
		else if (named && *named)
			snprintf(code, sizeof code, "\\\\%c", named[1]);
		else if (!is_printable(c))
			snprintf(code, sizeof code, c < 0x100 ? "\\\\x%02x" : c < 0x10000 ? "\\\\u%04x"
				 : "\\\\U%08x", c);
		told += *code ? strlen(code) - 1 : 1;
		if (told > most)
			break;
		if (*code)
			fputs(code, stdout);
		else if (!used)
			fputs("\xef\xbf\xbd", stdout);
		else if (c == '"' || c == '\\')
			printf("\\%c", (int)c);
		else if (!*text)
			putchar(' ');
		else
			fwrite(text, 1, used, stdout);
		used += !used;
		text += used;
		left -= used;
	}
	putchar('"');
}

static const char *name_of_state(char state)
{
	static const char *const names[] = {
		"Rrunning", "Ssleeping", "Ddisk-sleep", "Tstopped", "ttracing-stop", "Zzombie",
		"Xdead", "xdead", "Kwake-kill", "Wwaking", "Iidle", "Pparked",
	};

	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		if (names[i][0] == state)
			return names[i] + 1;
	return "unknown";
}

static void print_entry(const struct entry *entry)
{
	double second = (double)sysconf(_SC_CLK_TCK);
	struct timespec now;
	long age;

	clock_gettime(CLOCK_BOOTTIME, &now);
	age = (long)now.tv_sec - (long)((double)entry->start / second);
	printf("{\"agent\":%s,\"pid\":", places[entry->place].words.items[0]);
	printf(entry->told ? "%d" : "null", entry->told);
	fputs(",\"name\":", stdout);
	print_text(entry->name, entry->name_length, NAME_MAX_BYTES);
	printf(",\"state\":\"%s\",\"cpu\":%.2f,\"memory\":", name_of_state(entry->state),
	       (double)entry->ticks / second);
	printf(entry->pss < 0 ? "null" : "%lld", entry->pss);
	printf(",\"age\":%ld,\"command\":", age < 0 ? 0 : age);
	print_text(entry->command, entry->command_length, COMMAND_MAX);
	fputs("}\n", stdout);
}

/* Whether a process has been the same one all the time, and in its place. */
static bool is_still(const struct entry *entry)
{
	const struct place *place = &places[entry->place];

	return syscall(SYS_pidfd_send_signal, entry->fd, 0, NULL, 0) == 0 && place->pids &&
	       bsearch(&entry->pid, place->pids, place->count, sizeof entry->pid, compare);
}

static void find_all(size_t most, bool lists)
{
	for (size_t i = 0; i < place_count; i++) {
		struct place *place = &places[i];

		list_place(place);
		for (size_t p = 0; p < place->count && entry_count < most; p++) {
			struct entry *entry = &looked->entries[entry_count];

			entry->pid = place->pids[p];
			entry->place = i;
			entry->there = look(entry, lists);
			entry_count++;
		}
	}
}

static void print_list(void)
{
	for (size_t i = 0; i < entry_count; i++)
		if (looked->entries[i].there && is_still(&looked->entries[i]))
			print_entry(&looked->entries[i]);
}

/*
 * The bytes of files in a cell's memory (view.c). /dev is in it in every cell; and as a mount it
 * is found without the lock of a directory.
 */
static unsigned long long files_in_memory(const char *keeper)
{
	char path[64];
	struct statfs found;
	int root, dev;
	bool had;

	snprintf(path, sizeof path, "/proc/%s/root", keeper);
	root = atoi(keeper) ? open(path, O_PATH | O_CLOEXEC) : -1;
	dev = root < 0 ? -1 : openat(root, "dev", O_PATH | O_NOFOLLOW | O_CLOEXEC);
	had = dev >= 0 && fstatfs(dev, &found) == 0 && found.f_type == TMPFS_MAGIC;
	close_quietly(dev);
	close_quietly(root);
	return had ? (unsigned long long)found.f_bsize * (found.f_blocks - found.f_bfree) : 0;
}

static void print_memory(void)
{
	size_t next = 0;

	for (size_t i = 0; i < place_count; i++) {
		long long used = 0;

		for (; next < entry_count && looked->entries[next].place == i; next++) {
			struct entry *entry = &looked->entries[next];

			if (entry->there && is_still(entry))
				used += entry->pss < 0 ? entry->resident : entry->pss;
		}
		printf("%lld %zu %llu\n", used, places[i].count,
		       files_in_memory(places[i].words.items[1]));
	}
}

int main(int argc, char **argv)
{
	struct orders orders = orders_of_arguments(argc, argv);
	int orders_fd = take_descriptor(&orders);
	struct rlimit files;
	long long deadline;
	size_t most;
	bool lists;
	pid_t asker = 0;

	if (!all_taken(&orders)) {
		fputs("usage: census ORDERS_FD\n", stderr);
		return 2;
	}
	stand_beside("ctx-census");
	orders = read_orders(orders_fd);
	lists = take_if(&orders, "list");
	if (!lists && !take_if(&orders, "memory"))
		die("damaged orders");
	deadline = now_ms() + (long long)take_number(&orders, 1 << 30);
	most = (size_t)take_number(&orders, MOST_MAX);
	if (lists)
		asker = (pid_t)take_number(&orders, PIDS_MAX);
	spared = take_numbers(&orders, PIDS_MAX, &spared_count);
	struct list *words = take_lists(&orders, &place_count);

	if (!all_taken(&orders))
		die("damaged orders");
	if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
		files.rlim_cur = files.rlim_max;
		setrlimit(RLIMIT_NOFILE, &files);
	}
	places = calloc(place_count + 1, sizeof *places);
	looked = mmap(NULL, sizeof *looked + most * sizeof *looked->entries, PROT_READ | PROT_WRITE,
		      MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (!places || looked == MAP_FAILED)
		die("%m");
	for (size_t i = 0; i < place_count; i++) {
		if (words[i].count < 2)
			die("damaged orders");
		places[i].words = words[i];
	}
	know_asker(asker);
	find_all(most, lists);
	look_into_all(lists, deadline);
	for (size_t i = 0; i < place_count; i++)
		list_place(&places[i]);
	if (lists)
		print_list();
	else
		print_memory();
	return 0;
}
