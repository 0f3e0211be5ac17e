/*
 * lend: hands durable trees of the daemon's state into an agent's cell.
 *
 *     lend ORDERS_FD FIRST_FD STEP
 *
 * Runs on the host with the daemon's rights, before privileges are dropped. The agents
 * cannot reach the state, so no program inside of a cell could open these trees. This one
 * opens each below the daemon's own directory, through no link, and clones its mount. A
 * clone belongs to no namespace, and view attaches it. The attributes are set here, before
 * any agent has the mount.
 *
 * Without root, only a user namespace permits cloning, and a process does not return from
 * one. So another process clones and sends the trees.
 *
 * ORDERS_FD holds orders (orders.h): the directory of all trees, and the trees, a list of
 * lists: options (letters or "-": r read-only, x noexec), the path below the directory,
 * and the name for messages. STEP, a list, is the next program and its arguments; it has
 * the trees from descriptor FIRST_FD on, in order.
 */
#define _GNU_SOURCE
#include <linux/mount.h>
#include <sched.h>

#include "common.h"
#include "ordinary.h"
#include "orders.h"

struct tree {
	const char *options, *path, *name;
};

static struct tree *take_trees(struct orders *orders, size_t *count)
{
	struct list *lists = take_lists(orders, count);
	struct tree *trees = calloc(*count + 1, sizeof *trees);

	if (!trees)
		die("the runtime's list of trees: %m");
	for (size_t i = 0; i < *count; i++) {
		char **items = lists[i].items;

		if (lists[i].count != 3)
			die("the runtime's list of trees is damaged");
		trees[i] = (struct tree){items[0], items[1], items[2]};
	}
	free(lists);
	return trees;
}

/* Returns the mount of a tree with the mounts below it, in no namespace. */
static int clone_tree(int directory, const struct tree *tree)
{
	struct mount_attr attributes = {
		.attr_set = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV |
			    (strchr(tree->options, 'r') ? MOUNT_ATTR_RDONLY : 0) |
			    (strchr(tree->options, 'x') ? MOUNT_ATTR_NOEXEC : 0),
		.propagation = MS_PRIVATE,
	};
	int fd = open_path(directory, tree->path, O_PATH | O_DIRECTORY,
			   RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS), made;

	if (fd < 0 && errno == ENOENT)
		die("ENOENT: %s: it was removed", tree->name);
	if (fd < 0)
		die("%s: %m", tree->name);
	made = (int)syscall(SYS_open_tree, fd, "", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC |
			    AT_EMPTY_PATH | AT_RECURSIVE);
	if (made < 0 || syscall(SYS_mount_setattr, made, "", AT_EMPTY_PATH | AT_RECURSIVE,
				&attributes, sizeof attributes) < 0)
		die("%s: %m", tree->name);
	close(fd);
	return made;
}

static int open_trees(const char *directory)
{
	int fd = open(directory, O_PATH | O_DIRECTORY | O_CLOEXEC);

	if (fd < 0)
		die("%s: %m", directory);
	return fd;
}

/* Starts a process that may mount, and sends the trees one after the other. */
static int start_sender(const char *directory, const struct tree *trees, size_t count, pid_t *sender)
{
	int ends[2], opened;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
		die("socketpair: %m");
	*sender = fork();
	if (*sender < 0)
		die("fork: %m");
	if (*sender > 0) {
		close(ends[1]);
		return ends[0];
	}
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	enter_user_namespace();
	if (unshare(CLONE_NEWNS) < 0)
		die("unshare: %m");
	/* what it leads to in the mounts of this namespace */
	opened = open_trees(directory);
	for (size_t i = 0; i < count; i++) {
		int made = clone_tree(opened, &trees[i]);

		if (send_message(ends[1], "", 1, &made, 1) < 0)
			die("%s: sendmsg: %m", trees[i].name);
		close(made);
	}
	exit(0);
}

static int receive_tree(int channel)
{
	int fds[DESCRIPTORS_MAX];
	size_t count;
	char byte;

	/* it printed the reason */
	if (receive_message(channel, &byte, 1, fds, &count) != 1 || count != 1)
		exit(EXIT_FAILED);
	return fds[0];
}

int main(int argc, char **argv)
{
	struct orders arguments = orders_of_arguments(argc, argv), orders;
	int spec = take_descriptor(&arguments), first = take_descriptor(&arguments);
	struct list step = take_list(&arguments);
	int channel = -1, opened = -1;
	const char *directory;
	int made_of[DESCRIPTORS_MAX];
	struct tree *trees;
	pid_t sender = 0;
	size_t count;

	if (!all_taken(&arguments) || !step.count)
		die("usage: lend ORDERS_FD FIRST_FD STEP");
	orders = read_orders(spec);
	directory = take_word(&orders);
	trees = take_trees(&orders, &count);
	if (!all_taken(&orders) || count > DESCRIPTORS_MAX)
		die("the runtime's list of trees is damaged");
	if (geteuid() != 0)
		channel = start_sender(directory, trees, count, &sender);
	else
		opened = open_trees(directory);
	for (size_t i = 0; i < count; i++) {
		int made = channel >= 0 ? receive_tree(channel) : clone_tree(opened, &trees[i]);

		/* above all numbers that the trees are to have */
		made_of[i] = fcntl(made, F_DUPFD_CLOEXEC, first + (int)count);
		if (made_of[i] < 0)
			die("%s: %m", trees[i].name);
		close(made);
	}
	for (size_t i = 0; i < count; i++)
		if (dup2(made_of[i], first + (int)i) < 0)
			die("%s: %m", trees[i].name);
	if (sender > 0)
		waitpid(sender, NULL, 0);
	execvp(step.items[0], step.items);
	die("%s: %m", step.items[0]);
}
