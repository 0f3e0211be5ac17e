# What comes before scripts that read what another machine sends, or what an agent of one leaves: a few
# bytes of a pack may stand for very many. Git gets 2 GiB of memory, deltas of no large files, and,
# where MOST is set, no file that is longer than twice as many bytes.

# shellcheck disable=SC3045
ulimit -d 2097152
[ -z "$MOST" ] || ulimit -f "$((MOST / 256 + 1))"
export GIT_CONFIG_PARAMETERS="'core.bigFileThreshold=16m'"
