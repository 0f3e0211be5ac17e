/*
 * carry: copies files of an agent's workspace, which others may change, to the files of
 * its child's worktree.
 *
 *     carry FROM TO PREFIX [COVERED...] < NAMES
 *
 * Each name is followed by a NUL. Copies the file FROM/NAME to TO/PREFIX NAME, with its
 * permissions and time. Follows no symbolic link, crosses no mount, reads only regular
 * files, and creates files only where there is nothing. Copies nothing that has a
 * component .git, nor what is at or below one of the paths COVERED, through whatever
 * link these lead: the child does not have it in its view.
 *
 * Prints a line for each file that it did not copy, with the reason. Exits 125 with a
 * reason on failure. Runs with the ids and in the view of the agent.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <strings.h>
#include <sys/sendfile.h>

#include "common.h"

#define FILES_MAX 10000
#define BYTES_MAX (256LL << 20)
#define NAMES_MAX (64 << 20)

static const char *const TOO_MUCH = "only 10,000 files and 256 MiB are copied";

static char **covered;
static size_t files;
static off_t bytes;

static int open_below(int directory, const char *name, int flags)
{
	return open_path(directory, name, flags | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY,
			 RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV);
}

/* NULL if there is nothing to say: the file went away meanwhile. */
static const char *why(void)
{
	switch (errno) {
	case ENOENT:
		return NULL;
	case ELOOP:
		return "no link is followed";
	case ENOTDIR:
		return "a link or a file is where a directory should be";
	case EXDEV:
		return "on another mount";
	case EEXIST:
		return "the branch has it";
	default:
		return strerror(errno);
	}
}

/* Copies a file that is open; what has been copied of it is removed if it fails. */
static const char *copy(int in, int to, const char *name)
{
	struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}};
	struct stat found;
	off_t done = 0;
	ssize_t n = 1;
	int out;

	if (fstat(in, &found) < 0 || !S_ISREG(found.st_mode))
		return "not a regular file";
	if (files >= FILES_MAX || found.st_size > BYTES_MAX - bytes)
		return TOO_MUCH;
	out = openat(to, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (out < 0)
		return why();
	/* a file that grows meanwhile is copied as long as it was */
	while (done < found.st_size && n > 0)
		n = sendfile(out, in, &done, (size_t)(found.st_size - done));
	times[1] = found.st_mtim;
	if (n < 0 || fchmod(out, found.st_mode & 0777) < 0 || futimens(out, times) < 0) {
		unlinkat(to, name, 0);
		die("cannot copy %s: %m", name);
	}
	close(out);
	files++;
	bytes += done;
	return NULL;
}

/*
 * Opens the directory NAME of the child's, created if missing, with the permissions of
 * the other one.
 */
static int enter(int from, int to, const char *name)
{
	struct stat found;
	int fd;

	if (fstat(from, &found) < 0)
		return -1;
	fd = open_below(to, name, O_RDONLY | O_DIRECTORY);
	if (fd < 0 && errno == ENOENT && mkdirat(to, name, (found.st_mode & 0777) | 0700) == 0)
		fd = open_below(to, name, O_RDONLY | O_DIRECTORY);
	return fd;
}

static const char *carry_below(int from, int to, char *name)
{
	char *rest = strchr(name, '/');
	const char *reason = NULL;
	int in, below;

	if (rest)
		*rest = 0;
	if (!*name || !strcmp(name, ".") || !strcmp(name, "..") || !strcasecmp(name, ".git"))
		return "not a name of a file that git leaves alone";
	in = open_below(from, name, O_RDONLY | (rest ? O_DIRECTORY : 0));
	if (in < 0)
		return why();
	if (rest) {
		below = enter(in, to, name);
		reason = below < 0 ? why() : carry_below(in, below, rest + 1);
		close_quietly(below);
	} else {
		reason = copy(in, to, name);
	}
	close(in);
	return reason;
}

/* Opens the directory PREFIX of the child's, created if missing. */
static int open_prefix(int from, int to, const char *prefix)
{
	char *rest = strdup(prefix);

	for (char *name = strtok(rest, "/"); name && to >= 0; name = strtok(NULL, "/"))
		to = enter(from, to, name);
	free(rest);
	return to;
}

static const char *carry(const char *root, int from, int to, const char *name)
{
	char path[2 * PATH_MAX], own[PATH_MAX];

	if (strlen(name) >= sizeof own)
		return strerror(ENAMETOOLONG);
	strcpy(own, name);
	snprintf(path, sizeof path, "%s/%s", strcmp(root, "/") ? root : "", name);
	for (char **each = covered; *each; each++)
		if (is_inside(path, *each))
			return "not in the child's view";
	return carry_below(from, to, own);
}

static void say(const char *text)
{
	for (; *text; text++)
		putchar((unsigned char)*text < ' ' || *text == 127 ? '?' : *text);
}

int main(int argc, char **argv)
{
	char *names, *root, *path, *end;
	const char *reason;
	int from, to;
	size_t length;

	if (argc < 4) {
		fputs("usage: carry FROM TO PREFIX [COVERED...]\n", stderr);
		return 2;
	}
	covered = argv + 4;
	for (char **each = covered; *each; each++) {
		path = realpath(*each, NULL);
		if (path)
			*each = path;
	}
	root = realpath(argv[1], NULL);
	from = root ? open(root, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;
	if (from < 0)
		die("%s: %m", argv[1]);
	to = open(argv[2], O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (to < 0)
		die("%s: %m", argv[2]);
	names = read_all(STDIN_FILENO, NAMES_MAX, &length);
	if (!names)
		die("the names of the files to copy: %m: name fewer of them in .ctxfs-copy");
	to = open_prefix(from, to, argv[3]);
	reason = to < 0 ? why() : NULL;
	end = names + length;
	for (char *name = names; name < end; name += strlen(name) + 1) {
		const char *plain = strncmp(name, "./", 2) ? name : name + 2;
		const char *left = reason ? reason : carry(root, from, to, plain);

		if (left) {
			say(argv[3]);
			say(plain);
			printf(" (%s)\n", left);
		}
	}
	return 0;
}
