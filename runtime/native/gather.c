/*
 * gather: takes an agent's commits out of a repository that the agent may have forged.
 *
 *     gather REPOSITORY REF OBJECTS
 *
 * Prints the commit id of REF in the repository. Links each file of
 * REPOSITORY/objects with the name of a loose object, a pack or the index of a pack
 * into the directory OBJECTS, or copies it if it cannot be linked. Takes nothing
 * else: no alternates, no commit graph, nothing that tells git to read elsewhere.
 * Follows no symbolic link, crosses no mount, opens only regular files, and reads
 * no more of them than needed. So the agent may continue to write meanwhile. Does
 * not check the contents of the files.
 *
 * Exits 125 with a reason on failure, 3 if there is no such ref. Runs with the ids
 * and in the view of the agent's parent.
 */
#define _GNU_SOURCE
#include <dirent.h>

#include "common.h"

#define REF_MAX 256
#define PACKED_REFS_MAX (16 << 20)

/* returns -1 if the path does not exist, or crosses a link or a mount */
static int open_below(int directory, const char *path, int flags)
{
	return open_path(directory, path, flags | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY,
			 RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV);
}

static bool is_file(int directory, const char *name)
{
	struct stat found;

	return fstatat(directory, name, &found, AT_SYMLINK_NOFOLLOW) == 0 &&
	       S_ISREG(found.st_mode);
}

/* Reads a whole regular file and adds a NUL; NULL if it is not one, or too long. */
static char *read_file(int directory, const char *path, size_t max)
{
	int fd = open_below(directory, path, O_RDONLY);
	struct stat found;
	char *text = NULL;
	size_t length;

	if (fd < 0)
		return NULL;
	if (fstat(fd, &found) == 0 && S_ISREG(found.st_mode) && found.st_size <= (off_t)max)
		text = read_all(fd, max, &length);
	close(fd);
	return text;
}

static size_t hex_length(const char *text)
{
	return strspn(text, "0123456789abcdef");
}

/* The length of the object id at the beginning of a line, 0 for none. */
static size_t id_length(const char *line)
{
	size_t length = hex_length(line);

	return length == 40 || length == 64 ? length : 0;
}

static bool print_packed(int repository, const char *ref)
{
	char *text = read_file(repository, "packed-refs", PACKED_REFS_MAX);
	char *state = NULL;

	if (!text)
		return false;
	for (char *line = strtok_r(text, "\n", &state); line; line = strtok_r(NULL, "\n", &state)) {
		size_t length = id_length(line);

		if (length && line[length] == ' ' && !strcmp(line + length + 1, ref)) {
			printf("%.*s\n", (int)length, line);
			return true;
		}
	}
	return false;
}

static bool print_commit(int repository, const char *ref)
{
	char *text = read_file(repository, ref, REF_MAX);
	size_t length = text ? id_length(text) : 0;

	if (length && (!text[length] || !strcmp(text + length, "\n"))) {
		printf("%.*s\n", (int)length, text);
		return true;
	}
	return faccessat(repository, ref, F_OK, AT_SYMLINK_NOFOLLOW) < 0 &&
	       print_packed(repository, ref);
}

static void copy_file(int from, const char *name, int to)
{
	int in = open_below(from, name, O_RDONLY), out;
	char buffer[1 << 16];
	struct stat found;
	ssize_t n;

	if (in < 0)
		return;
	if (fstat(in, &found) < 0 || !S_ISREG(found.st_mode)) {
		close(in);
		return;
	}
	out = openat(to, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (out < 0)
		die("%s: %m", name);
	/* a file that grows while it is read is not an object */
	for (off_t left = found.st_size; left > 0 && (n = read(in, buffer, sizeof buffer)) > 0;
	     left -= n)
		if (write(out, buffer, (size_t)n) != n)
			die("%s: %m", name);
	close(out);
	close(in);
}

static void take(int from, const char *name, int to)
{
	if (!is_file(from, name))
		return;
	if (linkat(from, name, to, name, 0) < 0) {
		if (errno != ENOENT && errno != EEXIST)
			copy_file(from, name, to);
		return;
	}
	/* it may have been replaced in between */
	if (!is_file(to, name))
		unlinkat(to, name, 0);
}

static bool is_object_name(const char *name)
{
	size_t length = strlen(name);

	return (length == 38 || length == 62) && hex_length(name) == length;
}

static bool is_pack_name(const char *name)
{
	size_t length;

	if (strncmp(name, "pack-", 5))
		return false;
	length = hex_length(name + 5);
	return (length == 40 || length == 64) &&
	       (!strcmp(name + 5 + length, ".pack") || !strcmp(name + 5 + length, ".idx"));
}

static void take_directory(int objects, const char *name, int to, bool (*wanted)(const char *))
{
	int from = open_below(objects, name, O_RDONLY | O_DIRECTORY), target;
	struct dirent *entry;
	DIR *list;

	if (from < 0)
		return;
	if (mkdirat(to, name, 0700) < 0 && errno != EEXIST)
		die("%s: %m", name);
	target = open_below(to, name, O_RDONLY | O_DIRECTORY);
	list = fdopendir(from);
	if (target < 0 || !list)
		die("%s: %m", name);
	while ((entry = readdir(list)))
		if (wanted(entry->d_name))
			take(from, entry->d_name, target);
	closedir(list);
	close(target);
}

int main(int argc, char **argv)
{
	int repository, objects, to;
	char name[3];

	if (argc != 4) {
		fputs("usage: gather REPOSITORY REF OBJECTS\n", stderr);
		return 2;
	}
	repository = open(argv[1], O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (repository < 0)
		die("%s: %m", argv[1]);
	to = open(argv[3], O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (to < 0)
		die("%s: %m", argv[3]);
	/* the ref first: the objects that it refers to were written before it */
	if (!print_commit(repository, argv[2]))
		return 3;
	objects = open_below(repository, "objects", O_RDONLY | O_DIRECTORY);
	if (objects < 0)
		return 0;
	for (int number = 0; number < 256; number++) {
		snprintf(name, sizeof name, "%02x", number);
		take_directory(objects, name, to, is_object_name);
	}
	take_directory(objects, "pack", to, is_pack_name);
	return 0;
}
