/*
 * link: becomes the command that leads to another machine.
 *
 *     link IDS DIRECTORY APART COMMAND	(orders.h)
 *
 * COMMAND is an operator's, a list whose first word is an absolute path: ssh(1), say. What it
 * reads comes from another machine, so it gets no right of the daemon's: IDS, no capability and no
 * way to one, a session of its own, DIRECTORY, descriptors 0 to 2, and the environment that this
 * program was given. DIRECTORY is entered with the daemon's rights: that of a key is below the
 * state, which nobody else may search. A command without IDS of its own ("=" for groups, as an ordinary
 * user runs the daemon) keeps those.
 *
 * Commands to several machines may have one account, and another machine may have taken one of them
 * over. So each that is APART (a word that is not empty) has a domain of its own (landlock(7)): it
 * can trace none of the others, reach no descriptor or memory of theirs, nor signal them (Linux
 * 6.12). The domain needs a rule on files on older kernels, and gets one that takes nothing away.
 */
#define _GNU_SOURCE
#include "common.h"
#include "orders.h"

static bool keep_apart(void)
{
	int entered = enter_domain((struct ruleset){.scoped = SCOPE_SIGNAL});

	return (entered ? entered : enter_domain((struct ruleset){ACCESS_FS_MAKE_BLOCK, 0, 0})) >= 0;
}

int main(int argc, char **argv)
{
	struct orders orders = orders_of_arguments(argc, argv);
	struct ids ids = take_ids(&orders);
	char *directory = take_word(&orders);
	bool apart = *take_word(&orders);
	struct list command = take_list(&orders);

	if (!all_taken(&orders) || !command.count) {
		dprintf(2, "usage: link IDS DIRECTORY APART COMMAND\n");
		return 2;
	}
	setsid();
	if (chdir(directory) < 0)
		die("%s: %m: ctx nodes add makes it", directory);
	if (leave_keyring() < 0 || become_groups(&ids) < 0 || become(&ids) < 0)
		die("the ids of the command: %m");
	if (apart && !keep_apart())
		die("a domain of the command: %m");
	close_from(3, 0);
	execve(command.items[0], command.items, environ);
	die("%s: %m", command.items[0]);
}
