# take PLACE REF COMMIT LEFT BASE [SETTLED...]: takes a commit over, and says what went wrong, if
# something did. Git checks no hash of the objects that it has, but index-pack computes all of them:
# so all objects are packed from our repository, and an object that is damaged there is found missing.

place=$1 ref=$2 commit=$3 left=$4 base=$5 ours=$1/fetch pack=
work=$1/work copied=$1/copied below=$1/git/ctx
shift 5
keep() { say kept "$1"; say end; exit 0; }
trap 'rm -rf "$ours"; [ -z "$pack" ] || rm -f "$objects/pack/pack-$pack.keep"' EXIT
objects=$(git rev-parse --path-format=absolute --git-path objects) || exit 1
printf 'ref: refs/heads/none\n' >"$ours/HEAD"
cp "$place/config" "$ours/config" || exit 1
GIT_DIR=$ours git cat-file --batch-all-objects --unordered \
    --batch-check='%(objecttype) %(objectname)' >"$ours/all" ||
    keep "its objects cannot be read"
sed -n 's/^commit //p' "$ours/all" >"$ours/commits"
printf '%s\n' "$objects" >"$ours/objects/info/alternates"
facts=$(git for-each-ref --format='%(objectname) [%(symref)] %(worktreepath)' "$ref") || exit 1
case $facts in
"$commit "*) ;;
"") keep "the branch no longer exists" ;;
"$left [] ")
    printf '%s\n' "$commit" "^$left" "^$base" |
        GIT_DIR=$ours git pack-objects --revs --local --stdout -q >"$ours/pack" ||
        keep "its objects are missing, or do not match their names"
    # without objects it is a header and a hash
    if [ "$(wc -c <"$ours/pack")" -gt 44 ]; then
        pack=$(git index-pack --stdin --strict --fix-thin --keep=ctxfs <"$ours/pack") ||
            keep "git found errors in its objects"
        pack=${pack#keep?}
    fi
    { [ "$(git cat-file -t "$commit")" = commit ] &&
        git rev-list --objects --quiet "$commit" --not --all; } ||
        keep "its objects are missing, or do not match their names"
    lost=$(git rev-list --max-count=1 "$left" --not "$commit" --exclude="$ref" --all) || exit 1
    [ -z "$lost" ] || keep "commits that only the branch has would be lost"
    git update-ref --no-deref "$ref" "$commit" "$left" || keep "cannot move the branch"
    ;;
"$left [] "*) keep "the branch is checked out by its parent" ;;
*) keep "the branch was moved" ;;
esac
say moved "$commit"
