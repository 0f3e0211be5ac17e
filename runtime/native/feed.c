/*
 * feed: writes the standard input of one run that version 0.2 began.
 *
 *     feed SOCKET FIFO MESSAGE LINE OPEN
 *
 * Such a run has a FIFO, and a monitor that writes nothing into it. This program takes the FIFO
 * over, removes its name and that of the note beside it, and writes what it is sent at SOCKET,
 * which listens (inlet.h). MESSAGE and LINE were told last, and in full; OPEN is 1 if part of a
 * line may be in the FIFO, and 0 otherwise. It outlives the daemon, and ends when nobody reads
 * the FIFO any more.
 */
#define _GNU_SOURCE
#include <signal.h>

#include "common.h"
#include "inlet.h"
#include "orders.h"

static void remove_names(const char *fifo)
{
	char note[4096];

	snprintf(note, sizeof note, "%s~", fifo);
	unlink(note);
	unlink(fifo);
}

int main(int argc, char **argv)
{
	struct orders orders = orders_of_arguments(argc, argv);
	static struct inlet in;
	const char *path;
	size_t written = 0;
	int fifo;

	in.listener = take_descriptor(&orders);
	path = take_word(&orders);
	in.message = take_number(&orders, UINT64_MAX);
	in.line = (uint8_t)take_number(&orders, UINT8_MAX);
	in.open = take_number(&orders, 1);
	if (!all_taken(&orders)) {
		dprintf(2, "usage: feed SOCKET FIFO MESSAGE LINE OPEN\n");
		return 2;
	}
	if (fork() > 0)	/* whoever started it need not wait for its end */
		return 0;
	stand_beside("ctx-feed");
	signal(SIGPIPE, SIG_IGN);
	fifo = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
	remove_names(path);
	while (fifo >= 0) {
		struct pollfd fds[1 + INLET_FDS] = {
			{.fd = fifo, .events = in.length ? POLLOUT : 0},
		};
		size_t count = 1 + watch_inlet(&in, fds + 1);

		poll(fds, count, -1);
		if (fds[0].revents & POLLERR)
			break;
		if (fds[0].revents && !write_taken(&in, fifo, &written))
			break;
		serve_inlet(&in, fds + 1);
	}
	return 0;
}
