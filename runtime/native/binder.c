/*
 * binder: binds the agents' sockets on the filesystem for the daemon.
 *
 *     binder SOCKET_FD
 *
 * Binding makes a request to the filesystem, which the daemon answers. No thread
 * of the daemon may make it: if the daemon were killed at that moment, the thread
 * would wait, unkillably, for an answer from its own process, and the kernel closes
 * the descriptor of /dev/fuse only when that thread ends.
 *
 * Each message on SOCKET_FD (SOCK_SEQPACKET) is orders (orders.h): a directory
 * and a name. The answer is a listening socket (SCM_RIGHTS) with the errno "0",
 * or the errno of the failure. With an empty name, the binder binds nothing. It
 * answers after fsync(2) of the directory, because the daemon cannot ask its own
 * mount. Ends with the daemon.
 *
 * That fsync(2) is the only one of a directory that the daemon is ever asked for: it
 * answers ENOSYS, and the kernel asks no more. But the kernel looks whether it may ask
 * before it takes the lock of the directory. Of hundreds who came first it would ask for
 * each, one after the other, with the lock.
 */
#define _GNU_SOURCE
#include <sys/un.h>

#include "common.h"
#include "orders.h"

#define BACKLOG 128
#ifndef SO_PASSRIGHTS
#define SO_PASSRIGHTS 83
#endif

static int bind_socket(const char *directory, const char *name)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int held, made, no = 0;

	held = open(directory, O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (held < 0)
		return -1;
	made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	/* independent of the length of the mount's path: sun_path holds 108 bytes */
	snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d/%.64s", held, name);
	/* read by the daemon, which would have to close what is sent; before Linux 6.16 it has to */
	setsockopt(made, SOL_SOCKET, SO_PASSRIGHTS, &no, sizeof no);
	if (made >= 0 && (bind(made, (struct sockaddr *)&address, sizeof address) < 0 ||
			  listen(made, BACKLOG) < 0)) {
		close_quietly(made);
		made = -1;
	}
	close_quietly(held);
	return made;
}

/* Returns the bound socket; -1 with errno, which is 0 if there was nothing to bind. */
static int obey(struct orders *orders)
{
	const char *directory = take_word(orders), *name = take_word(orders);
	int fd;

	errno = EBADMSG;
	if (!all_taken(orders))
		return -1;
	if (*name)
		return bind_socket(directory, name);
	fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd >= 0 && fsync(fd) == 0)
		errno = 0;
	close_quietly(fd);
	return -1;
}

int main(int argc, char **argv)
{
	struct orders orders = orders_of_arguments(argc, argv);
	int channel = take_descriptor(&orders);
	char request[8192], answer[16];
	ssize_t n;

	if (!all_taken(&orders))
		return 2;
	stand_beside("ctx-binder");
	while ((n = recv(channel, request, sizeof request, 0)) > 0) {
		struct orders asked = split_message(request, (size_t)n);
		int made = obey(&asked), size;

		size = snprintf(answer, sizeof answer, "%d", made < 0 ? errno : 0);
		(void)!send_message(channel, answer, (size_t)size, &made, made >= 0);
		close_quietly(made);
		free(asked.strings);
	}
	return 0;
}
