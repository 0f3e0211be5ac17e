# What follows take, or keep, for a child that has ended: what would be lost with its repository and
# files, judged by ours. Submodules are left out of the index, so that whatever is in their place
# shows as untracked. SETTLED are worktrees below that hold nothing.

count=$({ cat "$ours/commits"; echo "^$commit"; git for-each-ref --format='^%(objectname)'; } |
    GIT_DIR=$ours git rev-list --count --stdin) || exit 1
[ "$count" = 0 ] || keep "$count of its commits are on no branch here"
# a name with a blank or a wildcard is not, in its parts, that of a settled one
# shellcheck disable=SC2044
for path in $(find "$below" -mindepth 1 -maxdepth 1 2>/dev/null); do
    for settled in "$@"; do [ "$path" != "$below/$settled" ] || continue 2; done
    keep "worktrees of its own children are kept in it"
done
cd "$work" || exit 1
find . -mindepth 2 -name .git >"$ours/found" || keep "not all of its files can be read"
if [ ! -s "$ours/found" ]; then
    export GIT_DIR="$ours" GIT_WORK_TREE="$work" GIT_INDEX_FILE="$ours/index"
    export GIT_OBJECT_DIRECTORY="$objects"
    # copies that the child removed are not missed, and what it committed is as it committed it
    if [ -f "$copied" ]; then
        GIT_INDEX_FILE=$copied git ls-files --stage -z >"$ours/copied" || exit 1
        git update-index -z --index-info <"$ours/copied" || exit 1
        git ls-files --deleted -z >"$ours/copied" || exit 1
        git update-index -z --force-remove --stdin <"$ours/copied" || exit 1
    fi
    git ls-tree -r -z "$commit" >"$ours/tree" || exit 1
    grep -zv '^160000 ' "$ours/tree" | git update-index -z --index-info || exit 1
    git ls-files --others --modified --deleted >"$ours/found" || exit 1
fi
[ ! -s "$ours/found" ] || keep "uncommitted: $(head -n 5 "$ours/found" | tr '[:cntrl:]' ' ')"
