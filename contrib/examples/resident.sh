#!/bin/sh
# The same as resident.py in plain sh.
#
# This does not parse JSON in general, only the lines that ctxd writes: one object with string
# fields. A text stays quoted as it is there (\" \\ \n \u0001), so that it can be copied into a
# reply; only newlines and tabs become blanks. To read the text itself, use jq or python3.
set -euf

field() { # NAME: prints that field of the line, still quoted; an unquoted " ends it
	printf '%s\n' "$line" | sed -nE 's/^.*"'"$1"'":"(([^"\\]|\\.)*)".*$/\1/p'
}
say() { # TYPE TEXT
	printf '{"type":"%s","id":"%s","text":"%s"}\n' "$1" "$id" "$2"
}

total=0
while IFS= read -r line; do
	id=$(field id)
	# \\ first: the character after it is not an escape
	text=$(field text | sed -E 's/\\\\/\\u005c/g; s/\\[ntr]/ /g')
	count=0
	for word in $text; do
		sleep "${PACE:-0}"
		say delta "$word "
		count=$((count + 1))
	done
	total=$((total + count))
	if [ "$count" -gt 0 ]; then
		say message "$count words, $total in all"
	else
		say error "there are no words in this message"
	fi
done
