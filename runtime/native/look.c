/*
 * look: resolves paths with the rights of the user who wrote them.
 *
 *     look ORDERS_FD VIEW
 *
 * A path that an agent or an operator wrote is resolved once, here, with the rights
 * and in the view of its writer. VIEW is "-" for the host's view, or a pidfd of a
 * cell's keeper. This program enters, runs and loads nothing of that cell; it walks
 * the cell's tree from the root.
 *
 * Agents share their owner's uid and may have put a link anywhere that this uid may
 * write. So the program opens each component separately. It follows a link only if
 * uid 0 owns it, and resolves the text of the link by the same rules. Only the
 * host's root can make such a link: whichever view it walks, this program is in the
 * user namespace of the host and sees the owners there. It never follows links of
 * procfs, which lead to where some process is.
 *
 * In the daemon's own directories are the durable trees, each at TREES/shared/NAME or
 * TREES/home/UID in every view. Whether an agent may be given one is for the daemon to decide.
 *
 * ORDERS_FD holds orders (orders.h): uid, gid and groups ("=" leaves all three unchanged);
 * the daemon's own directories, a list; TREES; the paths, a list, absolute and plain. The program
 * prints five strings for each path, each with a NUL at its end. These are not
 * orders: it writes each when it is known, and the reader knows their number.
 *
 *     ERROR   an errno, 0 if the object was found
 *     WHY     link: PATH is a link of another user than uid 0, with the text TEXT;
 *             kernel: PATH is in procfs or cgroupfs; daemon: PATH is in one of the
 *             daemon's own directories; else "-"
 *     ID      DEVICE:INODE of the object found, else "-"
 *     PATH    the path without links; if refused, up to the refused component
 *     TEXT    the text of a link, else empty
 */
#define _GNU_SOURCE
#include <limits.h>
#include <sys/vfs.h>

#include "common.h"
#include "orders.h"

#define LINKS_MAX 40	/* the kernel's limit (path_resolution(7)) */
#define PLAIN (RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH)

struct object {
	dev_t device;
	ino_t inode;
};

struct answer {
	int error;
	const char *why;
	struct stat st;
	char path[2 * PATH_MAX];
	char text[PATH_MAX];
};

static int root = -1;
static const char *trees;
/* how the way to a tree is resolved, and what is in it */
static uint64_t to_tree = PLAIN;
static struct list forbidden;
static struct object *forbidden_objects;

static void take_rights(const struct ids *ids)
{
	if (forbid_new_privileges() < 0)
		die("no_new_privs: %m");
	if (ids->same_groups)
		return;
	if (clear_capabilities_with_uid() < 0 || become_groups(ids) < 0 || become_user(ids) < 0)
		die("the creator's identity: %m");
}

/* Objects instead of names, because names differ between views. */
static void note_forbidden(struct list paths)
{
	forbidden = paths;
	forbidden_objects = calloc(paths.count + 1, sizeof *forbidden_objects);
	if (!forbidden_objects)
		die("the daemon's own directories: %m");
	for (size_t i = 0; i < paths.count; i++) {
		struct stat st;

		if (stat(paths.items[i], &st) == 0)
			forbidden_objects[i] = (struct object){st.st_dev, st.st_ino};
	}
}

/* Whether a path is in the directory of all trees, or that directory. */
static bool is_in_trees(const char *path)
{
	return is_inside(path, trees);
}

/* Whether a path is in a durable tree that can be given to agents. */
static bool is_in_tree(const char *path)
{
	const char *rest = path + strlen(trees);

	return is_in_trees(path) && (!strncmp(rest, "/shared/", 8) || !strncmp(rest, "/home/", 6));
}

static bool is_daemons(const char *path, const struct stat *st)
{
	for (size_t i = 0; i < forbidden.count; i++) {
		if (is_inside(path, forbidden.items[i]))
			return true;
		if (forbidden_objects[i].inode && st->st_dev == forbidden_objects[i].device &&
		    st->st_ino == forbidden_objects[i].inode)
			return true;
	}
	return false;
}

/* Opens a path below the root that must not contain links. */
static int open_plain(const char *path)
{
	char top[2 * PATH_MAX];
	size_t length;
	int fd, found;

	if (!is_in_trees(path))
		return open_path(root, *path ? path + 1 : ".", O_PATH | O_NOFOLLOW, PLAIN);
	length = strlen(trees);
	for (int i = 0; i < 2 && path[length]; i++)
		length += 1 + strcspn(path + length + 1, "/");
	snprintf(top, sizeof top, "%.*s", (int)length, path);
	fd = open_path(root, top + 1, O_PATH, to_tree);
	if (fd < 0 || !path[length])
		return fd;
	found = open_path(fd, path + length + 1, O_PATH | O_NOFOLLOW, PLAIN);
	close_quietly(fd);
	return found;
}

static int refuse(struct answer *answer, int error, const char *why)
{
	answer->error = error;
	answer->why = why;
	return -1;
}

/* Takes one component of the rest; returns false at the end. */
static bool take_component(char *left, char *name)
{
	size_t skipped = strspn(left, "/"), n = strcspn(left + skipped, "/");

	memcpy(name, left + skipped, n);
	name[n] = 0;
	memmove(left, left + skipped + n, strlen(left + skipped + n) + 1);
	return n > 0;
}

/* Puts the text of a link before the rest; returns false if the result is too long. */
static bool follow(char *left, size_t size, const char *text)
{
	size_t n = strlen(text), rest = strlen(left);

	if (n + 1 + rest + 1 > size)
		return false;
	memmove(left + n + 1, left, rest + 1);
	memcpy(left, text, n);
	left[n] = '/';
	return true;
}

static bool is_of_kernel(int fd)
{
	struct statfs fs;

	return fstatfs(fd, &fs) == 0 && is_kernels(fs.f_type);
}

/* The current place of a walk. */
struct place {
	int here, next;
};

static void leave(struct place *place)
{
	close_quietly(place->here);
	close_quietly(place->next);
	place->here = place->next = -1;
}

/* Moves to an opened object; returns false with errno on failure. */
static bool go(struct place *place, int fd, struct stat *st)
{
	leave(place);
	place->here = fd;
	return fd >= 0 && fstat(fd, st) == 0;
}

/* Walks to the end of a path; returns 0, or -1 with the reason in the answer. */
static int walk(const char *source, struct answer *answer, struct place *place)
{
	char left[2 * PATH_MAX], name[2 * PATH_MAX];
	char *path = answer->path;
	dev_t device = 0;
	int links = 0;

	if (strlen(source) >= PATH_MAX)
		return refuse(answer, ENAMETOOLONG, "-");
	strcpy(left, source);
	if (!go(place, dup(root), &answer->st))
		return refuse(answer, errno, "-");
	while (take_component(left, name)) {
		size_t length = strlen(path);
		struct stat st;
		ssize_t n;

		if (!strcmp(name, "."))
			continue;
		if (!strcmp(name, "..")) {
			/* not by the kernel: it would not stop at the root of the cell */
			char *slash = strrchr(path, '/');

			if (slash)
				*slash = 0;
			if (!go(place, open_plain(path), &answer->st))
				return refuse(answer, errno, "-");
			device = 0;
			continue;
		}
		if (length + 1 + strlen(name) >= PATH_MAX)
			return refuse(answer, ENAMETOOLONG, "-");
		path[length] = '/';
		strcpy(path + length + 1, name);
		if (!S_ISDIR(answer->st.st_mode))
			return refuse(answer, ENOTDIR, "-");
		place->next = is_in_trees(path) ? open_plain(path)
						: openat(place->here, name,
							 O_PATH | O_NOFOLLOW | O_CLOEXEC);
		if (place->next < 0 || fstat(place->next, &st) < 0)
			return refuse(answer, errno, "-");
		/* a device changes where another filesystem begins, except for binds of the same */
		if ((st.st_dev != device || S_ISLNK(st.st_mode)) && is_of_kernel(place->next))
			return refuse(answer, EACCES, "kernel");
		device = st.st_dev;
		if (S_ISLNK(st.st_mode)) {
			n = readlinkat(place->next, "", answer->text, sizeof answer->text - 1);
			if (n < 0)
				return refuse(answer, errno, "-");
			answer->text[n] = 0;
			if (st.st_uid != 0)
				return refuse(answer, EACCES, "link");
			if (++links > LINKS_MAX)
				return refuse(answer, ELOOP, "-");
			if (!follow(left, sizeof left, answer->text))
				return refuse(answer, ENAMETOOLONG, "-");
			if (answer->text[0] == '/') {
				path[0] = 0;
				if (!go(place, dup(root), &answer->st))
					return refuse(answer, errno, "-");
			} else {
				path[length] = 0;
				close(place->next);
				place->next = -1;
			}
			answer->text[0] = 0;
			continue;
		}
		/* through them lies the way to the trees */
		if (!is_in_trees(path) && !is_inside(trees, path) && is_daemons(path, &st))
			return refuse(answer, EACCES, "daemon");
		close(place->here);
		place->here = place->next;
		place->next = -1;
		answer->st = st;
	}
	if (!is_in_tree(path) && is_daemons(path, &answer->st))
		return refuse(answer, EACCES, "daemon");
	return 0;
}

static void look(const char *source, struct answer *answer)
{
	struct place place = {-1, -1};
	struct stat st;
	int fd, walked;

	answer->error = 0;
	answer->why = "-";
	answer->path[0] = answer->text[0] = 0;
	walked = walk(source, answer, &place);
	leave(&place);
	if (walked < 0)
		return;
	/* A directory that was moved meanwhile is not at its path any more. */
	fd = open_plain(answer->path);
	if (fd < 0 || fstat(fd, &st) < 0 || st.st_dev != answer->st.st_dev ||
	    st.st_ino != answer->st.st_ino)
		refuse(answer, EAGAIN, "-");
	close_quietly(fd);
}

static void print(const struct answer *answer)
{
	printf("%d%c%s%c", answer->error, 0, answer->why, 0);
	if (answer->error)
		printf("-%c", 0);
	else
		printf("%llu:%llu%c", (unsigned long long)answer->st.st_dev,
			(unsigned long long)answer->st.st_ino, 0);
	printf("%s%c%s%c", *answer->path ? answer->path : "/", 0, answer->text, 0);
}

int main(int argc, char **argv)
{
	static struct answer answer;
	struct orders arguments = orders_of_arguments(argc, argv), orders;
	int spec = take_descriptor(&arguments);
	int keeper = take_descriptor_or_none(&arguments);
	struct list own, paths;
	struct ids ids;

	if (!all_taken(&arguments))
		die("usage: look ORDERS_FD VIEW");
	orders = read_orders(spec);
	ids = take_ids(&orders);
	own = take_list(&orders);
	trees = take_word(&orders);
	if (keeper < 0)	/* links there are the daemon's, and a cell has none */
		to_tree = 0;
	paths = take_list(&orders);
	if (!all_taken(&orders))
		die("the runtime's paths are damaged");
	root = keeper < 0 ? open("/", O_PATH | O_DIRECTORY | O_CLOEXEC)
			  : open_of_process(keeper, "root", O_PATH | O_DIRECTORY);
	if (root < 0)
		die("%s: %m", keeper < 0 ? "/" : "the parent's cell");
	note_forbidden(own);
	take_rights(&ids);
	for (size_t i = 0; i < paths.count; i++) {
		look(paths.items[i], &answer);
		print(&answer);
	}
	return fflush(stdout) == 0 ? 0 : EXIT_FAILED;
}
