# What comes before scripts that print bytes, on descriptor 3: whatever they say goes to standard
# error.

exec 3>&1 1>&2
configure() { # FILE: by CONFIG, lines KEY=VALUE
    printf '%s\n' "$CONFIG" | while IFS= read -r line; do
        [ -z "$line" ] || git config --file "$1" "${line%%=*}" "${line#*=}" || exit 1
    done
}
pack() { # FILE: what the revisions on standard input lead to; fails with 31 beyond MOST bytes
    { git pack-objects --revs --stdout --delta-base-offset -q || : >"$1.broken"; } |
        head -c "$((MOST + 1))" >"$1"
    [ "$(wc -c <"$1")" -le "$MOST" ] || return 31
    [ ! -e "$1.broken" ]
}
