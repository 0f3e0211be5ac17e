/*
 * throng: many threads that do one thing without pause, for ever.
 *
 *     throng MODE THREADS
 *
 * For an agent: CTX_ROOT is where the filesystem is, CTX_SELF its own directory. When as many
 * rounds are over as there are threads, one line is printed: "attacks", and what came of the
 * requests until then: errnos' names, or "ok".
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/un.h>
#include <unistd.h>

#define CHILDREN 4
#define COUNT(array) (sizeof(array) / sizeof *(array))

static const char *root, *self, *me;
static atomic_bool met[256];
static atomic_long rounds;

/* Notes what came of a request; true if it failed. */
static int failed(long result)
{
	atomic_store(&met[result < 0 ? errno & 255 : 0], 1);
	return result < 0;
}

static const char *path_of(char *path, const char *format, ...)
	__attribute__((format(printf, 2, 3)));

static const char *path_of(char *path, const char *format, ...)
{
	va_list rest;

	va_start(rest, format);
	vsnprintf(path, 512, format, rest);
	va_end(rest);
	return path;
}

static const char *const CONTROLS[] = {
	"status", "exec", "limits", "policy", "policy.effective", "mount.effective", "meta.json",
	"usage", "queue", "error", "label", "pid", "session/context/pack.md",
};
#define CONTROL(i) CONTROLS[(i) % COUNT(CONTROLS)]

static int opened(const char *path, int flags)
{
	int fd = open(path, flags | O_CLOEXEC, 0644);

	failed(fd);
	return fd;
}

static int connected(void)
{
	struct sockaddr_un to = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	snprintf(to.sun_path, sizeof to.sun_path, "%s/agent/%s.sock", root, me);
	if (failed(connect(fd, (struct sockaddr *)&to, sizeof to))) {
		close(fd);
		return -1;
	}
	return fd;
}

static void put(const char *path, int flags, const char *text, size_t size)
{
	int fd = opened(path, O_WRONLY | flags);

	if (fd < 0)
		return;
	failed(write(fd, text, size));
	failed(close(fd));
}

static void read_controls(long own, unsigned long i)
{
	char path[512], text[8192];
	int fd;

	if ((own + i) % 16)
		path_of(path, "%s/%s", self, CONTROL(own + i));
	else
		path_of(path, "%s/%s", root, i & 16 ? "status" : "metrics");
	fd = opened(path, O_RDONLY);
	if (fd < 0)
		return;
	failed(read(fd, text, sizeof text));
	close(fd);
}

/* Of open files, without a look-up; asked for anew although the kernel knows them. */
static void ask_attributes(long own, unsigned long i)
{
	static _Thread_local int fd = -1;
	char path[512];
	struct statx found;

	if (fd < 0)
		fd = opened(own % 2 ? path_of(path, "%s/%s", self, CONTROL(own)) : self, O_RDONLY);
	failed(statx(fd, "", AT_EMPTY_PATH | AT_STATX_FORCE_SYNC, STATX_BASIC_STATS, &found));
	(void)i;
}

static void look_up(long own, unsigned long i)
{
	char path[512];
	struct stat st;

	failed(stat(path_of(path, "%s/agent/none-%ld-%lu.d", root, own, i), &st));
	failed(stat(path_of(path, "%s/none-%ld-%lu", self, own, i), &st));
	failed(stat(path_of(path, "%s/%s", self, CONTROL(i)), &st));
	failed(statx(AT_FDCWD, path, AT_STATX_FORCE_SYNC, STATX_ALL, (struct statx[1]){}));
}

static void list(long own, unsigned long i)
{
	static const char *const below[] = {
		"agent", "home", "", "shared", "tool", "agent/%s.d", "agent/%s.d/session",
		"agent/%s.d/artifact", "agent/%s.d/child", "agent/%s.d/task",
	};
	char path[512], named[512];
	struct statfs told;
	DIR *directory;

	failed(statfs(path_of(path, "%s/%s", self, (own + i) % 2 ? "" : "status"), &told));
	snprintf(named, sizeof named, below[(own + i) % COUNT(below)], me);
	directory = opendir(path_of(path, "%s/%s", root, named));
	if (failed(directory ? 0 : -1))
		return;
	while (readdir(directory))
		;
	closedir(directory);
}

static void change_names(long own, unsigned long i)
{
	char from[512], to[512];

	path_of(from, "%s/%s", self, CONTROL(own));
	path_of(to, "%s/%s", self, CONTROL(own + 1 + i % 3));
	failed(rename(from, to));
	failed(renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_EXCHANGE));
	failed(link(from, path_of(to, "%s/new-%ld", self, own)));
	failed(unlink(from));
	failed(symlink("/", path_of(to, "%s/agent/link-%ld.d", root, own)));
	failed(mknod(path_of(to, "%s/session/node-%ld", self, own), S_IFIFO | 0644, 0));
	failed(rmdir(path_of(to, "%s/session", self)));
	failed(chmod(from, 0777));
	failed(chown(from, 0, 0));
	failed(truncate(from, 1 << 20));
	failed(opened(path_of(to, "%s/made-%ld", self, own), O_WRONLY | O_CREAT));
}

static const char *child_of(char *path, long own, const char *file)
{
	return path_of(path, "%s/agent/%s-%ld.d%s%s", root, me, own % CHILDREN, *file ? "/" : "",
		       file);
}

/* Several threads have one; nothing of what it does is waited for. */
static void lead(long own, unsigned long i)
{
	static const char *const verbs[] = {"start\n", "kill\n", "reset\n", "stop\n", "pause\n"};
	char path[512];

	if (!i) {
		failed(mkdir(child_of(path, own, ""), 0755));
		put(child_of(path, own, "exec"), 0, "sleep 1000\n", 11);
	}
	put(child_of(path, own, "ctl"), 0, verbs[i % COUNT(verbs)], strlen(verbs[i % COUNT(verbs)]));
}

static void make(long own, unsigned long i)
{
	char path[512];

	(void)i;
	failed(mkdir(child_of(path, own, ""), 0755));
	failed(rmdir(path));
	failed(mkdir(path_of(path, "%s/work/w%ld", self, own), 0755));
	failed(rmdir(path));
}

#define MESSAGE "{\"role\":\"user\",\"content\":\"more\"}\n"

/* Two in three hear of whatever is told of it, the others have it told. */
static void follow(long own, unsigned long i)
{
	static const char resume[] = "{\"op\":\"resume\"}\n";
	static _Thread_local struct pollfd heard[8];
	char path[512], text[65536];

	if (own % 3 == 2) {
		put(path_of(path, "%s/session/messages.jsonl", self), O_APPEND, MESSAGE,
		    sizeof MESSAGE - 1);
		return;
	}
	for (size_t each = 0; !i && each < COUNT(heard); each++) {
		int fd;

		if (each < 5) {
			fd = connected();
			failed(write(fd, resume, sizeof resume - 1));
			heard[each] = (struct pollfd){.fd = fd, .events = POLLIN};
		} else if (each < 7) {
			fd = opened(path_of(path, "%s/status", self), O_RDONLY);
			heard[each] = (struct pollfd){.fd = fd, .events = POLLPRI};
		} else {
			fd = opened(path_of(path, "%s/wait", self), O_RDONLY | O_NONBLOCK);
			heard[each] = (struct pollfd){.fd = fd, .events = POLLIN};
		}
	}
	poll(heard, COUNT(heard), 100);
	for (size_t each = 0; each < 5; each++)
		(void)!recv(heard[each].fd, text, sizeof text, MSG_DONTWAIT);
}

/* One in two keeps what it has begun to say, the others hang up at once. */
static void connect_and_hang(long own, unsigned long i)
{
	static const char half[] = "{\"op\":\"send\",\"id\":\"1\",\"input\":\"";
	static _Thread_local int kept[4] = {-1, -1, -1, -1};
	int fd;

	if (own % 2 && kept[i % COUNT(kept)] >= 0) {
		(void)!send(kept[i % COUNT(kept)], "x", 1, MSG_NOSIGNAL);
		close(kept[(i + 1) % COUNT(kept)]);
		kept[(i + 1) % COUNT(kept)] = -1;
		return;
	}
	fd = connected();
	if (fd >= 0)
		(void)!send(fd, half, i % 3 ? sizeof half - 1 : 0, MSG_NOSIGNAL);
	if (own % 2)
		kept[i % COUNT(kept)] = fd;
	else
		close(fd);
}

static void append(long own, unsigned long i)
{
	char path[512];

	(void)i;
	if (own % 3 == 0)
		put(path_of(path, "%s/session/messages.jsonl", self), O_APPEND, MESSAGE,
		    sizeof MESSAGE - 1);
	else if (own % 3 == 1)
		put(path_of(path, "%s/result.md", self), O_APPEND, "x\n", 2);
	else
		failed(write(STDERR_FILENO, "x\n", 2));
}

/* What kernels do with files besides reading and writing. */
static void map(long own, unsigned long i)
{
	char path[512], other[512], *aligned;
	int files[2], through[2], way = (own + (int)i) % 6;
	void *there;

	path_of(path, "%s/artifact/file-%ld", self, own % 16);
	files[0] = opened(i % 2 ? path : path_of(other, "%s/%s", self, CONTROL(own)), O_RDONLY);
	files[1] = opened(path, O_RDWR | O_CREAT);
	if (way == 0) {
		there = mmap(NULL, 1 << 16, PROT_READ, MAP_SHARED, files[0], 0);
		if (!failed(there == MAP_FAILED ? -1 : 0)) {
			failed(madvise(there, 1 << 16, MADV_POPULATE_READ));
			munmap(there, 1 << 16);
		}
		there = mmap(NULL, 1 << 16, PROT_READ | PROT_WRITE, MAP_SHARED, files[1], 0);
		if (!failed(there == MAP_FAILED ? -1 : 0)) {
			failed(madvise(there, 1 << 16, MADV_POPULATE_WRITE));
			failed(msync(there, 1 << 16, MS_SYNC));
			munmap(there, 1 << 16);
		}
	} else if (way == 1) {
		failed(posix_fadvise(files[0], 0, 0, POSIX_FADV_DONTNEED));
		failed(readahead(files[0], 0, 1 << 20));
	} else if (way == 2 && !pipe2(through, O_CLOEXEC | O_NONBLOCK)) {
		failed(splice(files[0], NULL, through[1], NULL, 65536, SPLICE_F_NONBLOCK));
		failed(splice(through[0], NULL, files[1], NULL, 65536, SPLICE_F_NONBLOCK));
		close(through[0]);
		close(through[1]);
	} else if (way == 3) {
		failed(fallocate(files[1], 0, 0, 1 << 20));
		failed(fallocate(files[1], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096));
		failed(ftruncate(files[1], 1 << 16));
	} else if (way == 4) {
		failed(copy_file_range(files[0], NULL, files[1], NULL, 1 << 16, 0));
		failed(sendfile(files[1], files[0], (off_t[1]){0}, 1 << 16));
		failed(fdatasync(files[1]));
	} else if (way == 5 && !posix_memalign((void **)&aligned, 4096, 1 << 16)) {
		close(files[0]);
		files[0] = opened(path, O_RDWR | O_DIRECT);
		memset(aligned, 'x', 1 << 16);
		failed(pwrite(files[0], aligned, 1 << 16, 0));
		failed(pread(files[0], aligned, 1 << 16, 0));
		free(aligned);
	}
	close(files[0]);
	close(files[1]);
}

static const struct mode {
	const char *name;
	void (*round)(long own, unsigned long i);
} MODES[] = {
	{"read", read_controls}, {"attributes", ask_attributes}, {"lookup", look_up},
	{"list", list}, {"names", change_names},
	{"lead", lead}, {"make", make}, {"follow", follow}, {"connect", connect_and_hang},
	{"append", append}, {"map", map},
};
static const struct mode *mode;

static void *run(void *own)
{
	for (unsigned long i = 0;; i++) {
		mode->round((long)own, i);
		atomic_fetch_add(&rounds, 1);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	struct rlimit files;
	pthread_attr_t small;
	pthread_t thread;

	for (size_t i = 0; argc == 3 && i < COUNT(MODES); i++)
		if (!strcmp(argv[1], MODES[i].name))
			mode = &MODES[i];
	root = getenv("CTX_ROOT");
	self = getenv("CTX_SELF");
	me = getenv("CTX_AGENT");
	if (!mode || !root || !self || !me)
		return 2;
	getrlimit(RLIMIT_NOFILE, &files);
	files.rlim_cur = files.rlim_max;
	setrlimit(RLIMIT_NOFILE, &files);
	pthread_attr_init(&small);
	pthread_attr_setstacksize(&small, 1 << 18);
	for (long own = 0; own < atoi(argv[2]); own++)
		if (pthread_create(&thread, &small, run, (void *)own))
			return 3;
	while (atomic_load(&rounds) < atoi(argv[2]))
		usleep(1000);
	printf("attacks");
	for (int error = 0; error < 256; error++)
		if (atomic_load(&met[error]))
			printf(" %s", error ? strerrorname_np(error) : "ok");
	puts("");
	fflush(stdout);
	for (;;)
		pause();
}
