/*
 * tree: makes and takes away durable trees, shows them, and finds those of an older state.
 *
 *     tree DIRECTORY make PLACES PATH UID GID MODE PLACE
 *     tree DIRECTORY have PLACES PATH UID GID
 *     tree DIRECTORY remove PLACES PATH PLACE KEPT
 *     tree DIRECTORY show PLACES ORDERS_FD
 *     tree STATE adopt CLOSED SPACES
 *
 * Agents can open the root of a tree, and hold its lock in the kernel for as long as they
 * like. So none of this is done by the daemon itself. The directories above a tree are the
 * daemon's, all below DIRECTORY; nobody can put a link or another tree there.
 *
 * Nor can others reach these directories. rmdir(2) sleeps for the lock of a tree with that of the
 * directory above, so a tree that can be removed has one for itself. And rename(2) takes the locks
 * of both its directories before it judges whether it may, unless they are on two mounts. So
 * each tree is bound at a place below PLACES, by a mount of its own. Without root, PLACES leads to
 * DIRECTORY, and a link at the place to the tree.
 *
 * make    makes the tree PATH, and shows it at PLACE; writes "made"
 * have    makes the tree PATH and writes "made", unless it is there; opens it to its owner, and
 *         shows that of a user at the same path
 * remove  hides the tree PATH, and removes it and the directory above; if the tree is not empty,
 *         only renames that directory to KEPT, and writes "kept"
 * show    shows all homes, and the spaces that ORDERS_FD has a list of, and hides all others
 * adopt   moves trees of an older version to their places below "tree", homes of the uids in
 *         the list CLOSED for root alone; writes "UID NAME", a line, of each space of that
 *         version, and of each of the SPACES
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <linux/mount.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include "common.h"
#include "orders.h"

/* of directories above trees: who knows a name may go on to what its modes permit */
#define ABOVE_MODE 0711
#define CLOSED_MODE 0700

static int open_directory(int at, const char *path)
{
	return openat(at, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

static int make_above(int at, const char *name)
{
	if (mkdirat(at, name, ABOVE_MODE) < 0 && errno != EEXIST)
		die("%s: %m", name);
	return open_directory(at, name);
}

/* Opens the directory that a tree is in, and makes it if need be; NAME returns the last part. */
static int open_above(int directory, const char *whole, char **name)
{
	char *path = strdup(whole), *slash;
	int at = path ? dup(directory) : -1;

	while (at >= 0 && (slash = strchr(path, '/'))) {
		int below;

		*slash = 0;
		below = make_above(at, path);
		close_quietly(at);
		at = below;
		path = slash + 1;
	}
	if (at < 0)
		die("%s: %m", whole);
	*name = path;
	return at;
}

static const char *places_path;
static int places;
/* there is no mount */
static bool linked;

static bool is_same(const struct stat *one, const struct stat *other)
{
	return one->st_dev == other->st_dev && one->st_ino == other->st_ino;
}

static void take_places(int directory, struct orders *orders)
{
	struct stat one, other;

	places_path = take_word(orders);
	places = open(places_path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (places < 0 || fstat(places, &one) < 0 || fstat(directory, &other) < 0)
		die("%s: %m", places_path);
	linked = is_same(&one, &other);
}

static void hide(const char *place)
{
	char path[PATH_MAX], *name;
	int at = open_above(places, place, &name);

	snprintf(path, sizeof path, "%s/%s", places_path, place);
	while (!linked && umount2(path, MNT_DETACH) == 0)
		continue;
	if (unlinkat(at, name, linked ? 0 : AT_REMOVEDIR) < 0 && errno != ENOENT)
		die("%s: %m", path);
	close(at);
}

/* Shows the tree PATH, unless it is there: that of an earlier daemon is left alone. */
static void show(int directory, const char *path, const char *place)
{
	struct mount_attr attributes = {.attr_set = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV,
					.propagation = MS_PRIVATE};
	char text[PATH_MAX], *name, *last;
	int at, above, made;
	struct stat tree, there;

	if (linked && !strcmp(path, place))
		return;
	at = open_above(directory, path, &name);
	above = open_above(places, place, &last);
	snprintf(text, sizeof text, "../%s", path);
	if (linked && symlinkat(text, above, last) < 0 && errno != EEXIST)
		die("%s: %m", place);
	/* not after a power loss */
	if (!linked && fstatat(at, name, &tree, AT_SYMLINK_NOFOLLOW) == 0 &&
	    (fstatat(above, last, &there, AT_SYMLINK_NOFOLLOW) < 0 || !is_same(&tree, &there))) {
		hide(place);
		made = (int)syscall(SYS_open_tree, at, name, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC |
				    AT_SYMLINK_NOFOLLOW);
		if (made < 0 || mkdirat(above, last, CLOSED_MODE) < 0 ||
		    syscall(SYS_mount_setattr, made, "", AT_EMPTY_PATH, &attributes,
			    sizeof attributes) < 0 ||
		    syscall(SYS_move_mount, made, "", above, last, MOVE_MOUNT_F_EMPTY_PATH) < 0)
			die("%s: cannot be mounted: %m", place);
		close(made);
	}
	close(at);
	close(above);
}

static void own(int at, const char *name, unsigned uid, unsigned gid, mode_t mode)
{
	struct stat st;

	if (fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
		die("%s: %m", name);
	if ((st.st_uid != uid || st.st_gid != gid) &&
	    fchownat(at, name, uid, gid, AT_SYMLINK_NOFOLLOW) < 0)
		die("%s: %m", name);
	/* after chown(2), which takes set-group-ID away */
	if ((st.st_mode & 07777) != mode && fchmodat(at, name, mode, 0) < 0)
		die("%s: %m", name);
}

static void make(int directory, struct orders *orders)
{
	const char *path = take_word(orders), *place;
	unsigned uid = take_id(orders), gid = take_id(orders);
	mode_t mode = (mode_t)take_number(orders, 07777);
	char *name;
	int at;

	place = take_word(orders);
	if (!all_taken(orders))
		die("the daemon's orders are damaged");
	at = open_above(directory, path, &name);
	/* an earlier one did not come to its end */
	if (mkdirat(at, name, CLOSED_MODE) < 0 && errno != EEXIST)
		die("%s: %m", name);
	own(at, name, uid, gid, mode);
	show(directory, path, place);
	puts("made");
}

static void have(int directory, struct orders *orders)
{
	const char *path = take_word(orders);
	unsigned uid = take_id(orders), gid = take_id(orders);
	struct stat st;
	char *name;
	int at;

	if (!all_taken(orders))
		die("the daemon's orders are damaged");
	at = open_above(directory, path, &name);
	if (mkdirat(at, name, CLOSED_MODE) == 0)
		puts("made");
	else if (errno != EEXIST)
		die("%s: %m", name);
	if (fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
		die("%s: %m", name);
	/* its group is its owner's to choose */
	own(at, name, uid, st.st_uid == uid ? st.st_gid : gid, (st.st_mode & 07777) | CLOSED_MODE);
	if (!strncmp(path, "home/", 5))
		show(directory, path, path);
}

static void take_one_away(int directory, struct orders *orders)
{
	char *path = take_word(orders), *place = take_word(orders), *kept = take_word(orders);
	char *above, *last, *slash = strrchr(path, '/');
	int at, own, to;

	if (!all_taken(orders) || !slash)
		die("the daemon's orders are damaged");
	hide(place);
	*slash = 0;
	at = open_above(directory, path, &above);
	own = make_above(at, above);
	if (own < 0)
		die("%s: %m", above);
	if (unlinkat(own, slash + 1, AT_REMOVEDIR) == 0 || errno == ENOENT) {
		if (unlinkat(at, above, AT_REMOVEDIR) < 0 && errno != ENOENT)
			die("%s: %m", above);
		return;
	}
	if (errno != ENOTEMPTY && errno != EEXIST && errno != EBUSY)
		die("%s: %m", above);
	/* takes the lock of what is renamed, too: that of the directory above, which nobody has */
	to = open_above(directory, kept, &last);
	if (renameat(at, above, to, last) < 0)
		die("%s: cannot be kept as %s: %m", above, kept);
	puts("kept");
}

/* Calls ACT for each name in a directory of the daemon's own; one that is not there has none. */
static void for_each(int at, const char *path, void (*act)(int, const char *, void *), void *data)
{
	int fd = open_directory(at, path);
	DIR *listed = fd < 0 ? NULL : fdopendir(fd);
	struct dirent *entry;

	if (!listed && errno == ENOENT)
		return;
	if (!listed)
		die("%s: %m", path);
	while ((entry = readdir(listed)))
		if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
			act(dirfd(listed), entry->d_name, data);
	closedir(listed);
}

static void hide_unknown(int at, const char *name, void *data)
{
	const struct list *spaces = data;
	char place[PATH_MAX];

	(void)at;
	for (size_t i = 0; i < spaces->count; i++)
		if (!strcmp(spaces->items[i], name))
			return;
	snprintf(place, sizeof place, "shared/%s", name);
	hide(place);
}

static void show_home(int at, const char *name, void *data)
{
	const int *directory = data;
	char path[PATH_MAX];

	(void)at;
	snprintf(path, sizeof path, "home/%s", name);
	show(*directory, path, path);
}

static void show_all(int directory, struct orders *orders)
{
	struct orders told = read_orders(take_descriptor(orders));
	struct list spaces = take_list(&told);
	char path[PATH_MAX], place[PATH_MAX];

	if (!all_taken(orders) || !all_taken(&told))
		die("the daemon's orders are damaged");
	for_each(places, "shared", hide_unknown, &spaces);
	for (size_t i = 0; i < spaces.count; i++) {
		snprintf(path, sizeof path, "space/%s/%s", spaces.items[i], spaces.items[i]);
		snprintf(place, sizeof place, "shared/%s", spaces.items[i]);
		show(directory, path, place);
	}
	for_each(directory, "home", show_home, &directory);
}

struct adoption {
	int trees, homes, agents;	/* where trees go */
	int to;			/* those of the agents of one user */
	const unsigned *closed;
	size_t count;
};

static void move(int at, const char *path, int to, const char *name)
{
	if (renameat(at, path, to, name) < 0 && errno != ENOENT)
		die("%s: cannot be moved: %m", path);
}

static void adopt_agent(int at, const char *name, void *data)
{
	struct adoption *adoption = data;
	char path[PATH_MAX];

	snprintf(path, sizeof path, "%s/.home", name);
	if (faccessat(at, path, F_OK, AT_SYMLINK_NOFOLLOW) < 0)
		return;
	move(at, path, adoption->to, name);
	if (fchmodat(adoption->to, name, ABOVE_MODE, 0) < 0)
		die("%s: %m", name);
}

static void adopt_user(int at, const char *name, void *data)
{
	struct adoption *adoption = data;
	unsigned long long uid;
	char path[PATH_MAX];

	if (!parse_number(name, ID_MAX, &uid))
		return;
	snprintf(path, sizeof path, "%s/data", name);
	move(at, path, adoption->homes, name);
	for (size_t i = 0; i < adoption->count; i++)
		if (adoption->closed[i] == uid &&
		    faccessat(adoption->homes, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0)
			own(adoption->homes, name, 0, 0, CLOSED_MODE);
	adoption->to = make_above(adoption->agents, name);
	if (adoption->to < 0)
		die("%s: %m", name);
	snprintf(path, sizeof path, "%s/agent", name);
	for_each(at, path, adopt_agent, adoption);
	close(adoption->to);
}

/* FROM is a directory that has the space, or -1 if it is in its place. */
static void adopt_space(int from, const char *name, void *data)
{
	struct adoption *adoption = data;
	char path[PATH_MAX], *last;
	struct stat st;
	bool there;
	int at;

	snprintf(path, sizeof path, "space/%s/%s", name, name);
	at = open_above(adoption->trees, path, &last);
	if (from >= 0)
		move(from, name, at, name);
	there = fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) == 0;
	if (!there && errno != ENOENT)
		die("%s: %m", name);
	if (there && S_ISDIR(st.st_mode))
		printf("%u %s\n", st.st_uid, name);
	close(at);
}

static void adopt(int state, struct orders *orders)
{
	struct adoption adoption = {0};
	struct list spaces;

	adoption.closed = take_numbers(orders, ID_MAX, &adoption.count);
	spaces = take_list(orders);
	if (!all_taken(orders))
		die("the daemon's orders are damaged");
	adoption.trees = make_above(state, "tree");
	adoption.homes = make_above(adoption.trees, "home");
	adoption.agents = make_above(adoption.trees, "agent");
	if (adoption.trees < 0 || adoption.homes < 0 || adoption.agents < 0)
		die("tree: %m");
	for_each(state, "home", adopt_user, &adoption);
	for (size_t i = 0; i < spaces.count; i++)
		adopt_space(-1, spaces.items[i], &adoption);
	/* some filesystems list less while things go */
	while (unlinkat(state, "shared", AT_REMOVEDIR) < 0 && errno != ENOENT) {
		if (errno != ENOTEMPTY && errno != EEXIST)
			die("shared: %m");
		for_each(state, "shared", adopt_space, &adoption);
	}
}

static const struct {
	const char *name;
	void (*act)(int, struct orders *);
} verbs[] = {
	{"make", make}, {"have", have}, {"remove", take_one_away}, {"show", show_all},
	{"adopt", adopt},
};

int main(int argc, char **argv)
{
	struct orders orders = orders_of_arguments(argc, argv);
	const char *path = take_word(&orders);
	int directory = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (directory < 0)
		die("%s: %m", path);
	/* the next daemon has it done anew, by another that must not meet this one */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	umask(0);
	for (size_t i = 0; i < sizeof verbs / sizeof *verbs; i++) {
		if (!take_if(&orders, verbs[i].name))
			continue;
		if (verbs[i].act != adopt)
			take_places(directory, &orders);
		verbs[i].act(directory, &orders);
		return fflush(stdout) ? EXIT_FAILED : 0;
	}
	die("usage: tree DIRECTORY make|have|remove|show|adopt ...");
}
