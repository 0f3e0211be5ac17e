/*
 * link: becomes the command that leads to another machine.
 *
 *     link IDS DIRECTORY COMMAND	(orders.h)
 *
 * COMMAND is an operator's, a list whose first word is an absolute path: ssh(1), say. What it
 * reads comes from another machine, so it gets no right of the daemon's: IDS, no capability and no
 * way to one, a session of its own, DIRECTORY, descriptors 0 to 2, and the environment that this
 * program was given. DIRECTORY is entered with the daemon's rights: that of a key is below the
 * state, which nobody else may search. A command without IDS of its own ("=" for groups, as an ordinary
 * user runs the daemon) keeps those.
 */
#define _GNU_SOURCE
#include "common.h"
#include "orders.h"

int main(int argc, char **argv)
{
	struct orders orders = orders_of_arguments(argc, argv);
	struct ids ids = take_ids(&orders);
	char *directory = take_word(&orders);
	struct list command = take_list(&orders);

	if (!all_taken(&orders) || !command.count) {
		dprintf(2, "usage: link IDS COMMAND\n");
		return 2;
	}
	setsid();
	if (chdir(directory) < 0)
		die("%s: %m: ctx nodes add makes it", directory);
	if (leave_keyring() < 0 || become_groups(&ids) < 0 || become(&ids) < 0)
		die("the ids of the command: %m");
	close_from(3, 0);
	execve(command.items[0], command.items, environ);
	die("%s: %m", command.items[0]);
}
