/* What an agent that may make others tries by them. */
#include "hostile.h"

#include <ctype.h>
#include <dirent.h>
#include <sys/wait.h>

static void file_of(char *path, size_t size, const char *agent, const char *file)
{
	snprintf(path, size, "%s/agent/%s.d/%s", getenv("CTX_ROOT"), agent, file);
}

static void tell_file(const char *path)
{
	char text[1000];
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text);

	if (fd >= 0)
		close(fd);
	if (n > 0)
		tell("%.*s", (int)(n - (text[n - 1] == '\n')), text);
}

/* Whether a text is written to all of an agent's file, telling which was refused. */
static bool set(const char *agent, const char *file, const char *text)
{
	char path[4096], line[4096];

	file_of(path, sizeof path, agent, file);
	snprintf(line, sizeof line, "%s\n", text);
	if (put(path, O_TRUNC, line) == 0)
		return true;
	tell_step(file, -1);
	return false;
}

static void wait_for(const char *agent)
{
	char path[4096], byte;
	int fd;

	file_of(path, sizeof path, agent, "wait");
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd >= 0 && read(fd, &byte, 1) >= 0)
		close(fd);
}

/* NAME FILE=TEXT...: a child, how it ended and what it printed; or what was refused */
static void do_child(int argc, char **argv)
{
	char path[4096];

	file_of(path, sizeof path, argv[0], "");
	if (mkdir(path, 0777) < 0) {
		tell_step("mkdir", -1);
		return;
	}
	for (int i = 1; i < argc; i++) {
		char *text = strchr(argv[i], '=');

		*text++ = 0;
		if (!set(argv[0], argv[i], text)) {
			rmdir(path);
			return;
		}
	}
	if (!set(argv[0], "ctl", "start"))
		return;
	wait_for(argv[0]);
	file_of(path, sizeof path, argv[0], "reason");
	tell_file(path);
	tell(" ");
	file_of(path, sizeof path, argv[0], "out");
	tell_file(path);
}

/* COUNT TEXT NAME FILE=TEXT...: so many children; how many of them printed the text */
static void do_children(int argc, char **argv)
{
	int count = atoi(argv[0]), found = 0, ended = 0;
	char path[4096], name[64], text[1000];

	for (int i = 0; i < count; i++) {
		snprintf(name, sizeof name, "%.50s%d", argv[2], i);
		file_of(path, sizeof path, name, "");
		if (mkdir(path, 0777) < 0) {
			tell_step("mkdir", -1);
			return;
		}
		for (int k = 3; k < argc; k++) {
			char *value = strchr(argv[k], '=');

			*value = 0;
			file_of(path, sizeof path, name, argv[k]);
			/* what a path leads to may be another thing the next time */
			for (int tries = 0; put(path, O_TRUNC, value + 1) < 0; tries++)
				if (value[1] != '/' || tries == 200) {
					tell_step(argv[k], -1);
					return;
				}
			*value = '=';
		}
		if (!set(name, "ctl", "start"))
			return;
	}
	for (int i = 0; i < count; i++) {
		ssize_t n;
		int fd;

		snprintf(name, sizeof name, "%.50s%d", argv[2], i);
		wait_for(name);
		ended++;
		file_of(path, sizeof path, name, "out");
		fd = open(path, O_RDONLY | O_CLOEXEC);
		n = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
		close(fd);
		text[n > 0 ? n : 0] = 0;
		found += strstr(text, argv[1]) != NULL;
	}
	tell("ended=%d found=%d", ended, found);
}

/* NAME SIGNAL: every process of that name that can be seen */
static void do_kill_all(int argc, char **argv)
{
	DIR *proc = opendir("/proc");
	struct dirent *entry;
	int found = 0;

	(void)argc;
	while (proc && (entry = readdir(proc))) {
		char path[300], name[64] = "";
		FILE *file;

		if (!isdigit((unsigned char)entry->d_name[0]))
			continue;
		snprintf(path, sizeof path, "/proc/%s/comm", entry->d_name);
		file = fopen(path, "r");
		if (file && fgets(name, sizeof name, file))
			name[strcspn(name, "\n")] = 0;
		if (file)
			fclose(file);
		if (!strcmp(name, argv[0]) && atol(entry->d_name) != 1) {
			found++;
			tell_step("kill", kill((pid_t)atol(entry->d_name), atoi(argv[1])));
		}
	}
	if (!found)
		tell("none");
}

/* PATH WAY ARGUMENT...: once there is such a file */
static void do_after(int argc, char **argv)
{
	struct stat st;

	while (stat(argv[0], &st) < 0)
		usleep(5000);
	run(argc - 1, argv + 1);
}

/* PATH WAY ARGUMENT...: once SIGTERM came, saying so in a file before and after */
static volatile sig_atomic_t termed;

static void on_term(int number)
{
	(void)number;
	termed = 1;
}

static void do_dying(int argc, char **argv)
{
	struct sigaction action = {.sa_handler = on_term};

	sigaction(SIGTERM, &action, NULL);
	put(argv[0], O_CREAT, "ready\n");
	while (!termed)
		usleep(5000);
	run(argc - 1, argv + 1);
}

const struct way AGENT_WAYS[] = {
	{"child", 1, do_child}, {"children", 4, do_children}, {"kill-all", 2, do_kill_all},
	{"after", 2, do_after}, {"dying", 2, do_dying}, {NULL, 0, NULL},
};
