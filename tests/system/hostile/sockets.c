/* Sockets: claims, connections and descriptors that travel. */
#include "hostile.h"

#include <arpa/inet.h>
#include <linux/vm_sockets.h>
#include <poll.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

int connect_to(const char *path)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), error;
	int at;

	/* a path may be longer than an address: by the descriptor of its directory */
	if (strlen(path) >= sizeof address.sun_path) {
		char directory[4096];
		char *slash;

		snprintf(directory, sizeof directory, "%s", path);
		slash = strrchr(directory, '/');
		*slash = 0;
		at = open(directory, O_PATH | O_DIRECTORY | O_CLOEXEC);
		if (at < 0)
			return -1;
		snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d/%.60s", at, slash + 1);
	} else {
		strcpy(address.sun_path, path);
	}
	if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0) {
		error = errno;
		close(fd);
		errno = error;
		return -1;
	}
	return fd;
}

/* One line of an answer; what it says with "code", else with "type". */
static void tell_answer(int fd)
{
	char text[4096];
	size_t length = 0;
	ssize_t n;
	char *found;

	while (length < sizeof text - 1 && (n = read(fd, text + length, 1)) == 1)
		if (text[length++] == '\n')
			break;
	text[length] = 0;
	if (!length) {
		tell("end");
		return;
	}
	found = strstr(text, "\"code\":\"");
	found = found ? found + 8 : strstr(text, "\"type\":\"") + 8;
	tell("%.*s", (int)strcspn(found, "\""), found);
}

/* PATH FRAME...: each as one line, and what is answered */
static void do_ask(int argc, char **argv)
{
	int fd = connect_to(argv[0]);

	if (fd < 0) {
		tell_step("connect", -1);
		return;
	}
	for (int i = 1; i < argc; i++) {
		if (i > 1)
			tell(",");
		dprintf(fd, "%s\n", argv[i]);
		tell_answer(fd);
	}
}

/* PATH FRAME: with the credentials of root, and with the number of PID 1 (unix(7)) */
static void do_lie(int argc, char **argv)
{
	struct ucred claimed = {.pid = getpid(), .uid = 0, .gid = 0};
	char control[CMSG_SPACE(sizeof claimed)] = {0};
	struct iovec data = {argv[1], strlen(argv[1])};
	struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1,
				 .msg_control = control, .msg_controllen = sizeof control};
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	int fd = connect_to(argv[0]);

	(void)argc;
	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_CREDENTIALS;
	header->cmsg_len = CMSG_LEN(sizeof claimed);
	memcpy(CMSG_DATA(header), &claimed, sizeof claimed);
	if (tell_step("connect", fd) < 0)
		return;
	tell_step("root", sendmsg(fd, &message, MSG_NOSIGNAL));
	claimed = (struct ucred){.pid = 1, .uid = getuid(), .gid = getgid()};
	memcpy(CMSG_DATA(header), &claimed, sizeof claimed);
	tell_step("pid", sendmsg(fd, &message, MSG_NOSIGNAL));
}

static socklen_t abstract_address(struct sockaddr_un *address, const char *name)
{
	size_t n = strlen(name);

	memset(address, 0, sizeof *address);
	address->sun_family = AF_UNIX;
	memcpy(address->sun_path + 1, name, n);
	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
}

/* NAME: an abstract address */
static void do_abstract(int argc, char **argv)
{
	struct sockaddr_un address;
	socklen_t size = abstract_address(&address, argv[0]);

	(void)argc;
	tell_result(connect(socket(AF_UNIX, SOCK_STREAM, 0), (struct sockaddr *)&address, size));
}

void listen_everywhere(const char *name, const char *port)
{
	struct sockaddr_un address;
	socklen_t size = abstract_address(&address, name);
	struct sockaddr_in local = {.sin_family = AF_INET,
				    .sin_port = htons((unsigned short)atoi(port)),
				    .sin_addr = {htonl(INADDR_LOOPBACK)}};
	int abstract = socket(AF_UNIX, SOCK_STREAM, 0), inet = socket(AF_INET, SOCK_STREAM, 0);

	if (bind(abstract, (struct sockaddr *)&address, size) < 0 || listen(abstract, 5) < 0 ||
	    bind(inet, (struct sockaddr *)&local, sizeof local) < 0 || listen(inet, 5) < 0)
		perror("listen");
}

/* A path, on the filesystem */
static void do_connect(int argc, char **argv)
{
	(void)argc;
	tell_result(connect_to(argv[0]));
}

/* ADDRESS PORT */
static void do_network(int argc, char **argv)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((unsigned short)atoi(argv[1]))};
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	(void)argc;
	inet_pton(AF_INET, argv[0], &address.sin_addr);
	if (fd < 0)
		tell_step("socket", -1);
	else
		tell_result(connect(fd, (struct sockaddr *)&address, sizeof address));
}

static void do_raw(int argc, char **argv)
{
	(void)argc;
	(void)argv;
	tell_step("packet", socket(AF_PACKET, SOCK_RAW, 0));
	tell_step("raw", socket(AF_INET, SOCK_RAW, IPPROTO_ICMP));
}

/* A machine's own addresses, which are of no network namespace (vsock(7)). */
static void do_vsock(int argc, char **argv)
{
	struct sockaddr_vm address = {.svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_ANY,
				      .svm_port = VMADDR_PORT_ANY};
	int fd = socket(AF_VSOCK, SOCK_STREAM, 0);

	(void)argc;
	(void)argv;
	tell_result(fd < 0 ? -1 : bind(fd, (struct sockaddr *)&address, sizeof address));
}

static int listen_at(const char *path)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
	if (bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(fd, 10) < 0)
		return -1;
	return fd;
}

/* Sends an open file or connection to whoever listens at RENDEZVOUS. */
static int send_descriptor(const char *rendezvous, int passed)
{
	char control[CMSG_SPACE(sizeof passed)] = {0}, byte = 'x';
	struct iovec data = {&byte, 1};
	struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1,
				 .msg_control = control, .msg_controllen = sizeof control};
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	int fd = -1;

	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_RIGHTS;
	header->cmsg_len = CMSG_LEN(sizeof passed);
	memcpy(CMSG_DATA(header), &passed, sizeof passed);
	for (int i = 0; i < 500 && (fd = connect_to(rendezvous)) < 0; i++)
		usleep(10000);
	return fd < 0 ? -1 : (int)sendmsg(fd, &message, 0);
}

static int receive_descriptor(int listener)
{
	int fd = accept(listener, NULL, NULL), passed = -1;
	char control[CMSG_SPACE(sizeof passed)], byte;
	struct iovec data = {&byte, 1};
	struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1,
				 .msg_control = control, .msg_controllen = sizeof control};
	struct cmsghdr *header;

	if (recvmsg(fd, &message, MSG_CMSG_CLOEXEC) > 0 && (header = CMSG_FIRSTHDR(&message)) &&
	    header->cmsg_type == SCM_RIGHTS)
		memcpy(&passed, CMSG_DATA(header), sizeof passed);
	close(fd);
	return passed;
}

/* RENDEZVOUS read|write|connect PATH: opens it and hands it on */
static void do_give(int argc, char **argv)
{
	int fd;

	(void)argc;
	if (!strcmp(argv[1], "connect"))
		fd = connect_to(argv[2]);
	else
		fd = open(argv[2], !strcmp(argv[1], "read") ? O_RDONLY : O_WRONLY | O_APPEND);
	tell_step("open", fd);
	if (fd >= 0 && !strcmp(argv[1], "connect")) {
		/* answered: the daemon knows whose it is */
		(void)!write(fd, "{\"op\":\"ping\"}\n", 14);
		tell(" first=");
		tell_answer(fd);
	}
	if (fd >= 0)
		tell_step("give", send_descriptor(argv[0], fd));
}

/*
 * RENDEZVOUS GO read|write|ask TEXT: takes what is handed to it, uses it at
 * once and, when the file GO is there, again.
 */
static void use(const char *what, int fd, const char *how, const char *text)
{
	char data[200];
	ssize_t n;

	snprintf(data, sizeof data, "%s\n", text);
	if (!strcmp(how, "read")) {
		n = pread(fd, data, sizeof data, 0);
		tell_step(what, n);
	} else if (!strcmp(how, "write")) {
		n = write(fd, data, strlen(data));
		n = n < 0 ? n : fsync(fd);
		tell_step(what, n);
	} else {
		(void)!write(fd, data, strlen(data));
		tell(" %s=", what);
		tell_answer(fd);
	}
}

static void do_take(int argc, char **argv)
{
	int listener = listen_at(argv[0]), fd;
	char path[4096];
	struct stat st;

	(void)argc;
	if (listener < 0) {
		tell_step("listen", -1);
		return;
	}
	fd = receive_descriptor(listener);
	tell_step("take", fd);
	use("living", fd, argv[2], argv[3]);
	snprintf(path, sizeof path, "%s.used", argv[1]);
	put(path, O_CREAT, "used\n");
	while (stat(argv[1], &st) < 0)
		usleep(10000);
	use("dead", fd, argv[2], argv[3]);
}

/*
 * PATH GO READY FRAME: a connection whose maker is gone before anyone looks who
 * it is. The maker is called "gone-peer", connects when there is a file GO, says
 * so in READY, and waits to be killed.
 */
static void do_orphan(int argc, char **argv)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM, 0), held, status;
	struct stat st;
	pid_t maker;

	(void)argc;
	/* found here: by a descriptor the kernel need not ask whoever is stopped for the name */
	held = open(argv[0], O_PATH | O_CLOEXEC);
	if (held < 0)
		tell_step("open", -1);
	snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d", held);
	maker = fork();
	if (maker == 0) {
		prctl(PR_SET_NAME, "gone-peer");
		put(argv[2], O_CREAT, "waiting\n");
		while (stat(argv[1], &st) < 0)
			usleep(5000);
		if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0)
			put(argv[2], O_TRUNC, error_name(errno));
		else
			put(argv[2], O_TRUNC, "connected\n");
		for (;;)
			pause();
	}
	waitpid(maker, &status, 0);
	tell_step("killed", WIFSIGNALED(status) ? 0 : -1);
	dprintf(fd, "%s\n", argv[3]);
	tell(" answer=");
	tell_answer(fd);
}

const struct way SOCKET_WAYS[] = {
	{"ask", 2, do_ask}, {"lie", 2, do_lie}, {"abstract", 1, do_abstract},
	{"connect", 1, do_connect}, {"network", 2, do_network}, {"raw", 0, do_raw},
	{"vsock", 0, do_vsock}, {"give", 3, do_give}, {"take", 4, do_take},
	{"orphan", 4, do_orphan}, {NULL, 0, NULL},
};
