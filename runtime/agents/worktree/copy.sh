# What follows make: copies what .ctxfs-copy names and git ignores, from the parent's workspace ROOT,
# by the program CARRY, and nothing at the paths COVERED, one a line. The index "copied" has what was
# copied: while that has not changed, it makes no difference to what is judged.

cd "$ROOT"
mkdir "$place/copy"
: >"$place/copy/refused"
if look_at_parent "$place" "$GIT_DIR"; then
    mkdir "$place/copy/list"
    # others may change that file, too
    printf '.ctxfs-copy\0' | "$CARRY" "$top" "$place/copy/list" '' >"$place/copy/refused"
    if [ -f "$place/copy/list/.ctxfs-copy" ]; then
        set -- --others --ignored --exclude-from="$place/copy/list/.ctxfs-copy"
        git ls-files -z "$@" -- . >"$place/copy/named"
        git ls-files -z "$@" --directory --full-name -- . >"$place/copy/matched"
        # what begins with a colon is no path by itself
        sed -z 's|^|./|' "$place/copy/named" |
            ignoring check-ignore -z --stdin >"$place/copy/ignored" || [ $? = 1 ]
        set -f
        IFS='
'
        # shellcheck disable=SC2086
        "$CARRY" . "$place/work" "$prefix" "$common" $COVERED \
            <"$place/copy/ignored" >"$place/copy/refused"
        cd "$place/work"
        export GIT_DIR="$git" GIT_WORK_TREE="$place/work" GIT_INDEX_FILE="$git/index"
        git ls-files -z --others >"$place/copy/copied"
        GIT_INDEX_FILE=$place/copied git update-index -z --add --info-only --stdin \
            <"$place/copy/copied"
    fi
fi
