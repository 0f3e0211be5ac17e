/* The end of a step into a cell: what it says is shown to operators, on a terminal. */
#ifndef CTXFS_DIE_H
#define CTXFS_DIE_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* Says why, without anything of a path that a terminal would obey. */
__attribute__((format(printf, 1, 2), noreturn)) static inline void die(const char *format, ...)
{
	char text[8192];
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof text, format, args);
	va_end(args);
	fputs("ctxfs: ", stderr);
	for (const unsigned char *c = (const unsigned char *)text; *c; c++)
		fprintf(stderr, *c >= ' ' && *c <= '~' ? "%c" : "\\x%02x", *c);
	fputc('\n', stderr);
	exit(125);
}

#endif
