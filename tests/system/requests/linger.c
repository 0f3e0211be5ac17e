/*
 * linger: sends a descriptor that takes long to close.
 *
 *     linger SOCKET SECONDS
 *
 * It is the last one of a TCP connection whose peer reads nothing, which waits for so long when it
 * is closed (SO_LINGER in socket(7)). What came of it is printed on a line.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define REQUEST "{\"op\":\"ping\"}\n"

static int must(int result, const char *what)
{
	if (result < 0)
		err(1, "%s", what);
	return result;
}

static int lingering(int seconds)
{
	static char data[65536];
	struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	struct linger linger = {.l_onoff = 1, .l_linger = seconds};
	socklen_t size = sizeof at;
	int listener = must(socket(AF_INET, SOCK_STREAM, 0), "socket");
	int ours = must(socket(AF_INET, SOCK_STREAM, 0), "socket");

	must(bind(listener, (struct sockaddr *)&at, size), "bind");
	must(listen(listener, 1), "listen");
	must(getsockname(listener, (struct sockaddr *)&at, &size), "getsockname");
	must(connect(ours, (struct sockaddr *)&at, size), "connect");
	must(accept(listener, NULL, NULL), "accept");	/* never read */
	must(fcntl(ours, F_SETFL, O_NONBLOCK), "fcntl");
	while (write(ours, data, sizeof data) > 0)
		;
	must(setsockopt(ours, SOL_SOCKET, SO_LINGER, &linger, sizeof linger), "setsockopt");
	return ours;
}

int main(int argc, char **argv)
{
	struct sockaddr_un to = {.sun_family = AF_UNIX};
	struct iovec text = {.iov_base = REQUEST, .iov_len = strlen(REQUEST)};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int))];
	} control = {.header = {.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET,
				.cmsg_type = SCM_RIGHTS}};
	struct msghdr message = {.msg_iov = &text, .msg_iovlen = 1, .msg_control = &control,
				 .msg_controllen = sizeof control};
	int connection = must(socket(AF_UNIX, SOCK_STREAM, 0), "socket"), sent;
	char answer[256];

	if (argc != 3)
		errx(2, "usage: linger SOCKET SECONDS");
	strncpy(to.sun_path, argv[1], sizeof to.sun_path - 1);
	must(connect(connection, (struct sockaddr *)&to, sizeof to), "connect");
	sent = lingering(atoi(argv[2]));
	memcpy(CMSG_DATA(&control.header), &sent, sizeof sent);
	if (sendmsg(connection, &message, 0) < 0) {
		printf("%s\n", errno == EPERM ? "EPERM" : strerror(errno));
	} else {
		close(sent);
		puts(read(connection, answer, sizeof answer) > 0 ? "answered" : "not answered");
	}
	fflush(stdout);
	pause();
}
