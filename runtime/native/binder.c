/*
 * binder: binds the agents' sockets on the filesystem, for the daemon.
 *
 *     binder SOCKET_FD
 *
 * Binding makes a request to the filesystem, which the daemon answers. The
 * daemon must not make it itself, in no thread of its own: were it killed just
 * then, the thread would wait, unkillably, for an answer from its own process,
 * whose descriptor of /dev/fuse the kernel closes only when that thread ends.
 *
 * Each message on SOCKET_FD (SOCK_SEQPACKET) is a directory and a name, each
 * ended by a NUL; the answer is a listening socket (SCM_RIGHTS) with an empty
 * errno "0", or the errno of what failed. Without a name nothing is bound: it is
 * answered when the filesystem has said what it is (statfs(2), which needs no
 * rights there), for the daemon cannot ask its own mount. Ends with the daemon.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <unistd.h>

#define BACKLOG 128

static int bind_socket(const char *directory, const char *name)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int held, made, error;

	held = open(directory, O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (held < 0)
		return -1;
	made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	/* short, however long the mount's path: sun_path holds 108 bytes */
	snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d/%.64s", held, name);
	if (made >= 0 && (bind(made, (struct sockaddr *)&address, sizeof address) < 0 ||
			  listen(made, BACKLOG) < 0)) {
		error = errno;
		close(made);
		made = -1;
		errno = error;
	}
	error = errno;
	close(held);
	errno = error;
	return made;
}

static void answer(int channel, int made, int error)
{
	char text[16], control[CMSG_SPACE(sizeof made)] = {0};
	struct iovec data = {text, (size_t)snprintf(text, sizeof text, "%d", error)};
	struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};

	if (made >= 0) {
		struct cmsghdr *header;

		message.msg_control = control;
		message.msg_controllen = sizeof control;
		header = CMSG_FIRSTHDR(&message);
		header->cmsg_level = SOL_SOCKET;
		header->cmsg_type = SCM_RIGHTS;
		header->cmsg_len = CMSG_LEN(sizeof made);
		memcpy(CMSG_DATA(header), &made, sizeof made);
	}
	(void)!sendmsg(channel, &message, MSG_NOSIGNAL);
}

int main(int argc, char **argv)
{
	char request[8192];
	int channel;
	ssize_t n;

	if (argc != 2)
		return 2;
	channel = atoi(argv[1]);
	prctl(PR_SET_NAME, "ctx-binder");
	setsid();	/* a terminal's Ctrl-C is the daemon's to take */
	while ((n = recv(channel, request, sizeof request - 2, 0)) > 0) {
		const char *name;
		int made;

		request[n] = request[n + 1] = 0;
		name = request + strlen(request) + 1;
		if (!*name) {
			struct statfs told;

			answer(channel, -1, statfs(request, &told) < 0 ? errno : 0);
			continue;
		}
		made = bind_socket(request, name);
		answer(channel, made, made >= 0 ? 0 : errno);
		if (made >= 0)
			close(made);
	}
	return 0;
}
