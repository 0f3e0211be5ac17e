#!/bin/sh
# The same as resident.py in plain sh.
#
# This is no parser of JSON. It knows the lines that ctxd writes: one object, whose fields are
# texts. A text stays as it is quoted there (\" \\ \n \u0001), so that it can be put into a reply
# as it is; only newlines and tabs are taken for blanks. Where the text itself is needed, take
# jq or python3 to read it.
set -euf

field() { # NAME: of the line, still quoted; an unquoted " ends it
	printf '%s\n' "$line" | sed -nE 's/^.*"'"$1"'":"(([^"\\]|\\.)*)".*$/\1/p'
}
say() { # TYPE TEXT
	printf '{"type":"%s","id":"%s","text":"%s"}\n' "$1" "$id" "$2"
}

total=0
while IFS= read -r line; do
	id=$(field id)
	# \\ first: what follows it is no escape
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
