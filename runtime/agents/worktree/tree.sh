# What follows looks at the parent's files, in its workspace. It does so by the child's repository,
# whose configuration is ours: so no filter that the parent's repository names is run, whatever has
# changed. A work tree that is elsewhere, or none, has nothing to look at.

look_at_parent() { # PLACE COMMON
    place=$1 common=$2
    unset GIT_DIR
    # none of the paths has a newline: look has seen the workspace
    found=$(git rev-parse --is-inside-work-tree --show-toplevel --show-prefix \
        --path-format=absolute --git-path index 2>/dev/null) || return 1
    # shellcheck disable=SC2034
    { read -r inside; IFS= read -r top; IFS= read -r prefix; IFS= read -r index; } <<EOF
$found
EOF
    [ "$inside" = true ] && [ -f "$index" ] || return 1
    ours=$place/copy/index
    case $(echo "${index%/*}"/sharedindex.*) in
    *'*') cp -p "$index" "$ours" || exit 1 ;; # its time tells which files may have changed since
    *) # a part of it is in another file
        git ls-files -s -z --full-name :/ >"$place/copy/stages" || exit 1
        GIT_DIR=$place/git GIT_INDEX_FILE=$ours git update-index -z --index-info \
            <"$place/copy/stages" || exit 1
        ;;
    esac
    export GIT_DIR="$place/git" GIT_WORK_TREE="$top" GIT_INDEX_FILE="$ours"
}
# by what the parent's repository ignores beside the files .gitignore, too
ignoring() { git -c core.excludesFile="$common/info/exclude" "$@"; }
