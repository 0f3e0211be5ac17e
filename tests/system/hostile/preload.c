/* A library that an agent would like the loader to take: notes with what rights it was. */
#define _GNU_SOURCE
#include "note.h"

#include <errno.h>

__attribute__((constructor)) static void loaded(void)
{
	note_rights(program_invocation_short_name);
}
